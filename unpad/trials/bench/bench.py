"""`unpad bench`: speed, padding, memory and quality of padded and packed batches, on the user's data and machine.

Whole steps are timed: loading, forward, backward, clipping and the optimizer update. All variants take turns in one
process, round after round, each for the same time and with the same weights, with and without the native kernels, so
that changes of the machine's speed affect all of them. Memory is measured in one process per row, so that leftovers of
an earlier row cannot hide it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from unpad.data.family import family_of
from unpad.data.measuring import Measuring
from unpad.evaluation.family import held_out
from unpad.machine.memory import peak_memory, process_memory, restart_peak
from unpad.processes.children import run_all
from unpad.terminal.progress import counted, held
from unpad.terminal.table import number_of, text_table, wrapped
from unpad.training.auto_size import StageMemory
from unpad.training.memory import process_bytes, return_freed_memory, state_bytes
from unpad.training.rehearsal import Rehearsal
from unpad.training.setup import Setup
from unpad.trials.bench.measure import describe_machine, spread
from unpad.trials.bench.speed import (
    BATCH_SIZES,
    MIB,
    BenchVariant,
    Effort,
    SpeedRow,
    all_data,
    every_update,
    measure,
    prepare,
    row_values,
    size_variants,
    strategy_variants,
    table,
    to_row,
)

CARDS = (8, 16, 32)  # GiB
GIB = 2**30


def peaks(recipe: str, overrides: Sequence[str], variants: Sequence[BenchVariant]) -> list[tuple[int, int]]:
    """Bytes at the peak of every variant's largest step, and before it: `Row.peak_bytes` and `base_bytes`.

    Each variant runs in its own process; on a GPU in this one, because the allocator counts exactly.
    """
    if variants[0].setup.device.type == "cuda":
        return [_peak(variant) for variant in variants]
    calls = [(recipe, list(overrides), row) for row in range(len(variants))]
    results = run_all(_peak_of, calls, at_once=2)
    return list(counted(results, "measuring memory", len(calls), "rows"))


def _peak_of(recipe: str, overrides: list[str], row: int) -> tuple[int, int]:
    with held():  # the process that waits shows the progress
        setup = prepare(recipe, overrides)
    return _peak((strategy_variants(setup) + size_variants(setup))[row])


def _peak(variant: BenchVariant) -> tuple[int, int]:
    """Bytes at the peak of a step with the largest micro-batch of the first epoch, and bytes before it."""
    setup, plan = variant.setup, variant.plan
    on_gpu = setup.device.type == "cuda"
    _step(variant, int(np.argmin(plan.micro_cells)))  # libraries load what they need
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(setup.device)
    return_freed_memory()
    base = torch.cuda.memory_allocated(setup.device) if on_gpu else process_memory()
    restart_peak()
    _step(variant, int(np.argmax(plan.micro_cells)))
    return torch.cuda.max_memory_allocated(setup.device) if on_gpu else max(peak_memory(), base), base


def _step(variant: BenchVariant, number: int) -> None:
    """Take a step of one micro-batch of the first epoch, with a new copy of the model."""
    rehearsal = Rehearsal(variant.setup, variant.stage)
    rehearsal.step(rehearsal.load([variant.plan.micro(number)]))


@dataclass(frozen=True)
class MemoryModel:
    """Memory of training with padded batches, from small passes: fixed_bytes + bytes_per_token * padded tokens of the
    largest pass.

    All batches hold the corpus's longest sequence, so the tokens of a pass are its number of sequences times that
    length.

    Args:
        process_bytes: memory of the libraries before training.
        worst_error: largest relative error of the prediction over the measured rows.
    """

    fixed_bytes: float
    bytes_per_token: float
    process_bytes: int
    worst_error: float

    def predict(self, tokens: int) -> float:
        """Bytes that training adds, given the padded tokens of a micro-batch."""
        return self.fixed_bytes + self.bytes_per_token * tokens

    def fitting_tokens(self, total_bytes: int) -> int:
        """Padded tokens of a pass that fits into memory of this size, libraries included."""
        free = total_bytes - self.process_bytes - self.fixed_bytes
        return max(int(free / self.bytes_per_token), 0)


def predicted_memory(memory: StageMemory, rows: Sequence[SpeedRow], longest: int) -> MemoryModel:
    """Predict the memory of padded batches of one update each, and compare it with the measured rows of batch sizes.

    Args:
        longest: positions of the longest sequence.
    """
    footprint, weights = memory.footprint, sum(p.numel() * p.element_size() for p in memory.parameters)
    fixed = weights + state_bytes(memory.parameters, micros=1) + process_bytes(footprint.fixed)
    slope = process_bytes(footprint.of(1, longest)) - process_bytes(footprint.fixed)
    model = MemoryModel(fixed, slope, max(row.base_bytes for row in rows), 0.0)
    errors = [abs(model.predict(row.largest_pass) / row.memory_bytes - 1) for row in rows]
    return replace(model, worst_error=max(errors))


def memory_lines(model: MemoryModel, longest: int) -> list[str]:
    """The prediction as text, and the number of sequences of `longest` tokens that fit into `CARDS`."""
    about = (
        f"memory of padded batches: {model.fixed_bytes / MIB:,.0f} MiB + {model.bytes_per_token / 1024:,.1f} KiB per "
        f"token of the largest pass; predicted from small passes, at worst {model.worst_error:.0%} off a row"
    )
    fitting = [(size, model.fitting_tokens(size * GIB)) for size in CARDS]
    rows = [[f"{size} GiB", f"{tokens:,}", f"{tokens // longest:,}"] for size, tokens in fitting]
    return [*wrapped(about), *text_table(["card", "tokens a pass", f"sequences of {longest}"], rows)]


TRAINED_SIZES = (1, 4, 8)  # batch sizes of the table of equal steps


@dataclass(frozen=True)
class Trained:
    """Result of one batch size after a number of steps that is equal for all.

    Args:
        tokens: real tokens trained on.
        seconds: time of all steps, the loader included.
        heldout_loss: nats per target after the last step; None without held-out data.
    """

    name: str
    updates: int
    tokens: int
    seconds: float
    heldout_loss: float | None
    memory_bytes: int


def train(variant: BenchVariant, updates: int, memory_bytes: int) -> Trained:
    """Train a copy with initial weights for some steps at the recipe's learning rate; evaluate its held-out loss."""
    setup, stage = variant.setup, variant.stage
    rehearsal = Rehearsal(setup, stage)
    tokens, began = 0, time.perf_counter()
    for micros in counted(islice(every_update(setup, stage), updates), "training", updates, "updates"):
        rehearsal.step(micros)
        tokens += sum(int(batch.layout.lengths().sum()) for batch in micros)
    seconds = time.perf_counter() - began
    loss = None
    if stage.held_out_ids.size:
        over = Measuring(rehearsal.model, setup.data, stage.held_out_ids, stage.recipe.plan, setup.device)
        loss = held_out(over).loss
    return Trained(variant.name, updates, tokens, seconds, loss, memory_bytes)


def trained_lines(trained: Sequence[Trained]) -> list[str]:
    """Rows as lines of text."""
    title = f"after {number_of(trained[0].updates, 'updates')}"
    rows = []
    for row in trained:
        loss = "-" if row.heldout_loss is None else f"{row.heldout_loss:.4f}"
        memory = f"{row.memory_bytes / MIB:,.0f} MiB"
        rows.append([row.name, loss, f"{row.tokens:,}", f"{row.seconds:.1f}", memory])
    return text_table([title, "held-out loss", "tokens", "seconds", "memory"], rows)


FULL, QUICK = Effort(), Effort(rounds=3, seconds=0.3, updates=20)


@dataclass(frozen=True)
class Bench:
    """All tables, with their data and machine; rows are compared with the first of their table.

    Args:
        ceilings: operations per second of a large matrix product, before every round and after the last.
        memory: predicted, beside the measurements of the rows of `batch_sizes`.
    """

    recipe: str
    overrides: list[str]
    data: dict[str, Any]
    machine: dict[str, Any]
    effort: Effort
    ceilings: list[float]
    strategies: list[SpeedRow]
    batch_sizes: list[SpeedRow]
    memory: MemoryModel
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
        about = [
            f"{machine['processor']}, {machine['cores']} cores, load {machine['load']:.1f} before; "
            f"torch {machine['torch']}, {machine['precision']}, {machine['device']}, threads: {machine['threads']}",
            f"{self.recipe}: {data['parameters']:,} parameters; {data['sequences']:,} training {data['units'][0]} of "
            f"{data['mean_tokens']:.1f} {data['units'][1]}, the longest {data['longest']}",
            f"{self.rounds} rounds of {self.seconds:g} s: median and quartiles. Tokens are real {data['units'][1]}, "
            "never padding;",
            "memory: of a model copy, gradients, optimizer state and the activations of the largest pass",
            f"computed by {machine['kernels']}; the column torch is the same without native kernels",
            f"ceiling: {ceiling.median / 1e9:,.0f} GFLOP/s ({ceiling.low / 1e9:,.0f} to {ceiling.high / 1e9:,.0f}), "
            f"a product of large matrices in {machine['precision']} beside every round; shares are of the best",
        ]
        return [
            *(part for line in about for part in wrapped(line)),
            "",
            *table("strategy", self.strategies),
            "",
            *table("padded batches, an update each", self.batch_sizes),
            "",
            *memory_lines(self.memory, self.data["longest"]),
            "",
            *trained_lines(self.trained),
        ]

    def to_json(self) -> dict[str, Any]:
        tables = {"strategies": self.strategies, "batch_sizes": self.batch_sizes}
        rows = {name: [row_values(row, rows[0]) for row in rows] for name, rows in tables.items()}
        return {**asdict(self), "rounds": self.rounds, "seconds": self.seconds, **rows}


def bench(recipe: str, overrides: Sequence[str] = (), effort: Effort = FULL) -> Bench:
    """Measure strategies at equal tokens per step, padded batches of several sizes with one step each, and the loss
    after equal numbers of steps with them.

    Args:
        recipe: packaged recipe or YAML file. The data of all its stages is used together, with the recipe's plan
            settings.

    Raises:
        RecipeError, SourceError: as `train`.
        PlanError: the plan of a row has no step.
    """
    described = describe_machine()  # before the first product: a busy machine is part of the result
    setup = prepare(recipe, overrides)
    strategies, sizes = strategy_variants(setup), size_variants(setup)
    variants = strategies + sizes
    measured = measure(setup, variants, effort)
    memory = peaks(recipe, overrides, variants)
    rows = [to_row(variant, measured, peak) for variant, peak in zip(variants, memory, strict=True)]
    by_size = rows[len(strategies) :]
    compared = [len(strategies) + BATCH_SIZES.index(size) for size in TRAINED_SIZES] + [len(strategies) - 1]
    trained = [train(variants[i], effort.updates, rows[i].memory_bytes) for i in compared]
    machine = {**described, **setup.environment}
    data, by_strategy = _describe_data(setup), rows[: len(strategies)]
    small = StageMemory.measured(sizes[0].stage, setup.model, setup.device, setup.precision)
    model, ceilings = predicted_memory(small, by_size, data["longest"]), measured.ceilings
    return Bench(recipe, list(overrides), data, machine, effort, ceilings, by_strategy, by_size, model, trained)


def _describe_data(setup: Setup) -> dict[str, Any]:
    ids = all_data(setup, setup.recipe).train_ids
    lengths = setup.data.table.positions[ids]
    return {
        "sequences": int(ids.size),
        "tokens": int(lengths.sum()),
        "mean_tokens": float(lengths.mean()),
        "longest": int(lengths.max()),
        "parameters": sum(p.numel() for p in setup.model.parameters()),
        "vocabulary": setup.data.num_outputs,
        "units": list(family_of(setup.recipe).UNITS),
    }
