"""Interface of a watch: an observer that reads the model while a stage trains, and asks the loop to act."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from unpad.errors import UnpadError
from unpad.processes.group import ALONE, Group

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
        ...

    def due(self, step: int) -> bool:
        """True if a reading is due after this step of the run."""
        ...

    def check(self, step: int) -> Verdict:
        """Read the model after step `step` of the run. Equal weights and an equal state give an equal verdict."""
        ...

    def scaled(self, weights: dict[str, float]) -> dict[str, float]:
        """Return the weights of loss terms after all recoveries."""
        ...

    def values(self) -> dict[str, Any]:
        """State of the watch as JSON values, for a checkpoint."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Additional tensors of a checkpoint, by names that no other part of it uses."""
        ...

    def save_healthy(self, checkpoints: Path, group: Group = ALONE) -> Path:
        """Write the weights of the last healthy reading into the folder of checkpoints; return their path.

        Args:
            group: all of these processes call it, and the first writes.
        """
        ...

    def recover(self, step: int, optimizer: torch.optim.Optimizer) -> str:
        """Load the weights of the last healthy reading and reset the optimizer; return a log message."""
        ...

    def error(self, verdict: Verdict) -> UnpadError:
        """Build the error that stops the run."""
        ...
