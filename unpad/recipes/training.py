"""Recipe sections on training: plan, optimizer, adapters, run, collapse, checkpoints and generation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    WithJsonSchema,
    model_validator,
)

from unpad.errors import nearest
from unpad.recipes.section import Section, UserPath


class LoraSettings(Section):
    """Low-rank adapters of linear layers, trained while the weights of `train.init_from` stay as they are."""

    r: int = Field(8, ge=1)
    """Rank of an adapter."""
    alpha: int = Field(16, ge=1)
    """An adapter's output is scaled by alpha / r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """On the inputs of adapters."""
    targets: list[str] = Field(["*"], min_length=1)
    """Linear layers of blocks that get an adapter: patterns (fnmatch) of the whole name or of its last part, such as
    to_qkv; default all."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) instead (Kalajdzievski 2023, arXiv 2312.03732), for large ranks."""
    dora: bool = False
    """Also learn the norm of every output's weights, apart from their direction (Liu et al. 2024, arXiv 2402.09353)."""

    @property
    def scaling(self) -> float:
        """Factor on an adapter's output."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


STRATEGIES = Path(__file__).parents[1] / "batching" / "strategies"


def strategy_names() -> list[str]:
    """Names of the batching strategies, which are the files of batching/strategies/."""
    return sorted(path.stem for path in STRATEGIES.glob("[a-z]*.py"))


def _known_strategy(name: str) -> str:
    if name not in strategy_names():
        raise ValueError(f'there is no strategy "{name}"; {nearest(name, strategy_names())}')
    return name


AUTO = 0  # stands for tokens_per_micro: auto


def _known_size(given: Any) -> Any:
    """A number of tokens unchanged, AUTO for auto."""
    if given == "auto":
        return AUTO
    if (isinstance(given, int) and given < 1) or (isinstance(given, str) and not given.isdecimal()):
        raise ValueError(f"must be a whole number of at least 1, or auto, got {given}")
    return given


TokensPerMicro = Annotated[
    int,
    BeforeValidator(_known_size),
    PlainSerializer(lambda size: "auto" if size == AUTO else size, return_type=int | str),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["auto"]}]}),
]


class PlanSettings(Section):
    """Cutting of sequences, and their grouping into micro-batches and steps."""

    strategy: Annotated[str, AfterValidator(_known_strategy), WithJsonSchema({"enum": strategy_names()})] = "pack"
    """Batching strategy, a file of batching/strategies/."""
    tokens_per_step: int = Field(2048, ge=1)
    """Real tokens per optimizer step."""
    grow: dict[Annotated[int, Field(ge=2)], Annotated[int, Field(ge=1)]] = Field({})
    """tokens_per_step from an epoch or step of the stage on: {3: 4096, 6: 8192}; the first is 1."""
    grow_per: Literal["epoch", "step"] = "epoch"
    """What the keys of grow count; by step, steps grow within an epoch too."""
    batches_per_step: int | None = Field(None, ge=1)
    """Batches per optimizer step of fixed, dynamic, bucket and budget (gradient accumulation); default: until they hold
    tokens_per_step."""
    tokens_per_micro: TokensPerMicro = 4096
    """Tokens per micro-batch; limits memory and, but for budget, never changes results. auto: the most that memory
    holds, found when a run begins and kept in its recipe as a number."""
    batch_size: int = Field(8, ge=1)
    """Sequences per micro-batch of fixed, dynamic and bucket."""
    bucket_width: int = Field(16, ge=1)
    """Range of lengths in a bucket, in tokens."""
    row_tokens: int = Field(512, ge=1)
    """Length of a row of the strategy rows."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest sequence; default: the model's context."""
    overflow: Literal["error", "split", "truncate_right", "truncate_left", "drop"] = "split"
    """Handling of longer sequences; the ledger counts every token that is lost."""
    stride: int | None = Field(None, ge=1)
    """Distance between the starts of split windows, in tokens; default: no overlap."""
    cross_documents: bool = False
    """Join documents before windows are cut, as fixed blocks do."""
    drop_last: bool = False
    """Drop a last step smaller than the others."""
    window: int | None = Field(None, ge=1)
    """Sequences of an epoch that are planned at once, which bounds memory and what a resume plans again; default: all
    of up to 10 million, and 2 million of more."""

    @model_validator(mode="after")
    def _batches_exist(self) -> PlanSettings:
        if self.batches_per_step is not None and self.strategy in ("pack", "rows"):
            cut = f"{self.strategy} cuts steps by tokens_per_step"
            raise ValueError(f"{cut}; batches_per_step is of fixed, dynamic, bucket and budget")
        if self.batches_per_step is not None and self.grow:
            raise ValueError(
                "grow changes tokens_per_step, which batches_per_step takes the place of: give one of them"
            )
        return self

    def parts(self, epoch: int, first_step: int = 0) -> list[tuple[int | None, PlanSettings]]:
        """Settings of the parts of an epoch, and the steps of each; None for all remaining steps.

        Args:
            epoch: epoch of the stage, from 0; first_step: steps of the stage before it.
        """
        before = epoch if self.grow_per == "epoch" else first_step
        sizes = {0: self.tokens_per_step} | {key - 1: tokens for key, tokens in sorted(self.grow.items())}
        begun = max(begin for begin in sizes if begin <= before)
        later = [begin for begin in sizes if begin > before] if self.grow_per == "step" else []
        bounds = [before, *later]
        counts = [*(stop - start for start, stop in zip(bounds, later, strict=False)), None]
        tokens = [sizes[begin] for begin in (begun, *later)]
        return [
            (count, self.model_copy(update={"tokens_per_step": size, "grow": {}}))
            for count, size in zip(counts, tokens, strict=True)
        ]


class Ramp(Section):
    """A number that changes from `start` to `end` during a stage, and stays there."""

    start: float = 0.0
    """First value."""
    end: float
    """Last value."""
    steps: int | None = Field(None, ge=1)
    """Length of the ramp, in steps."""
    share: float | None = Field(None, gt=0, le=1)
    """Length of the ramp as a share of the stage's steps, instead of `steps`."""
    shape: Literal["linear", "cosine"] = "linear"
    """cosine: half a cosine period."""

    @model_validator(mode="after")
    def _one_length(self) -> Ramp:
        if (self.steps is None) == (self.share is None):
            raise ValueError("a ramp takes either steps or share")
        return self

    def at(self, step: int, total_steps: int) -> float:
        """Value at one step, counted from 0, of a stage of `total_steps`."""
        length = self.share * total_steps if self.share is not None else float(self.steps or 1)
        done = min(step / length, 1.0) if length > 0 else 1.0
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return self.start * (1 - done) + self.end * done


# Tags begin with a bracket, so that `first_fault` can drop them from the path of an error.
Weight = Annotated[
    Annotated[float, Tag("(number)")] | Annotated[Ramp, Tag("(ramp)")],
    Discriminator(lambda value: "(ramp)" if isinstance(value, dict | Ramp) else "(number)"),
]


class ParameterGroup(Section):
    """Parameters with their own learning rate, weight decay or clipping."""

    parameters: list[str] = Field(min_length=1)
    """Name patterns (fnmatch)."""
    lr_scale: float = Field(1.0, ge=0)
    """Factor on the learning rate."""
    weight_decay: float | None = Field(None, ge=0)
    """Weight decay; default: optim.weight_decay."""
    clip: float | None = Field(None, gt=0)
    """Largest gradient norm of this group alone; default: clipped together with all others."""


class OptimSettings(Section):
    """AdamW and its learning rate schedule."""

    lr: float = Field(1e-3, gt=0)
    """Peak learning rate."""
    lr_scale: float = Field(1.0, gt=0)
    """Factor on lr, so that a stage follows an override of lr."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Betas of AdamW."""
    eps: float = Field(1e-8, gt=0)
    """Epsilon of AdamW."""
    weight_decay: float = Field(0.01, ge=0)
    """Weight decay of matrices; biases, norms and embeddings have none."""
    clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm."""
    schedule: Literal["constant", "exponential", "warmup", "cosine", "restarts"] = "cosine"
    """Learning rate schedule of a stage; restarts: several cosines, each from the peak."""
    per: Literal["update", "epoch"] = "update"
    """Interval at which the learning rate changes: every step (update) or every epoch."""
    warmup: float = Field(0.05, ge=0, lt=1)
    """Share of the stage in which the learning rate warms up."""
    min_warmup: int = Field(0, ge=0)
    """Steps that the learning rate warms up for at least, but for no more than half of the stage."""
    floor: float = Field(0.01, ge=0, le=1)
    """Lowest learning rate, as a share of the peak."""
    restarts: int = Field(2, ge=0)
    """Number of restarts of the schedule `restarts`, in cycles of equal length."""
    first_cycle: int | None = Field(None, ge=1)
    """Length of the first cycle of the schedule `restarts`, in steps, or epochs with `per: epoch`; restarts as often as
    cycles fit, and the last cycle ends with the stage."""
    cycle_factor: float = Field(1.0, ge=1)
    """Length of each cycle over that of the one before; 1000 and 2 restart at 1000, 3000, 7000."""
    decay: float = Field(0.95, gt=0, le=1)
    """exponential: lr = peak * decay ** (epoch / decay_epochs)."""
    decay_epochs: float = Field(10.0, gt=0)
    """Epochs per factor `decay` of the schedule exponential."""
    groups: list[ParameterGroup] = Field([])
    """Parameters with their own settings; a parameter belongs to the first group that matches it."""

    @model_validator(mode="after")
    def _one_way_to_restart(self) -> OptimSettings:
        if self.first_cycle is not None and self.restarts != type(self).model_fields["restarts"].default:
            raise ValueError(
                "first_cycle restarts as often as its cycles fit, and restarts is a number: give one of them"
            )
        if self.first_cycle is None and self.cycle_factor != 1:
            raise ValueError("cycle_factor goes with first_cycle")
        return self


class TrainSettings(Section):
    """Length, evaluation and logging of a run."""

    max_steps: int | None = Field(None, ge=0)
    """Maximum of steps of the run, all stages together."""
    max_epochs: int | None = Field(None, ge=0)
    """Maximum of epochs per stage; 0 skips it."""
    max_minutes: float | None = Field(None, gt=0)
    """Minutes after which a training ends, to a step, as at max_steps; a resumed one has them anew."""
    min_steps: int | None = Field(None, ge=1)
    """Steps that a stage has at least, to a few: of small data it runs more epochs than max_epochs. max_steps and
    patience end it before; max_epochs on the command line counts without it."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of initial weights, plans, dropout and the held-out split."""
    init_from: UserPath | None = None
    """Run, Hugging Face folder or OWNER/MODEL of a hub with the run's initial weights and tokenizer."""
    new_head: bool = False
    """Take all of init_from but its head of classes, for pictures of other classes."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Label smoothing of the training loss; reported losses have none. Of preferences: the share of pairs that may be
    labelled the wrong way round, below 0.5."""
    beta: float = Field(0.1, gt=0)
    """Of preferences: factor of a reply's implicit reward, its log-probability over that under the weights that the
    stage starts from; smaller lets them go further from these."""
    freeze: list[str] = Field([])
    """Name patterns (fnmatch) of frozen parameters."""
    eval_every: int | None = Field(None, ge=1)
    """Steps between evaluations; default: every epoch, or as often in a stage that min_steps lengthens."""
    log_every: int = Field(10, ge=1)
    """Steps between lines on the screen; the files record every step."""
    patience: int | None = Field(None, ge=1)
    """Evaluations without progress before a stage stops early."""
    min_delta: Annotated[float, Field(ge=0)] | Literal["auto"] = 0.0
    """Smallest decrease of the held-out loss that counts as progress, also to the best weights; auto: 0.2 /
    sqrt(held-out targets), below which it may be chance."""
    weights: Literal["best", "last"] = "best"
    """Weights that a stage ends with: those of its best evaluation, or its last."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a loss or gradient that is not finite: stop, or skip the step and count it."""
    max_skips: int = Field(10, ge=0)
    """Maximum of steps that `skip` may skip in a run."""
    grad_norm_warning: float = Field(10.0, gt=0)
    """Gradient norms above this are marked, with a warning."""
    threads: int | None = Field(None, ge=1, le=1024)
    """Processor threads; default: all cores."""
    compile: Literal["auto", "off"] = "auto"
    """auto: on a GPU in half precision torch.compile compiles the blocks, in the first update."""
    checkpoint_blocks: bool = False
    """Activation checkpointing: the backward pass computes every block again, for less memory and a third more time."""
    sums: Literal["auto", "exact", "fast"] = "auto"
    """Sums of gradients over micro-batches and processes. exact: bits are equal for any number of processes; fast: in
    fp32, with bits that depend on it; auto: fast on several GPUs, else exact."""
    shard: Literal["none", "full"] = "none"
    """full: every process holds some rows of each weight, gradient and moment, by FSDP2 of torch, for models that one
    device does not hold; bits depend on the number of processes."""
    timeout: float = Field(1800.0, gt=0, le=1e6)
    """Seconds that a process waits for another before it gives it up for lost; one that reads data or saves tells that
    it is at work."""
    allocator: Literal["auto", "system", "keep"] = "auto"
    """keep: the process keeps freed memory, faster but larger; auto: keep, except low_power and GPUs."""


# Settings of `collapse.preset`; fast reads five times as often and confirms a collapse after two readings.
COLLAPSE_PRESETS: dict[str, dict[str, int]] = {"standard": {}, "fast": {"every": 20, "patience": 2, "warmup": 200}}


class CollapseSettings(Section):
    """Detection of posterior collapse, for models with a latent, and the reaction to it."""

    preset: Literal["standard", "fast"] = "standard"
    """fast: every 20, patience 2 and warmup 200, which confirms a collapse within 40 steps of its first sign at more
    cost; other fields override it."""
    policy: Annotated[
        Literal["off", "warn", "save", "stop", "recover"],
        BeforeValidator(lambda value: "off" if value is False else value),  # YAML reads `off` as false
    ] = "warn"
    """Reaction to a confirmed collapse. save: keep the weights of the last healthy reading; recover: continue from them
    with less weight on the KL term."""
    every: int = Field(100, ge=1)
    """Steps between readings; fewer detect a collapse sooner and cost more."""
    window: int = Field(256, ge=2)
    """Sets per reading."""
    patience: int = Field(3, ge=1)
    """Consecutive collapsed readings that confirm a collapse."""
    warmup: int = Field(500, ge=0)
    """Steps at the start of a stage, or after a recovery, without readings that count."""
    active_variance: float = Field(0.01, gt=0)
    """A unit is active if its mean has a larger variance over sets."""
    active_share: float = Field(0.1, ge=0, le=1)
    """A smaller share of active units is a sign of collapse."""
    dead_kl: float = Field(0.01, gt=0)
    """A dimension is dead if its KL is smaller, in nats."""
    dead_share: float = Field(0.9, ge=0, le=1)
    """A larger share of dead dimensions is a sign of collapse."""
    probe_gap: float = Field(0.02, gt=0)
    """Relative increase of the loss with latents of other sets; a smaller one is a sign of collapse."""
    factor: float = Field(0.5, gt=0, lt=1)
    """Factor of recover on the weight of the KL term."""
    recoveries: int = Field(3, ge=1)
    """Maximum of recoveries; the next collapse stops the run."""

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("preset"), str):
            return {**COLLAPSE_PRESETS.get(values["preset"], {}), **values}
        return values


class CheckpointSettings(Section):
    """Saving of checkpoints."""

    every: int | None = Field(None, ge=1)
    """Steps between checkpoints; default: every epoch, or as train.eval_every then does."""
    every_seconds: float | None = Field(None, gt=0)
    """Seconds after which a step is followed by a checkpoint besides; default: none."""
    keep: int = Field(2, ge=2)
    """Newest checkpoints to keep besides the best; at least 2, since one may be damaged."""


class LogSettings(Section):
    """External loggers, in addition to the run's own report."""

    to: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(["tensorboard"])
    """tensorboard: files in the run directory; wandb and mlflow, each with the extra of its name, get the recipe and
    the same numbers, and no data."""
    project: str = Field("unpad", min_length=1, max_length=100)
    """Project of wandb, experiment of MLflow."""


class GenerateSettings(Section):
    """Sampling of continuations and replies."""

    max_new_tokens: int = Field(128, ge=1)
    """Maximum of tokens in a continuation or reply."""
    temperature: float = Field(0.0, ge=0, le=100)
    """Sampling temperature; 0 is greedy."""
    top_k: int = Field(0, ge=0)
    """Sample from this many most probable tokens; 0 is off."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the fewest most probable tokens that reach this probability together, after top_k."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Least share of the largest probability, after top_p."""
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    """Above 1, tokens that already occurred become less probable."""
    presence_penalty: float = Field(0.0, ge=-100, le=100)
    """Taken from scores of the reply's tokens."""
    frequency_penalty: float = Field(0.0, ge=-100, le=100)
    """Taken once for each occurrence."""
    json_schema: dict[str, Any] | None = None
    """JSON Schema of the replies; needs the extra `schema`."""
    beams: int = Field(1, ge=1, le=64)
    """Width of the beam search; 1 is off."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of matrix products; auto: the faster of bf16 and fp32 for one prompt, by a measurement."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of sampling; on the command line the next prompt or reply draws with the seed after it, unless `seed=` is
    given."""
