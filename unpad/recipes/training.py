"""Sections of a recipe that say what is done with its data: plans, optimisation, training, saving, generation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator

from unpad.errors import nearest
from unpad.recipes.section import Section

STRATEGIES = Path(__file__).parents[1] / "batching" / "strategies"


def strategy_names() -> list[str]:
    """Names of the batching strategies: the files of batching/strategies/."""
    return sorted(path.stem for path in STRATEGIES.glob("[a-z]*.py"))


def _known_strategy(name: str) -> str:
    if name not in strategy_names():
        raise ValueError(f'there is no strategy "{name}"; {nearest(name, strategy_names())}')
    return name


class PlanSettings(Section):
    strategy: Annotated[str, AfterValidator(_known_strategy), WithJsonSchema({"enum": strategy_names()})] = Field(
        "pack", description="A file of batching/strategies/."
    )
    tokens_per_step: int = Field(2048, ge=1, description="Real tokens per optimizer update.")
    grow: dict[Annotated[int, Field(ge=2)], Annotated[int, Field(ge=1)]] = Field(
        {}, description="Other tokens_per_step from an epoch of the stage on: {3: 4096, 6: 8192}; the first is 1."
    )
    tokens_per_micro: int = Field(
        4096, ge=1, description="Tokens per forward pass; limits memory, never changes results."
    )
    batch_size: int = Field(8, ge=1, description="Sequences per forward pass of fixed, dynamic and bucket.")
    bucket_width: int = Field(16, ge=1, description="Lengths that share a bucket, in tokens.")
    row_tokens: int = Field(512, ge=1, description="Length of a row of the strategy rows.")
    max_tokens: int | None = Field(None, ge=1, description="Longest sequence; default the model's context.")
    overflow: Literal["error", "split", "truncate_right", "truncate_left", "drop"] = Field(
        "split", description="What happens to a longer sequence; nothing is lost silently, the ledger counts it."
    )
    stride: int | None = Field(
        None, ge=1, description="Windows of split start every `stride` tokens; default no overlap."
    )
    cross_documents: bool = Field(False, description="Join documents before windows are cut, as fixed blocks do.")
    drop_last: bool = Field(False, description="Leave out a last step smaller than tokens_per_step.")

    def at_epoch(self, epoch: int) -> PlanSettings:
        """The settings of one epoch of a stage, counted from 0: with the tokens per update that hold then."""
        begun = [first for first in self.grow if first <= epoch + 1]
        return self.model_copy(update={"tokens_per_step": self.grow[max(begun)], "grow": {}}) if begun else self


class Ramp(Section):
    """A number that changes from `start` to `end` as a stage goes on, and stays there."""

    start: float = Field(0.0, description="First value.")
    end: float = Field(description="Last value.")
    steps: int | None = Field(None, ge=1, description="Updates that it takes.")
    share: float | None = Field(None, gt=0, le=1, description="Instead of steps: the share of the stage's updates.")
    shape: Literal["linear", "cosine"] = Field("linear", description="cosine: along half a cosine, as loss ramps do.")

    @model_validator(mode="after")
    def _one_length(self) -> Ramp:
        if (self.steps is None) == (self.share is None):
            raise ValueError("a ramp takes either steps or share")
        return self

    def at(self, step: int, total_steps: int) -> float:
        """The number for one update of a stage of `total_steps`, counted from 0."""
        length = self.share * total_steps if self.share is not None else float(self.steps or 1)
        done = min(step / length, 1.0) if length > 0 else 1.0
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return self.start * (1 - done) + self.end * done


# What Discriminator puts into the path of an error begins with a bracket, and `recipe_file.py` takes it out again.
Weight = Annotated[
    Annotated[float, Tag("(number)")] | Annotated[Ramp, Tag("(ramp)")],
    Discriminator(lambda value: "(ramp)" if isinstance(value, dict | Ramp) else "(number)"),
]


class ParameterGroup(Section):
    """Parameters that learn at a rate of their own."""

    parameters: list[str] = Field(min_length=1, description="Name patterns (fnmatch).")
    lr_scale: float = Field(1.0, ge=0, description="Factor on the learning rate.")
    weight_decay: float | None = Field(None, ge=0, description="Default optim.weight_decay.")
    clip: float | None = Field(
        None, gt=0, description="Largest norm of this group's own gradients; default: clipped with all the others."
    )


class OptimSettings(Section):
    lr: float = Field(1e-3, gt=0, description="Peak learning rate.")
    lr_scale: float = Field(1.0, gt=0, description="Factor on lr, so that a stage follows a changed lr.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Of AdamW.")
    eps: float = Field(1e-8, gt=0, description="Of AdamW.")
    weight_decay: float = Field(0.01, ge=0, description="On matrices; never on biases, norms and embeddings.")
    clip: float | None = Field(1.0, gt=0, description="Largest global gradient norm.")
    schedule: Literal["constant", "exponential", "warmup", "cosine", "restarts"] = Field(
        "cosine", description="Learning rate over a stage; restarts: several cosines, each from the peak."
    )
    per: Literal["update", "epoch"] = Field("update", description="When the learning rate steps.")
    warmup: float = Field(0.05, ge=0, lt=1, description="Share of the stage spent warming up.")
    floor: float = Field(0.01, ge=0, le=1, description="Lowest learning rate, as a share of the peak.")
    restarts: int = Field(2, ge=0, description="Restarts of the schedule `restarts`.")
    decay: float = Field(0.95, gt=0, le=1, description="exponential: lr = peak * decay ** (epoch / decay_epochs).")
    decay_epochs: float = Field(10.0, gt=0, description="Epochs over which exponential multiplies by `decay`.")
    groups: list[ParameterGroup] = Field(
        [], description="Parameters with rates of their own; each belongs to the first group that names it."
    )


class TrainSettings(Section):
    max_steps: int | None = Field(None, ge=0, description="The run ends after this many updates, all stages together.")
    max_epochs: int | None = Field(None, ge=0, description="Each stage ends after this many epochs; 0 skips it.")
    seed: int = Field(0, ge=0, lt=2**31, description="Of initial weights, plans, dropout and the held-out part.")
    init_from: str | None = Field(None, description="A run whose weights and tokenizer this one starts from.")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Of the trained loss; reported losses have none.")
    freeze: list[str] = Field([], description="Name patterns (fnmatch) of parameters that stay as they are.")
    eval_every: int | None = Field(None, ge=1, description="Updates between held-out checks; default every epoch.")
    log_every: int = Field(10, ge=1, description="Updates between lines on the screen; the files get every update.")
    patience: int | None = Field(None, ge=1, description="Held-out checks without progress before a stage stops early.")
    min_delta: float = Field(0.0, ge=0, description="Smallest fall of the held-out loss that counts as progress.")
    weights: Literal["best", "last"] = Field(
        "best", description="What a stage ends with: the weights of its best held-out check, or its last."
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="After a loss or gradient that is not finite: stop, or skip the step and count it."
    )
    max_skips: int = Field(10, ge=0, description="Most steps of a run that `skip` may skip.")
    grad_norm_warning: float = Field(10.0, gt=0, description="Larger gradient norms are marked, with a warning.")
    threads: int | None = Field(None, ge=1, le=1024, description="Processor threads; default all cores.")
    allocator: Literal["auto", "system", "keep"] = Field(
        "auto",
        description="keep: freed memory stays with the process, faster and larger; auto: not for low_power, GPUs.",
    )


class CollapseSettings(Section):
    """How closely the latent of a model that has one is watched, and what follows when it is not used any more."""

    policy: Literal["off", "warn", "save", "stop", "recover"] = Field(
        "warn",
        description="What follows a confirmed collapse. save: the weights of the last healthy reading are kept aside; "
        "recover: training goes on from them with less weight on the KL term.",
    )
    every: int = Field(100, ge=1, description="Updates between readings; fewer see a collapse sooner and cost more.")
    window: int = Field(256, ge=2, description="Sets that a reading rests on.")
    patience: int = Field(3, ge=1, description="Readings in a row that confirm a collapse.")
    warmup: int = Field(500, ge=0, description="Updates of a stage, or after a recovery, before readings can count.")
    active_variance: float = Field(0.01, gt=0, description="A unit is active when its mean varies more over sets.")
    active_share: float = Field(0.1, ge=0, le=1, description="Fewer active units are a sign of collapse.")
    dead_kl: float = Field(0.01, gt=0, description="A dimension is dead when its KL is smaller, in nats.")
    dead_share: float = Field(0.9, ge=0, le=1, description="More dead dimensions are a sign of collapse.")
    probe_gap: float = Field(
        0.02, gt=0, description="It is a sign of collapse when latents of other sets cost a smaller share more."
    )
    factor: float = Field(0.5, gt=0, lt=1, description="What recover multiplies the weight of the KL term by.")
    recoveries: int = Field(3, ge=1, description="The next collapse after so many recoveries stops the run.")


class CheckpointSettings(Section):
    every: int | None = Field(None, ge=1, description="Updates between checkpoints; default every epoch.")
    keep: int = Field(2, ge=2, description="Newest checkpoints kept besides the best; at least 2, one may be damaged.")


class GenerateSettings(Section):
    max_new_tokens: int = Field(128, ge=1, description="Most tokens of a continuation or reply.")
    temperature: float = Field(0.0, ge=0, le=100, description="0 is greedy.")
    top_k: int = Field(0, ge=0, description="Draw from this many most probable tokens; 0 is off.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Draw from the most probable tokens that reach this share together, after top_k."
    )
    repetition_penalty: float = Field(
        1.0, gt=0, le=100, description="Above 1, tokens that occurred already become less probable."
    )
    beams: int = Field(1, ge=1, le=64, description="Width of a beam search; 1 is off.")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field("auto", description="auto: as training chooses.")
    seed: int = Field(0, ge=0, lt=2**31, description="Of the draws.")
