"""`unpad plan --measure`: strategies timed on the user's data and machine, and the memory of padded batches.

Whole steps are timed: loading, forward, backward, clipping and the update. Strategies take turns in one process, round
after round, so that changes of the machine's speed affect all of them.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from unpad.batching.batch import RaggedBatch
from unpad.batching.loader import load_steps
from unpad.terminal.progress import counted
from unpad.terminal.table import text_table, wrapped
from unpad.training.auto_size import StageMemory
from unpad.training.rehearsal import Rehearsal
from unpad.training.setup import Setup
from unpad.training.stage import StageSetup, epoch_plan
from unpad.training.updates import takes_groups

ROUNDS, SECONDS = 3, 1.5  # turns of each strategy, and the timed part of a turn
WARM_STEPS = 2  # untimed, of each strategy before the first round
COMING_BACK = 0.3  # untimed work at the beginning of a turn, as a share of its seconds: other sides filled the caches
BATCH_SIZES = (1, 2, 4, 8, 16)
PADDED = ("fixed", "dynamic", "bucket")


@dataclass(frozen=True)
class PaddedBatch:
    """Padded batches of one size, one update each: the largest pass in tokens, and its predicted peak beside the
    weights in bytes."""

    size: int
    largest_pass: int
    peak_bytes: int


@dataclass(frozen=True)
class MeasuredStage:
    """Rates of a stage's strategies, and the memory of padded batches.

    Args:
        rates: by strategy, real tokens per second, one per round; ratios are taken within a round.
        unit: name of the tokens.
    """

    rates: dict[str, list[float]]
    batches: list[PaddedBatch]
    unit: str

    def times(self, name: str, other: str) -> float:
        """Speed of one strategy relative to another, the median over the rounds."""
        pairs = zip(self.rates[name], self.rates[other], strict=True)
        return float(np.median([mine / theirs for mine, theirs in pairs]))

    def lines(self) -> list[str]:
        """Both tables as text."""
        first = next(iter(self.rates))
        rows = []
        for name, rates in self.rates.items():
            low, middle, high = np.percentile(rates, [25, 50, 75])
            span = f"{low:,.0f} to {high:,.0f}"
            rows.append([name, f"{middle:,.0f}", span, f"{self.times(name, first):.1f}x"])
        head = ["strategy", f"{self.unit}/s", "quartiles", f"of {first}"]
        sizes = [[str(b.size), f"{b.largest_pass:,}", f"{b.peak_bytes / 2**20:,.0f} MiB"] for b in self.batches]
        about = f"{ROUNDS} rounds of {SECONDS:g} s by turns, in real {self.unit}, never padding"
        return [
            *text_table(head, rows),
            *wrapped(about),
            "",
            *text_table(["padded batch", "largest pass", "memory"], sizes),
            *wrapped("memory: predicted peak beside the weights, as for plan.tokens_per_micro=auto"),
        ]

    def to_json(self) -> dict[str, Any]:
        """Rates of every round by strategy, and the batches."""
        batches = [vars(batch) for batch in self.batches]
        return {"rounds": ROUNDS, "seconds": SECONDS, "tokens_per_second": self.rates, "padded_batches": batches}


def measure(setup: Setup, stage: StageSetup, strategies: Iterable[str], unit: str) -> MeasuredStage:
    """Time strategies of a stage by turns on one copy of the model, at rate 0, so that all do the same work.

    Args:
        strategies: those that can plan the data and fit into memory, padded ones first.
        unit: name of the tokens.
    """
    memory = StageMemory.measured(stage, setup.model, setup.device, setup.precision)
    batches = []
    for size in BATCH_SIZES:
        first = epoch_plan(_with(stage, strategy="dynamic", batch_size=size, tokens_per_step=1), 0)
        batches.append(PaddedBatch(size, int(first.micro_cells.max(initial=0)), memory.needed(first)))
    rehearsal = Rehearsal(setup, stage)
    rehearsal.rate(0.0)
    planned = {name: _with(stage, strategy=name) for name in strategies}
    steps = {name: _updates(setup, of) for name, of in planned.items() if epoch_plan(of, 0).num_steps}
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for updates in steps.values():
        for _ in range(WARM_STEPS):
            rehearsal.step(next(updates))
    for number in counted(range(ROUNDS), "measuring speed", ROUNDS, "rounds"):
        for name in list(steps)[:: 1 if number % 2 == 0 else -1]:
            _rate(rehearsal, steps[name], SECONDS * COMING_BACK)
            rates[name].append(_rate(rehearsal, steps[name], SECONDS))
    return MeasuredStage(rates, batches, unit)


def _with(stage: StageSetup, **fields: Any) -> StageSetup:
    """The stage with other fields of its plan."""
    settings = stage.recipe.plan.model_copy(update={"grow": {}, **fields})
    return replace(stage, recipe=stage.recipe.model_copy(update={"plan": settings}))


def _updates(setup: Setup, stage: StageSetup) -> Iterator[list[RaggedBatch]]:
    """Micro-batches of one update after the other, epoch after epoch."""
    for epoch in count():
        yield from load_steps(
            setup.data.load, epoch_plan(stage, epoch), setup.device, group_lengths=takes_groups(setup)
        )


def _rate(rehearsal: Rehearsal, updates: Iterator[list[RaggedBatch]], seconds: float) -> float:
    """Real tokens per second of steps that begin within a time; one step at least."""
    tokens, began = 0, time.perf_counter()
    while not tokens or time.perf_counter() - began < seconds:
        micros = next(updates)
        rehearsal.step(micros)
        tokens += sum(int(batch.layout.lengths().sum()) for batch in micros)
    return tokens / (time.perf_counter() - began)
