"""Variants that `unpad bench` compares, and their speed: turns of training, and tables of their rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from unpad.batching.batch import RaggedBatch
from unpad.batching.loader import load_steps
from unpad.batching.plan import Plan
from unpad.errors import PlanError, RecipeError
from unpad.interchange.origin import open_recipe
from unpad.models import decoder
from unpad.nn.flops import LayerSizes, sizes_of, training_operations
from unpad.nn.native import library
from unpad.nn.native import library as native
from unpad.nn.precision import DTYPES
from unpad.recipes.recipe import Recipe, ResolvedStage
from unpad.terminal.table import text_table
from unpad.training.reference import log_probabilities_of_pairs
from unpad.training.rehearsal import Rehearsal
from unpad.training.setup import Setup, prepare_setup
from unpad.training.stage import StageSetup, epoch_plan, make_stage, prepare_model
from unpad.trials.bench.measure import (
    CEILING_SIZE,
    Contender,
    Rounds,
    Spread,
    Work,
    ceiling_size,
    matrix_ceiling,
    measure_rounds,
    spread,
)

BATCH_SIZES = (1, 2, 4, 8, 16)


def prepare(recipe: str, overrides: Sequence[str]) -> Setup:
    """Load the recipe's data and build its model, as at the start of a run.

    Raises:
        RecipeError: no stage has data to train on.
    """
    setup = prepare_setup(open_recipe(recipe, overrides), Path(), None)
    last = setup.stages[-1]
    prepare_model(setup.model, last)
    if last.of_pairs and setup.data.replies is not None:
        setup.data.replies.reference[:] = log_probabilities_of_pairs(setup, last, setup.data)
    if not all_data(setup, last.recipe).train_ids.size:
        raise RecipeError("no stage has data to train on", where="stages", fix="set the data that they use")
    return setup


@dataclass(frozen=True)
class BenchVariant:
    """A batching variant: a recipe that differs from the user's only in its plan, and its first epoch."""

    name: str
    setup: Setup
    stage: StageSetup
    plan: Plan


def strategy_variants(setup: Setup) -> list[BenchVariant]:
    """Variants of one sequence per micro-batch, never padded, then of fixed, dynamic, bucket and pack."""
    size = setup.stages[-1].recipe.plan.batch_size
    alone: dict[str, Any] = {"strategy": "pack", "tokens_per_micro": 1}  # a micro-batch holds one sequence at least
    return [
        _variant(setup, "one at a time", **alone, tokens_per_step=1),
        _variant(setup, "one at a time, accumulated", **alone),
        _variant(setup, f"padded to the context, batches of {size}", strategy="fixed"),
        _variant(setup, f"dynamic padding, batches of {size}", strategy="dynamic"),
        _variant(setup, f"buckets, batches of {size}", strategy="bucket"),
        _variant(setup, "packed, no padding", strategy="pack"),
    ]


def size_variants(setup: Setup) -> list[BenchVariant]:
    """Variants of padded batches of every size of `BATCH_SIZES`, one step per batch."""
    fields: dict[str, Any] = {"strategy": "dynamic", "tokens_per_step": 1}
    return [_variant(setup, f"batch size {size}", **fields, batch_size=size) for size in BATCH_SIZES]


def _variant(setup: Setup, name: str, **fields: Any) -> BenchVariant:
    recipe = setup.stages[-1].recipe
    recipe = recipe.model_copy(update={"plan": recipe.plan.model_copy(update={"grow": {}, **fields})})
    stage = all_data(setup, recipe)
    first = epoch_plan(stage, 0)
    if first.num_steps == 0:
        fix = "lower plan.tokens_per_step, or set plan.drop_last=false and plan.overflow=split"
        raise PlanError(f"{name}: the plan drops every token", where="plan", fix=fix)
    return BenchVariant(name, setup, stage, first)


def all_data(setup: Setup, recipe: Recipe) -> StageSetup:
    """A stage with the data of all stages that train like the last, with the settings of `recipe`."""
    of_pairs = setup.stages[-1].of_pairs
    used = {kind for stage in setup.stages for kind in stage.kinds if stage.of_pairs == of_pairs}
    return make_stage(ResolvedStage("bench", tuple(used), recipe), setup.data, setup.model.config.longest)


def every_update(setup: Setup, stage: StageSetup, first_epoch: int = 0) -> Iterator[list[RaggedBatch]]:
    """Yield the micro-batches of one step after the other, epoch after epoch."""
    for epoch in count(first_epoch):
        epoch_steps = epoch_plan(stage, epoch)
        grouped = not library.computes(DTYPES[setup.precision])
        yield from load_steps(setup.data.load, epoch_steps, setup.device, group_lengths=grouped)


FAR = 1 << 20  # epochs that no bench reaches
WARM_UPDATES = 2  # untimed steps of every side before the first round
WITHOUT_NATIVE = ", torch"  # ends the name of the side that measures a row without native kernels
MIB = 2**20


@dataclass(frozen=True)
class Effort:
    """Extent of a bench.

    Args:
        rounds: turns of every row.
        seconds: timed part of a turn; a step that has begun is finished.
        updates: steps of every row of the table of equal steps.
        ceiling_size: largest number of rows of the matrix product that measures the machine's limit.
    """

    rounds: int = 3
    seconds: float = 1.5
    updates: int = 100
    ceiling_size: int = CEILING_SIZE


@dataclass(frozen=True)
class SpeedRow:
    """Measurements of one way to batch.

    Args:
        plan: its plan settings.
        tokens_per_update, tokens_per_pass: real tokens of a step and of a micro-batch, means over an epoch.
        sequence_tokens, padded_length: tokens of a sequence before and after padding, means over an epoch.
        pad_share: share of the computed tokens that is padding, over an epoch.
        largest_pass: tokens of the epoch's largest micro-batch, padding included.
        rates: real tokens per second as a run of the recipe computes, one per round.
        torch_rates: the same with the native kernels switched off; empty where a run does not use them anyway.
        shares: operations that real tokens need over those of a large matrix product in the same time, one per round;
            empty unless the model is a decoder, as only decoders' operations are counted.
        updates: timed steps, all rounds together.
        peak_bytes: peak memory of a step with the epoch's largest micro-batch, in a process of its own or allocated on
            the GPU.
        base_bytes: the same before model, gradients and optimizer state exist.
    """

    name: str
    plan: dict[str, Any]
    tokens_per_update: float
    tokens_per_pass: float
    sequence_tokens: float
    padded_length: float
    pad_share: float
    largest_pass: int
    rates: list[float]
    torch_rates: list[float]
    shares: list[float]
    updates: int
    peak_bytes: int
    base_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Memory that training adds: model, gradients, optimizer state, activations of the largest micro-batch."""
        return self.peak_bytes - self.base_bytes

    def rate(self) -> Spread:
        """Real tokens per second."""
        return spread(self.rates)

    def times(self, other: SpeedRow) -> Spread:
        """Speed relative to another row, one ratio per round."""
        return spread([mine / theirs for mine, theirs in zip(self.rates, other.rates, strict=True)])

    def native_gain(self) -> Spread | None:
        """Speed with the native kernels relative to without, one ratio per round; None where they are not used."""
        if not self.torch_rates:
            return None
        return spread([fast / slow for fast, slow in zip(self.rates, self.torch_rates, strict=True)])

    def ceiling_share(self) -> Spread | None:
        """Share of the machine's ceiling spent on operations that the model needs; None if these are not counted."""
        return spread(self.shares) if self.shares else None


def measure(setup: Setup, variants: Sequence[BenchVariant], effort: Effort) -> Rounds:
    """Let all variants take turns; where a run uses native kernels, each of them also without."""
    rehearsal = Rehearsal(setup, variants[0].stage)  # shared: a copy of a large model per row would not fit
    rehearsal.rate(0.0)  # the same work, with weights unchanged by other rows
    sides = {}
    for variant in variants:
        sides[variant.name] = _side(rehearsal, variant, True)
        if native.enabled():
            sides[variant.name + WITHOUT_NATIVE] = _side(rehearsal, variant, False)
    dtype = DTYPES[setup.precision]
    size = ceiling_size(dtype, setup.device, effort.ceiling_size)

    def ceiling() -> float:
        return matrix_ceiling(dtype, setup.device, size)

    return measure_rounds(sides, effort.rounds, effort.seconds, warm_steps=WARM_UPDATES, ceiling=ceiling)


def _side(rehearsal: Rehearsal, variant: BenchVariant, as_run: bool) -> Contender:
    # The other path uses other epochs: on batches that the first has just seen, every shape would already be prepared.
    updates = every_update(variant.setup, variant.stage, 0 if as_run else FAR)
    sizes = counted_sizes(variant.setup)

    def step() -> Work:
        with nullcontext() if as_run else native.switched_off():
            micros = next(updates)
            rehearsal.step(micros)
        lengths = [length for batch in micros for length in batch.layout.lengths().tolist()]
        targets = sum(batch.num_targets for batch in micros)
        return Work(sum(lengths), training_operations(sizes, lengths, targets) if sizes else 0)

    return Contender(step)


def counted_sizes(setup: Setup) -> LayerSizes | None:
    """Sizes that determine the operations of a decoder; None for another model."""
    config = setup.model.config
    return sizes_of(config, setup.data.num_outputs) if isinstance(config, decoder.Config) else None


def to_row(variant: BenchVariant, measured: Rounds, memory: tuple[int, int]) -> SpeedRow:
    """The row of a variant from its measurements; `memory` comes from `bench_memory.peaks`."""
    plan, settings = variant.plan, variant.stage.recipe.plan
    fields = ("strategy", "tokens_per_step", "tokens_per_micro", "batch_size", "bucket_width")
    both = [name for name in (variant.name, variant.name + WITHOUT_NATIVE) if name in measured.turns]
    return SpeedRow(
        variant.name,
        plan={field: getattr(settings, field) for field in fields},
        tokens_per_update=plan.real_tokens / plan.num_steps,
        tokens_per_pass=plan.real_tokens / plan.num_micros,
        sequence_tokens=plan.real_tokens / len(plan.order),
        padded_length=plan.padded_tokens / len(plan.order),
        pad_share=plan.pad_share,
        largest_pass=int(plan.micro_cells.max()),
        rates=measured.rates(variant.name),
        torch_rates=measured.rates(both[1]) if len(both) == 2 else [],
        shares=measured.shares(variant.name) if counted_sizes(variant.setup) else [],
        updates=sum(turn.steps for name in both for turn in measured.turns[name]),
        peak_bytes=memory[0],
        base_bytes=memory[1],
    )


# --------------------------------------------------------------------------- tables


def row_values(row: SpeedRow, first: SpeedRow) -> dict[str, Any]:
    """A row as JSON values, with derived ones; `first` is the row it is compared with."""
    gain, share = row.native_gain(), row.ceiling_share()
    return {
        **asdict(row),
        "memory_bytes": row.memory_bytes,
        "tokens_per_second": asdict(row.rate()),
        "sequences_per_second": row.rate().median / row.sequence_tokens,
        "times_first": asdict(row.times(first)),
        "native_gain": None if gain is None else asdict(gain),
        "ceiling_share": None if share is None else asdict(share),
    }


COLUMNS = (
    *("tokens/s", "quartiles", "times", "torch", "gain", "ceiling"),
    *("seqs/s", "length", "padding", "per pass", "per update", "memory"),
)


def table(title: str, rows: list[SpeedRow]) -> list[str]:
    """Rows as lines of text, compared with the first."""
    return text_table([title, *COLUMNS], [[row.name, *_cells(row, rows[0])] for row in rows])


def _cells(row: SpeedRow, first: SpeedRow) -> list[str]:
    rate, gain, share = row.rate(), row.native_gain(), row.ceiling_share()
    return [
        f"{rate.median:,.0f}",
        f"{rate.low:,.0f} to {rate.high:,.0f}",
        f"{row.times(first).median:.1f}x",
        f"{spread(row.torch_rates).median:,.0f}" if row.torch_rates else "-",
        f"{gain.median:.2f}x" if gain else "-",
        f"{share.median:.1%}" if share else "-",
        f"{rate.median / row.sequence_tokens:,.0f}",
        f"{row.padded_length:.1f}",
        f"{row.pad_share:.1%}",
        f"{row.tokens_per_pass:,.0f}",
        f"{row.tokens_per_update:,.0f}",
        f"{row.memory_bytes / MIB:,.0f} MiB",
    ]
