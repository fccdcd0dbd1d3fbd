"""State that the functions of the training loop share, signals that stop it, the clock of its checkpoints, and the
interface of a watch: an observer that reads the model while a stage trains, and asks the loop to act."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from unpad.batching.plan import Plan
from unpad.errors import HANGUP, SIGNALS, UnpadError
from unpad.evaluation.metrics import HeldOut
from unpad.models.objective import Objective
from unpad.processes.group import ALONE, Group
from unpad.processes.sums import GradientSum
from unpad.run.monitor import Monitor
from unpad.run.saving import Saver
from unpad.run.timers import Timers
from unpad.terminal.printing import resume_run
from unpad.training.memory import HeapKeeper, Room
from unpad.training.optim import Schedule
from unpad.training.progress import Progress
from unpad.training.setup import Setup
from unpad.training.stage import RunLength, StageSetup


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


class Deadline:
    """The end of a training by time.

    Args:
        minutes: from now on; None for no end.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self.minutes = minutes
        self._ends_at = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self.reached = False  # as all processes have agreed

    def due(self) -> bool:
        """True if the next step of this process is to be the last."""
        return time.monotonic() >= self._ends_at


class Signals:
    """Requests to stop: a first Ctrl-C, SIGTERM or SIGHUP stops the run after the step, a second of its kind at once.

    A second SIGHUP does nothing: a terminal that closes sends one, and its shell another.
    """

    def __init__(self, group: Group = ALONE) -> None:
        self.received: int | None = None  # by this process
        self._group = group
        self._agreed: int | None = None

    @property
    def stops(self) -> int | None:
        """Signal that stops the run after the step; with several processes, one that all have agreed on."""
        return self.received if self._group.size == 1 else self._agreed

    def agree(self, received: Sequence[int | None]) -> None:
        """Record the signals that all processes have received."""
        self._agreed = next((number for number in received if number is not None), self._agreed)

    @contextmanager
    def listen(self) -> Iterator[None]:
        def handle(number: int, frame: FrameType | None) -> None:
            self.received = self.received or number
            if number != HANGUP:
                signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)

        # nohup has SIGHUP ignored.
        numbers = [signum for signum in SIGNALS if signum != HANGUP or signal.getsignal(signum) is not signal.SIG_IGN]
        try:
            before = {number: signal.signal(number, handle) for number in numbers}
        except ValueError:  # not the main thread: the caller owns the signals
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def raise_if_received(self, folder: Path) -> None:
        if self.stops is None:
            return
        kind = SIGNALS[self.stops]
        what = f"stopped by {kind.name}; everything up to here is saved"
        error = kind(what, where=str(folder), fix=f"continue with {resume_run(folder)}")
        error.is_agreed = True
        raise error


Action = Literal["save", "stop", "recover"]


@dataclass(frozen=True)
class Verdict:
    """Result of one reading.

    Args:
        light: green, yellow, orange, or red for a confirmed fault.
        changed: whether the light differs from that of the reading before.
        action: the training loop's next action: save the last healthy weights, return to them, or stop.
        message: light and reasons, in words.
        values: the reading as JSON values, for a row of metrics.jsonl.
    """

    step: int
    light: str
    changed: bool
    action: Action | None
    message: str
    values: dict[str, Any]


@dataclass(frozen=True)
class SavedWatches:
    """Starting point of the watches of a stage: the step, and their part of the checkpoint the run resumes from.

    Args:
        step: last step of the run.
        stage_start: last step before the stage.
        states: `Watch.values` of each watch, by name; none at the beginning of a stage.
        tensors: all tensors of the checkpoint.
    """

    step: int = 0
    stage_start: int = 0
    states: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Watch(Protocol):
    """Observer of one stage.

    Attributes:
        name: kind of its events, and name of its state in a checkpoint.
        subject: kind of its rows in metrics.jsonl, and name of its timer.
    """

    name: str
    subject: str

    def describe(self) -> str:
        """Describe the readings in words; empty if there will be none."""

    def due(self, step: int) -> bool:
        """True if a reading is due after this step of the run."""

    def check(self, step: int) -> Verdict:
        """Read the model after step `step` of the run. Equal weights and an equal state give an equal verdict."""

    def scaled(self, weights: dict[str, float]) -> dict[str, float]:
        """Return the weights of loss terms after all recoveries."""

    def values(self) -> dict[str, Any]:
        """State of the watch as JSON values, for a checkpoint."""

    def tensors(self) -> dict[str, Tensor]:
        """Additional tensors of a checkpoint, by names that no other part of it uses."""

    def save_healthy(self, checkpoints: Path, group: Group = ALONE) -> Path:
        """Write the weights of the last healthy reading into the folder of checkpoints; return their path.

        Args:
            group: all of these processes call it, and the first writes.
        """

    def recover(self, step: int, optimizer: torch.optim.Optimizer) -> str:
        """Load the weights of the last healthy reading and reset the optimizer; return a log message."""

    def error(self, verdict: Verdict) -> UnpadError:
        """Build the error that stops the run."""


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
    deadline: Deadline = field(default_factory=Deadline)
    saver: Saver = field(default_factory=Saver)


@dataclass(frozen=True)
class StageRun:
    """State shared by the functions that train one stage."""

    run: RunContext
    setup: StageSetup
    first: Plan  # of epoch 0
    num_frozen: int  # values that do not learn
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
