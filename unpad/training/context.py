"""State that the functions of the training loop share, and the clock of the checkpoints that are due by time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from unpad.evaluation.metrics import HeldOut
from unpad.models.objective import Objective
from unpad.processes.sums import GradientSum
from unpad.run.monitor import Monitor
from unpad.run.timers import Timers
from unpad.training.memory import HeapKeeper, Room
from unpad.training.optim import Schedule
from unpad.training.progress import Progress
from unpad.training.setup import Setup
from unpad.training.signals import Signals
from unpad.training.stage import RunLength, StageSetup
from unpad.training.watches.watch import Watch


class SaveClock:
    """Time since the last checkpoint of this process.

    Args:
        every_seconds: time between checkpoints; None for checkpoints by steps alone.
    """

    def __init__(self, every_seconds: float | None) -> None:
        self._every, self._saved_at = every_seconds, time.monotonic()

    def due(self) -> bool:
        """True if the next step is to be followed by a checkpoint."""
        return self._every is not None and time.monotonic() - self._saved_at >= self._every

    def saved(self) -> None:
        """Begin anew after a checkpoint."""
        self._saved_at = time.monotonic()


# Called after every evaluation with the stage's name, the step and the result; returning True ends the run.
AfterEvaluation = Callable[[str, int, HeldOut], bool]


@dataclass(frozen=True)
class RunContext:
    """State shared by the functions that train a run."""

    setup: Setup
    progress: Progress
    monitor: Monitor
    timers: Timers
    signals: Signals
    length: RunLength
    after_evaluation: AfterEvaluation | None


@dataclass(frozen=True)
class StageRun:
    """State shared by the functions that train one stage."""

    run: RunContext
    setup: StageSetup
    optimizer: torch.optim.Optimizer
    objective: Objective
    schedule: Schedule
    watches: list[Watch]
    heap: HeapKeeper
    clock: SaveClock
    sums: GradientSum | None  # None where autograd adds the gradients of one process
    cells_per_token: float
    room: Room | None  # None where micro-batches are never cut
    max_epochs: int | None  # of `num_epochs`
    epochs_per_evaluation: int
