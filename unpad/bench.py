"""`unpad bench`: speed, padding, memory and quality of every way to batch, on the user's own data, model and machine.

What is timed is training as it runs: the loader's work, forward, backward, clipping and update. All ways take turns in
one process, round after round, each for the same time and with the same weights, with the native kernels and without
them, so that a machine that slows down or speeds up does so for all of them. Memory is measured in a process per row,
where nothing that an earlier row left behind can hide what this one takes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unpad.batch import RaggedBatch
from unpad.errors import PlanError, RecipeError
from unpad.evaluate.metrics import held_out
from unpad.flops import sizes_of, training_operations
from unpad.loader import load_steps
from unpad.measure import (
    CEILING_SIZE,
    Rounds,
    Side,
    Spread,
    Work,
    describe_machine,
    matrix_ceiling,
    measure_rounds,
    spread,
)
from unpad.memory import peak_memory, process_memory, restart_peak, return_freed_memory
from unpad.monitor import Timers
from unpad.native import library as native
from unpad.objective import Objective
from unpad.optim import freeze, make_optimizer
from unpad.plan.plan import Plan
from unpad.recipe import Stage
from unpad.recipe_file import load_recipe
from unpad.setup import Setup, epoch_plan, prepare_setup, stage_sequences
from unpad.step import LossScaler, train_step

BATCH_SIZES = (1, 2, 4, 8, 16)
TRAINED_SIZES = (1, 4, 8)  # of the table of equal updates
CARDS = (8, 16, 32)  # GiB
FAR = 1 << 20  # epochs that no bench reaches
WARM_UPDATES = 2  # of every side, before the first round
WITHOUT_NATIVE = ", torch"  # ends the name of the side that measures a row without native kernels
MIB, GIB = 2**20, 2**30
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # of matrix products


@dataclass(frozen=True)
class Effort:
    """How much a bench measures.

    Args:
        rounds: how often every row has its turn.
        seconds: timed part of a turn; an update that has begun is finished.
        updates: of every row of the table of equal updates.
        ceiling_size: rows of the matrices whose product stands for what the machine can do.
    """

    rounds: int = 3
    seconds: float = 1.5
    updates: int = 100
    ceiling_size: int = CEILING_SIZE


QUICK = Effort(rounds=3, seconds=0.3, updates=20)


@dataclass(frozen=True)
class Row:
    """One way to batch.

    Args:
        plan: the plan settings that make it.
        tokens_per_update, tokens_per_pass: real tokens of an update and of a forward pass, means over an epoch.
        sequence_tokens, padded_length: tokens of a sequence before and after padding, means over an epoch.
        pad_share: share of the computed tokens that is padding, over an epoch.
        largest_pass: tokens of the epoch's largest forward pass, padding included.
        rates: real tokens per second as a run of the recipe computes, one per round.
        torch_rates: the same with the native kernels switched off; empty where a run does not use them anyway.
        shares: operations that real tokens need over those of a large matrix product in the same time, one per round.
        updates: timed updates, all rounds together.
        peak_bytes: memory at the peak of an update with the epoch's largest micro-batch: of a process that does
            nothing else, or allocated on the GPU.
        base_bytes: the same before model, gradients and optimizer state were made.
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
        """What training adds: model, gradients, optimizer state and the activations of the largest micro-batch."""
        return self.peak_bytes - self.base_bytes

    def rate(self) -> Spread:
        """Real tokens per second."""
        return spread(self.rates)

    def times(self, other: Row) -> Spread:
        """How many times as fast as another row, round by round."""
        return spread([mine / theirs for mine, theirs in zip(self.rates, other.rates, strict=True)])

    def native_gain(self) -> Spread | None:
        """How many times as fast the native kernels make it, round by round; None where they are not used."""
        if not self.torch_rates:
            return None
        return spread([fast / slow for fast, slow in zip(self.rates, self.torch_rates, strict=True)])

    def ceiling_share(self) -> Spread:
        """Share of the machine's ceiling that goes into what the model needs."""
        return spread(self.shares)


@dataclass(frozen=True)
class Trained:
    """One batch size after a number of updates that is the same for all.

    Args:
        tokens: real tokens trained on.
        seconds: of all updates, the loader included.
        heldout_loss: nats per target after the last update; None where nothing is held out.
    """

    name: str
    updates: int
    tokens: int
    seconds: float
    heldout_loss: float | None
    memory_bytes: int


@dataclass(frozen=True)
class MemoryModel:
    """Memory of training with padded batches: fixed_bytes + bytes_per_token * padded tokens of the largest pass.

    Least squares over the rows of batch sizes. All of them hold the corpus's longest sequence, so that the tokens of
    a pass are a number of sequences times that length.

    Args:
        process_bytes: what the libraries take before training adds anything.
        worst_error: largest share by which the line through the other rows misses a row.
    """

    fixed_bytes: float
    bytes_per_token: float
    process_bytes: int
    worst_error: float

    def predict(self, tokens: int) -> float:
        """Bytes that training adds, for passes of so many padded tokens."""
        return self.fixed_bytes + self.bytes_per_token * tokens

    def fitting_tokens(self, total_bytes: int) -> int:
        """Padded tokens of a pass that fit into a memory of this size, libraries included."""
        free = total_bytes - self.process_bytes - self.fixed_bytes
        return max(int(free / self.bytes_per_token), 0)


@dataclass(frozen=True)
class Bench:
    """All tables, and what they were measured on; rows are compared with the first of their table.

    Args:
        ceilings: operations per second of a large matrix product, before every round and after the last.
        memory: None where larger passes did not measure as larger.
    """

    recipe: str
    overrides: list[str]
    data: dict[str, Any]
    machine: dict[str, Any]
    effort: Effort
    ceilings: list[float]
    strategies: list[Row]
    batch_sizes: list[Row]
    memory: MemoryModel | None
    trained: list[Trained]

    @property
    def rounds(self) -> int:
        return self.effort.rounds

    @property
    def seconds(self) -> float:
        return self.effort.seconds

    def lines(self) -> list[str]:
        """The tables as plain text."""
        data, machine = self.data, self.machine
        ceiling = spread(self.ceilings)
        return [
            f"{machine['processor']}, {machine['cores']} cores, load {machine['load']:.1f} before; "
            f"torch {machine['torch']}, {machine['precision']}, {machine['device']}, threads: {machine['threads']}",
            f"{self.recipe}: {data['parameters']:,} parameters; {data['sequences']:,} training sequences of "
            f"{data['mean_tokens']:.1f} tokens, the longest {data['longest']}",
            f"{self.rounds} rounds of {self.seconds:g} s: median and quartiles. Tokens are real ones, never padding;",
            "memory: of a model copy, gradients, optimizer state and the activations of the largest pass",
            f"computed by {machine['kernels']}; the column torch is the same without native kernels",
            f"ceiling: {ceiling.median / 1e9:,.0f} GFLOP/s ({ceiling.low / 1e9:,.0f} to {ceiling.high / 1e9:,.0f}), "
            f"a product of large matrices in {machine['precision']} beside every round; shares are of the best",
            "",
            *_table("strategy", self.strategies),
            "",
            *_table("padded batches, an update each", self.batch_sizes),
            "",
            *_memory_lines(self.memory, self.data["longest"]),
            "",
            *_trained_lines(self.trained),
        ]

    def to_json(self) -> dict[str, Any]:
        tables = {"strategies": self.strategies, "batch_sizes": self.batch_sizes}
        rows = {name: [_values(row, rows[0]) for row in rows] for name, rows in tables.items()}
        return {**asdict(self), "rounds": self.rounds, "seconds": self.seconds, **rows}


def bench(name: str, overrides: Sequence[str] = (), effort: Effort = Effort()) -> Bench:
    """Measure strategies at equal tokens per update, padded batches of several sizes with one update each, and what
    equal numbers of updates with them learn.

    Args:
        name: packaged recipe or YAML file. All data of its stages is used together, with its own plan settings.

    Raises:
        RecipeError, SourceError: as `train`.
        PlanError: the plan of a row has no update.
    """
    described = describe_machine()  # before the first product: a busy machine is part of the result
    setup = _prepare(name, overrides)
    strategies, sizes = _strategies(setup), _batch_sizes(setup)
    variants = strategies + sizes
    measured = _measure(setup, variants, effort)
    memory = _memories(name, overrides, variants)
    rows = [_row(variant, measured, peak) for variant, peak in zip(variants, memory, strict=True)]
    by_size = rows[len(strategies) :]
    compared = [len(strategies) + BATCH_SIZES.index(size) for size in TRAINED_SIZES] + [len(strategies) - 1]
    trained = [_train(variants[i], effort.updates, rows[i].memory_bytes) for i in compared]
    machine = {**described, **setup.environment, "kernels": native.describe()}
    return Bench(
        name, list(overrides), _describe_data(setup), machine, effort, measured.ceilings,
        rows[: len(strategies)], by_size, _memory_model(by_size), trained,
    )  # fmt: skip


def _prepare(name: str, overrides: Sequence[str]) -> Setup:
    """The recipe's data and model, as a run of it starts."""
    recipe = load_recipe(name, list(overrides))
    if recipe.model["kind"] != "decoder":
        what = f"bench counts the operations of decoders, and this recipe trains a {recipe.model['kind']}"
        raise RecipeError(what, where="model.kind", fix="`unpad plan` measures memory and time of any recipe")
    setup = prepare_setup(recipe, Path(), None, Timers())
    freeze(setup.model, recipe.train.freeze)
    setup.model.label_smoothing = recipe.train.label_smoothing
    if not stage_sequences(setup, _all_data(setup), 0).size:
        raise RecipeError("no stage has data to train on", where="stages", fix="set data.text or data.chat as they use")
    return setup


# --------------------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class _Variant:
    """One way to batch, as a recipe that differs from the user's in its plan alone, and its first epoch."""

    name: str
    setup: Setup
    stage: Stage
    plan: Plan


def _strategies(setup: Setup) -> list[_Variant]:
    """One sequence per forward pass, then as many as each strategy takes; no sequence alone is ever padded."""
    size = setup.recipe.plan.batch_size
    alone: dict[str, Any] = {"strategy": "pack", "tokens_per_micro": 1}  # a micro-batch holds one sequence at least
    return [
        _variant(setup, "one at a time", **alone, tokens_per_step=1),
        _variant(setup, "one at a time, accumulated", **alone),
        _variant(setup, f"padded to the context, batches of {size}", strategy="fixed"),
        _variant(setup, f"dynamic padding, batches of {size}", strategy="dynamic"),
        _variant(setup, f"buckets, batches of {size}", strategy="bucket"),
        _variant(setup, "packed, no padding", strategy="pack"),
    ]


def _batch_sizes(setup: Setup) -> list[_Variant]:
    fields: dict[str, Any] = {"strategy": "dynamic", "tokens_per_step": 1}
    return [_variant(setup, f"batch size {size}", **fields, batch_size=size) for size in BATCH_SIZES]


def _variant(setup: Setup, name: str, **fields: Any) -> _Variant:
    recipe = setup.recipe.model_copy(update={"plan": setup.recipe.plan.model_copy(update={"grow": {}, **fields})})
    stage = _all_data(setup)
    changed = replace(setup, recipe=recipe)
    made = epoch_plan(changed, stage, 0)
    if made.num_steps == 0:
        fix = "lower plan.tokens_per_step, or set plan.drop_last=false and plan.overflow=split"
        raise PlanError(f"{name}: the plan drops every token", where="plan", fix=fix)
    return _Variant(name, changed, stage, made)


def _all_data(setup: Setup) -> Stage:
    used = {kind for stage in setup.stages for kind in stage.use or setup.data.kinds}
    return Stage.model_validate({"name": "bench", "use": [kind for kind in setup.data.kinds if kind in used]})


# --------------------------------------------------------------------------- speed


def _updates(setup: Setup, stage: Stage, first_epoch: int = 0) -> Iterator[list[RaggedBatch]]:
    """The micro-batches of one update after the other, epoch after epoch."""
    for epoch in count(first_epoch):
        yield from load_steps(setup.data.load, epoch_plan(setup, stage, epoch), setup.device)


class _Trainer:
    """A copy of the run's model with a new optimizer."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = copy.deepcopy(setup.model).train()
        self.optimizer = make_optimizer(self.model, setup.recipe.optim)
        self.weights = Objective.of(self.model, setup.recipe.losses).final(self.model)
        self.scaler = LossScaler() if setup.precision == "fp16" else None

    def update(self, micros: list[RaggedBatch]) -> None:
        """One update. It reads results back from the device, so that its time is the time it took."""
        train_step(
            self.model, micros, self.optimizer, weights=self.weights, precision=self.setup.precision,
            clip=self.setup.recipe.optim.clip, scaler=self.scaler,
        )  # fmt: skip


def _measure(setup: Setup, variants: Sequence[_Variant], effort: Effort) -> Rounds:
    """Let all variants take turns; where a run uses native kernels, each of them also without."""
    trainer = _Trainer(setup)  # one for all: a large model would not fit into memory once per row
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0  # the same work, and weights that no row spoils for the next
    sides = {}
    for variant in variants:
        sides[variant.name] = _side(trainer, variant, True)
        if native.enabled():
            sides[variant.name + WITHOUT_NATIVE] = _side(trainer, variant, False)
    dtype = DTYPES[setup.precision]
    return measure_rounds(
        sides, effort.rounds, effort.seconds, warm_steps=WARM_UPDATES,
        ceiling=lambda: matrix_ceiling(dtype, setup.device, effort.ceiling_size),
    )  # fmt: skip


def _side(trainer: _Trainer, variant: _Variant, as_run: bool) -> Side:
    # Other epochs for the other path: on batches that the first has just seen, it would find every shape prepared.
    updates = _updates(variant.setup, variant.stage, 0 if as_run else FAR)
    sizes = sizes_of(trainer.model.config, variant.setup.data.num_outputs)

    def step() -> Work:
        with nullcontext() if as_run else native.switched_off():
            micros = next(updates)
            trainer.update(micros)
        lengths = [length for batch in micros for length in batch.layout.lengths().tolist()]
        return Work(sum(lengths), training_operations(sizes, lengths, sum(batch.num_targets for batch in micros)))

    return Side(step)


def _row(variant: _Variant, measured: Rounds, memory: tuple[int, int]) -> Row:
    made, settings = variant.plan, variant.setup.recipe.plan
    fields = ("strategy", "tokens_per_step", "tokens_per_micro", "batch_size", "bucket_width")
    both = [name for name in (variant.name, variant.name + WITHOUT_NATIVE) if name in measured.turns]
    return Row(
        variant.name,
        plan={field: getattr(settings, field) for field in fields},
        tokens_per_update=made.real_tokens / made.num_steps,
        tokens_per_pass=made.real_tokens / made.num_micros,
        sequence_tokens=made.real_tokens / len(made.order),
        padded_length=made.padded_tokens / len(made.order),
        pad_share=made.pad_share,
        largest_pass=int(made.micro_cells.max()),
        rates=measured.rates(variant.name),
        torch_rates=measured.rates(both[1]) if len(both) == 2 else [],
        shares=measured.shares(variant.name),
        updates=sum(turn.steps for name in both for turn in measured.turns[name]),
        peak_bytes=memory[0],
        base_bytes=memory[1],
    )


# --------------------------------------------------------------------------- memory


def _memories(name: str, overrides: Sequence[str], variants: Sequence[_Variant]) -> list[tuple[int, int]]:
    """`_peak` of every variant, each in a process of its own; on a GPU here, where its allocator counts exactly."""
    if variants[0].setup.device.type == "cuda":
        return [_peak(variant) for variant in variants]
    return _in_children(_peak_of, [(name, list(overrides), row) for row in range(len(variants))])


def _in_children(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Results of calling a function of this module, each in a new process, two at a time."""
    # Not forked: threads of a parallel product do not live on in a fork, and what waits for them never ends.
    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        return [future.result() for future in [pool.submit(function, *call) for call in calls]]


def _peak_of(name: str, overrides: list[str], row: int) -> tuple[int, int]:
    setup = _prepare(name, overrides)
    return _peak((_strategies(setup) + _batch_sizes(setup))[row])


def _peak(variant: _Variant) -> tuple[int, int]:
    """Bytes at the peak of an update with the largest micro-batch of the first epoch, and bytes before it."""
    setup, made = variant.setup, variant.plan
    on_gpu = setup.device.type == "cuda"
    _Trainer(setup).update([_micro(variant, int(np.argmin(made.micro_cells)))])  # libraries load what they need
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(setup.device)
    return_freed_memory()
    base = torch.cuda.memory_allocated(setup.device) if on_gpu else process_memory()
    restart_peak()
    _Trainer(setup).update([_micro(variant, int(np.argmax(made.micro_cells)))])
    return torch.cuda.max_memory_allocated(setup.device) if on_gpu else max(peak_memory(), base), base


def _micro(variant: _Variant, index: int) -> RaggedBatch:
    """One micro-batch of the first epoch, numbered through all its steps."""
    setup, offsets = variant.setup, variant.plan.step_offsets
    step = int(np.searchsorted(offsets, index, side="right")) - 1
    micro = variant.plan.step(step)[index - int(offsets[step])]
    return setup.data.load(micro).to(setup.device)


def _memory_model(rows: Sequence[Row]) -> MemoryModel | None:
    tokens = np.array([row.largest_pass for row in rows], np.float64)
    measured = np.array([row.memory_bytes for row in rows], np.float64)
    slope, fixed = np.polyfit(tokens, measured, 1)
    if slope <= 0 or fixed <= 0:
        return None
    errors = []
    for left_out in range(len(rows)):
        others = np.arange(len(rows)) != left_out
        line = np.polyfit(tokens[others], measured[others], 1)
        errors.append(abs(np.polyval(line, tokens[left_out]) / measured[left_out] - 1))
    return MemoryModel(float(fixed), float(slope), max(row.base_bytes for row in rows), float(max(errors)))


# --------------------------------------------------------------------------- quality


def _train(variant: _Variant, updates: int, memory_bytes: int) -> Trained:
    """Train a fresh copy for some updates at the recipe's learning rate, and look at the held-out loss."""
    setup = variant.setup
    trainer = _Trainer(setup)
    tokens, began = 0, time.perf_counter()
    for micros in islice(_updates(setup, variant.stage), updates):
        trainer.update(micros)
        tokens += sum(int(batch.layout.lengths().sum()) for batch in micros)
    seconds = time.perf_counter() - began
    heldout = stage_sequences(setup, variant.stage, 1)
    loss = None
    if heldout.size:
        loss = held_out(trainer.model, setup.data, heldout, setup.recipe.plan, setup.device).loss
    return Trained(variant.name, updates, tokens, seconds, loss, memory_bytes)


# --------------------------------------------------------------------------- what it was measured on


def _describe_data(setup: Setup) -> dict[str, Any]:
    ids = stage_sequences(setup, _all_data(setup), 0)
    lengths = setup.data.positions[ids]
    return {
        "sequences": int(ids.size), "tokens": int(lengths.sum()), "mean_tokens": float(lengths.mean()),
        "longest": int(lengths.max()), "parameters": sum(p.numel() for p in setup.model.parameters()),
        "vocabulary": setup.data.num_outputs,
    }  # fmt: skip


# --------------------------------------------------------------------------- tables


def _values(row: Row, first: Row) -> dict[str, Any]:
    gain = row.native_gain()
    return {
        **asdict(row),
        "memory_bytes": row.memory_bytes,
        "tokens_per_second": asdict(row.rate()),
        "sequences_per_second": row.rate().median / row.sequence_tokens,
        "times_first": asdict(row.times(first)),
        "native_gain": None if gain is None else asdict(gain),
        "ceiling_share": asdict(row.ceiling_share()),
    }


COLUMNS = {
    "tokens/s": 10, "quartiles": 17, "times": 8, "torch": 9, "gain": 7, "ceiling": 9, "seqs/s": 9, "length": 8,
    "padding": 9, "per pass": 10, "per update": 12, "memory": 11,
}  # fmt: skip


def _table(title: str, rows: list[Row]) -> list[str]:
    width = max(len(title), *(len(row.name) for row in rows))
    lines = [f"{title:<{width}}" + "".join(f"{name:>{size}}" for name, size in COLUMNS.items())]
    for row in rows:
        cells = zip(_cells(row, rows[0]), COLUMNS.values(), strict=True)
        lines.append(f"{row.name:<{width}}" + "".join(f"{cell:>{size}}" for cell, size in cells))
    return lines


def _cells(row: Row, first: Row) -> list[str]:
    rate, gain = row.rate(), row.native_gain()
    return [
        f"{rate.median:,.0f}",
        f"{rate.low:,.0f} to {rate.high:,.0f}",
        f"{row.times(first).median:.1f}x",
        f"{spread(row.torch_rates).median:,.0f}" if row.torch_rates else "-",
        f"{gain.median:.2f}x" if gain else "-",
        f"{row.ceiling_share().median:.1%}",
        f"{rate.median / row.sequence_tokens:,.0f}",
        f"{row.padded_length:.1f}",
        f"{row.pad_share:.1%}",
        f"{row.tokens_per_pass:,.0f}",
        f"{row.tokens_per_update:,.0f}",
        f"{row.memory_bytes / MIB:,.0f} MiB",
    ]


def _memory_lines(model: MemoryModel | None, longest: int) -> list[str]:
    if model is None:
        return ["memory by batch size: too little data to tell a pass's memory from the rest"]
    lines = [
        f"memory of padded batches: {model.fixed_bytes / MIB:,.0f} MiB + {model.bytes_per_token / 1024:,.1f} KiB per "
        f"token of the largest pass; every row predicted from the others, at worst {model.worst_error:.0%} off",
        f"{'card':<8}{'tokens a pass':>16}{f'sequences of {longest}':>20}",
    ]
    for size in CARDS:
        tokens = model.fitting_tokens(size * GIB)
        lines.append(f"{size:>3} GiB {tokens:>16,}{tokens // longest:>20,}")
    return lines


def _trained_lines(trained: Sequence[Trained]) -> list[str]:
    title = f"after {trained[0].updates} updates"
    width = max(len(title), *(len(row.name) for row in trained))
    lines = [f"{title:<{width}}{'held-out loss':>15}{'tokens':>12}{'seconds':>10}{'memory':>11}"]
    for row in trained:
        loss = "-" if row.heldout_loss is None else f"{row.heldout_loss:.4f}"
        memory = f"{row.memory_bytes / MIB:,.0f} MiB"
        lines.append(f"{row.name:<{width}}{loss:>15}{row.tokens:>12,}{row.seconds:>10.1f}{memory:>11}")
    return lines
