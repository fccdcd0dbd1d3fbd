"""Time to the same held-out loss: ours, the Trainer's defaults and its best setting, each with its learning rate tuned.

Every side trains from scratch with each of three learning rates, for the same time. All these runs take turns, a slice
each, and are evaluated on the same held-out pieces after every slice; evaluation is not part of the time. The loss to
reach is the lowest that every side reached, each with its best rate; the moment is interpolated between evaluations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import peers
from measure import Contender
from tuning import Tuning
from workloads import Ours, Workload, workload

NAMES = ["sayings", "language"]
RATES = (7e-4, 2e-3, 6e-3)  # constant after the warm-up
WARM_UP_STEPS = 20
HELD_OUT_TOKENS = 10_000


@dataclass
class Run:
    """One side with one learning rate, and what it had reached after every slice."""

    side: str
    lr: float
    trainer: Any  # `Ours` or a peer
    seconds: list[float] = field(default_factory=lambda: [0.0])
    tokens: list[int] = field(default_factory=lambda: [0])
    losses: list[float] = field(default_factory=list)
    steps: int = 0

    def go_on(self, seconds: float) -> None:
        """Train for one slice and evaluate."""
        if not self.losses:
            self.losses.append(self.trainer.held_out_loss())

        def step() -> Any:
            self.steps += 1
            self.trainer.set_lr(self.lr * min(self.steps / WARM_UP_STEPS, 1.0))
            return self.trainer.step()

        done = Contender(step).turn(seconds)
        self.seconds.append(self.seconds[-1] + done.seconds)
        self.tokens.append(self.tokens[-1] + done.tokens)
        self.losses.append(self.trainer.held_out_loss())

    def reaches(self, loss: float) -> tuple[float, float] | None:
        """Seconds and tokens until the held-out loss was first at most `loss`; None if it never was."""
        for i in range(1, len(self.losses)):
            if self.losses[i] <= loss:
                share = (self.losses[i - 1] - loss) / (self.losses[i - 1] - self.losses[i])
                seconds = self.seconds[i - 1] + share * (self.seconds[i] - self.seconds[i - 1])
                return seconds, self.tokens[i - 1] + share * (self.tokens[i] - self.tokens[i - 1])
        return None


@dataclass(frozen=True)
class Reached:
    """Course of a side to the loss with its best learning rate."""

    lr: float
    seconds: float
    tokens: float


def time_to_loss(
    name: str, data: Path, slices: int, seconds: float, tuning: Tuning, report: Callable[[str], None]
) -> dict[str, Any]:
    """Measure one workload; returns what the JSON holds.

    Args:
        tuning: precision of all sides, and the effort of finding the peer's best.
    """
    made = _with_few_held_out(workload(name, data))
    sides = _sides(made, tuning)
    runs = [Run(side, lr, make()) for side, make in sides.items() for lr in RATES]
    for number in range(slices):
        for run in runs if number % 2 == 0 else reversed(runs):
            run.go_on(seconds)
        report(f"{name}: slice {number + 1} of {slices}: " + ", ".join(f"{run.losses[-1]:.3f}" for run in runs))
    best = {side: min(min(run.losses) for run in runs if run.side == side) for side in sides}
    target = max(best.values())
    reached = {side: _best([run for run in runs if run.side == side], target) for side in sides}
    curves = [{key: value for key, value in vars(run).items() if key != "trainer"} for run in runs]
    return {
        "target": target,
        "lowest": best,
        "reached": {side: asdict(value) for side, value in reached.items()},
        "runs": curves,
        "slices": slices,
        "slice_seconds": seconds,
    }


def _sides(made: Workload, tuning: Tuning) -> dict[str, Callable[[], Any]]:
    """Makers of fresh sides; the Trainer's best setting is found on one that is thrown away."""
    theirs = peers.Peers(made, tuning)
    sides: dict[str, Callable[[], Any]] = {"ours": lambda: Ours(made, precision=tuning.precision)}
    try:
        best = theirs.best()
    except peers.MissingPackageError:
        return sides
    fields = {"batch_size": best.batches.size, "bf16": best.bf16, "grouped": True}
    sides[peers.DEFAULTS] = theirs.defaults
    sides[peers.BEST] = lambda: theirs.make(**fields)
    return sides


def _with_few_held_out(made: Workload) -> Workload:
    """Hold out only as many sequences as hold HELD_OUT_TOKENS: an evaluation should not take longer than a slice."""
    kept = np.cumsum(made.lengths[made.held_out]) <= HELD_OUT_TOKENS
    return replace(made, held_out=made.held_out[kept])


def _best(runs: list[Run], target: float) -> Reached:
    """The run of a side that reached the loss first."""
    found = [(run, run.reaches(target)) for run in runs]
    arrived = [Reached(run.lr, *at) for run, at in found if at is not None]
    return min(arrived, key=lambda reached: reached.seconds)


def markdown(results: dict[str, dict[str, Any]]) -> list[str]:
    """One table per workload."""
    lines = []
    for name, result in results.items():
        ours = result["reached"]["ours"]
        lines += [
            f"### {name}: {result['target']:.4f} nats per held-out token, {result['slices']} slices of "
            f"{result['slice_seconds']:g} s for every learning rate of {', '.join(f'{rate:g}' for rate in RATES)}",
            "",
            "| side | best rate | seconds | times ours | tokens | times ours | lowest loss reached |",
            "|---|---|---|---|---|---|---|",
        ]
        for side, at in result["reached"].items():
            edge = " (the edge of what was tried)" if at["lr"] in (min(RATES), max(RATES)) else ""
            lines.append(
                f"| {side} | {at['lr']:g}{edge} | {at['seconds']:.1f} | {at['seconds'] / ours['seconds']:.2f} "
                f"| {at['tokens']:,.0f} | {at['tokens'] / ours['tokens']:.2f} | {result['lowest'][side]:.4f} |"
            )
        lines.append("")
    return lines
