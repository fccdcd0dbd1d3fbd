"""Settings of pruning: layers that drop visual tokens, method of choice, and training of the heads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from unpad.nn.block import BEFORE
from unpad.recipes.section import Section
from unpad.recipes.training import Ramp, Weight


class DiscriminatorConfig(Section):
    """Settings of the classifier of hidden states into whole model and pruned model."""

    layers: list[int] = Field(
        [-1], min_length=1, description="Blocks after which it compares the text, counted from 0, or from the end."
    )
    inner: int = Field(512, ge=1, description="Channels inside.")
    reinit: float = Field(0.0, ge=0, le=1, description="Probability per step that all its weights are reinitialized.")


class PruneConfig(Section):
    """Pruning: the visual tokens that the language model drops, and the blocks before or after which it does."""

    layers: list[int] = Field(
        min_length=1, description="Blocks after which tokens are removed, counted from 0; -1 before the first."
    )
    method: Literal["learned", "random", "uniform", "attention", "class_token"] = Field(
        "learned", description="Who judges tokens: heads that learn it, or a ranking to compare them with."
    )
    inner: int = Field(512, ge=2, description="Channels inside a head.")
    heads: int = Field(4, ge=1, description="Attention heads of a head.")
    attention_weight: Literal["none", "fixed", "learned"] = Field(
        "none", description="Add to a head's logits what tokens receive from the question, times 0.5 or learned."
    )
    keep: float | None = Field(
        None, gt=0, le=1, description="Share that stays of the visual tokens of a sample that reach each layer."
    )
    threshold: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="Probability, with one fixed draw of the noise of training, above which heads keep a token, where "
        "keep does not say how many.",
    )
    target: float | None = Field(
        None,
        gt=0,
        description="What sparsity wants kept of a sample after the last layer: up to 1 a share, above it tokens. "
        "Default what keep leaves, and 0.5 without it.",
    )
    one_sided: bool = Field(True, description="Keeping less than the target costs nothing.")
    temperature: Weight = Field(
        1.0, description="Of the heads' probabilities: a number, or a ramp such as {start: 1, end: 0.1, share: 0.5}."
    )
    discriminator: DiscriminatorConfig | None = Field(
        None, description="What the terms `adversarial` and `discriminator` are made with."
    )

    @property
    def learns(self) -> bool:
        return self.method == "learned"

    @property
    def wanted(self) -> tuple[float, Literal["tokens", "ratio"]]:
        """Target of sparsity, and its unit."""
        if self.target is None:
            return (0.5 if self.keep is None else self.keep ** len(self.layers)), "ratio"
        return self.target, "ratio" if self.target <= 1 else "tokens"

    def temperature_at(self, step: int, total_steps: int) -> float:
        """Temperature of one step of a stage, counted from 0."""
        course = self.temperature
        return course.at(step, total_steps) if isinstance(course, Ramp) else course

    @model_validator(mode="after")
    def _fit(self) -> PruneConfig:
        if self.layers != sorted({*self.layers}) or self.layers[0] < BEFORE:
            raise ValueError(f"layers {self.layers} are not ascending numbers of blocks, counted from 0 (-1: before)")
        if self.layers[0] == BEFORE and (self.method == "attention" or self.attention_weight != "none"):
            raise ValueError("layers [-1]: before the first block there is no attention to judge by; begin with 0")
        if self.inner % 2 or self.inner % self.heads:
            raise ValueError(f"inner {self.inner} is not an even multiple of heads {self.heads}")
        course = self.temperature
        if min((course.start, course.end) if isinstance(course, Ramp) else (course,)) <= 0:
            raise ValueError("temperature divides logits; it must be more than 0, at the start of a ramp too")
        if self.learns:
            return self
        if self.keep is None:
            raise ValueError(f"method={self.method} ranks tokens; keep must say which share of them stays")
        for name in ("target", "discriminator"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} teaches heads, and method={self.method} has none")
        if self.attention_weight != "none":
            raise ValueError(f"attention_weight is of heads, and method={self.method} has none")
        return self

    def check_blocks(self, blocks: int) -> None:
        """Reject numbers of blocks that a model does not have, or that have no effect.

        Raises:
            ValueError: names the number.
        """
        if self.layers[-1] >= blocks - 1:
            what = f"nothing reads visual tokens after the last of {blocks} blocks"
            raise ValueError(f"prune.layers {self.layers}: {what}, so there is nothing to save")
        for layer in self.discriminator.layers if self.discriminator else ():
            if not -blocks <= layer < blocks:
                raise ValueError(f"prune.discriminator.layers {layer} is none of {blocks} blocks")
            if layer % blocks <= self.layers[0]:
                raise ValueError(
                    f"prune.discriminator.layers {layer}: nothing is pruned up to block {self.layers[0]}, after which"
                    " there is nothing to compare"
                )
