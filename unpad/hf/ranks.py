"""Division of the micro-batches of updates among ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from unpad.batching.shares import assign_equally


@dataclass(frozen=True)
class Ranks:
    """One rank among those that train a model, and how updates are divided among them.

    Args:
        rank: number of this one, from 0, of `size`.
        micros: micro-batches of each rank in an update; the last update of an epoch may have fewer.
        cells_per_token: as of `micro_cost`.
    """

    rank: int = 0
    size: int = 1
    micros: int = 1
    cells_per_token: float = math.inf

    def own(self, micros: Sequence[list[int]], lengths: np.ndarray) -> Iterator[list[int]]:
        """The micro-batches of this rank among those of an epoch: an equal number in every update, shared out by cost.

        Args:
            micros: indices of sequences; a multiple of `size`.
            lengths: tokens per sequence, (num_sequences,) int64.
        """
        if self.size == 1:
            yield from micros
            return
        for start in range(0, len(micros), self.size * self.micros):
            update = micros[start : start + self.size * self.micros]
            costs = [self._cost(lengths[np.asarray(micro)]) for micro in update]
            yield from (update[index] for index in assign_equally(costs, self.size)[self.rank])

    def _cost(self, lengths: np.ndarray) -> float:
        return float(lengths.sum() + np.square(lengths).sum() / self.cells_per_token)
