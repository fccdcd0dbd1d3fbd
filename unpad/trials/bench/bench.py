"""`unpad bench`: speed, padding, memory and quality of padded and packed batches, on the user's data and machine.

Whole steps are timed: the loader's work, forward, backward, clipping and the change of weights. All ways take turns in
one process, round after round, each for the same time and with the same weights, with the native kernels and without
them, so that a machine that slows down or speeds up does so for all of them. Memory is measured in a process per row,
where no leftover of an earlier row can hide the memory of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unpad.data.family import family_of
from unpad.terminal.table import wrapped
from unpad.training.auto_size import StageMemory
from unpad.training.setup import Setup
from unpad.trials.bench.measure import describe_machine, spread
from unpad.trials.bench.memory import MemoryModel, memory_lines, peaks, predicted_memory
from unpad.trials.bench.quality import TRAINED_SIZES, Trained, train, trained_lines
from unpad.trials.bench.speed import Effort, SpeedRow, measure, row_values, table, to_row
from unpad.trials.bench.variants import BATCH_SIZES, all_data, prepare, size_variants, strategy_variants

FULL, QUICK = Effort(), Effort(rounds=3, seconds=0.3, updates=20)


@dataclass(frozen=True)
class Bench:
    """All tables, and the data and machine they were measured on; rows are compared with the first of their table.

    Args:
        ceilings: operations per second of a large matrix product, before every round and after the last.
        memory: predicted, beside what the rows of `batch_sizes` measured.
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
        recipe: packaged recipe or YAML file. All data of its stages is used together, with its own plan settings.

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
