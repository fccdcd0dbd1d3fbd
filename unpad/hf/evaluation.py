"""Evaluation: the loss as the mean over all targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor


def is_mean_of_means(targets: np.ndarray, batch_size: int) -> bool:
    """True if the mean over rows of the means of their batches, as trainers compute it, is the mean over targets.

    Args:
        targets: of each row, (num_rows,) int64, in order.
    """
    starts = np.arange(0, len(targets), batch_size)
    rows = np.diff([*starts, len(targets)])
    return bool((np.add.reduceat(targets, starts) * len(targets) == rows * targets.sum()).all())


@dataclass
class MeanOverTargets:
    """Sum of losses and number of targets; the mean of the batches' means would depend on the batches."""

    total: float = 0.0
    num_targets: int = 0

    def add(self, mean: Tensor, num_targets: int) -> None:
        """Add a batch by its loss, the mean over its targets."""
        if num_targets:
            self.total += float(mean) * num_targets
            self.num_targets += num_targets

    @classmethod
    def of_parts(cls, parts: Sequence[Sequence[float]]) -> MeanOverTargets:
        """Sum of parts of a set: `total` and `num_targets` of each."""
        return cls(sum(total for total, _ in parts), int(sum(num for _, num in parts)))

    @property
    def mean(self) -> float:
        """In nats per target."""
        return self.total / self.num_targets
