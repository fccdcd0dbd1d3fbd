"""Batches of the peers: those that the Trainer's samplers make, in an order fit for measuring."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from workloads import SEED

MEGABATCH = 50  # batches that are sorted by length together, in transformers' LengthGroupedSampler
STRATA = 8  # a round of a padded side holds a multiple of so many steps, one from each part of the lengths


def epoch_batches(
    lengths: Sequence[int], size: int, grouped: bool, generator: torch.Generator, strata: int = STRATA
) -> list[list[int]]:
    """One epoch of the batches that the Trainer's samplers make, in an order fit for measuring.

    `train_sampling_strategy="random"` cuts a random order into batches; `"group_by_length"` sorts 50 batches at a time,
    longest first. Either way what a batch costs follows its longest sequence, and a few steps in a row may all be
    expensive or all cheap. Here every `strata` batches in a row hold one of each of so many parts of the batches,
    sorted by their longest sequence, so that every round sees all of them alike; up to `strata` - 1 batches that are
    left over are dropped.
    """
    batches = []
    for part in torch.randperm(len(lengths), generator=generator).split(MEGABATCH * size):
        order = part.tolist()
        if grouped:
            order.sort(key=lambda i: lengths[i], reverse=True)
        batches += [order[i : i + size] for i in range(0, len(order), size)]
    strata = min(strata, len(batches))
    whole = len(batches) // strata * strata
    kept = [batches[i] for i in torch.randperm(len(batches), generator=generator)[:whole].tolist()]
    kept.sort(key=lambda batch: max(lengths[i] for i in batch))
    columns = [
        [kept[start + i] for i in torch.randperm(whole // strata, generator=generator).tolist()]
        for start in range(0, whole, whole // strata)
    ]
    return [columns[i][row] for row in range(whole // strata) for i in torch.randperm(strata, generator=generator)]


class Batches:
    """Batches of example numbers, epoch after epoch.

    Args:
        strata: parts of the lengths; every cycle of so many steps has a batch of each.
    """

    def __init__(self, lengths: Sequence[int], size: int, grouped: bool, strata: int = STRATA) -> None:
        self.lengths, self.size, self.grouped, self.strata = lengths, size, grouped, strata
        self._given = 0
        self.generator = torch.Generator().manual_seed(SEED)
        self._rest: deque[list[int]] = deque()

    @property
    def cycle(self) -> int:
        """Steps that together see short and long batches alike."""
        if min(self.lengths) == max(self.lengths):
            return 1
        return min(self.strata, -(-len(self.lengths) // self.size))

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if not self._rest:
            self._rest.extend(epoch_batches(self.lengths, self.size, self.grouped, self.generator, self.strata))
        self._given += 1
        return self._rest.popleft()

    def begin_cycle(self) -> None:
        """Pass over what is left of a cycle that has begun."""
        for _ in range(-self._given % self.cycle):
            next(self)

    def longest_next(self) -> None:
        """Put a batch of the longest sequences in front, which decides the memory; it belongs to no cycle."""
        self._given -= 1
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i], reverse=True)
        if self.grouped:
            self._rest.appendleft(order[: self.size])
        else:  # in random order one long sequence makes the batch as wide
            self._rest.appendleft([order[0], *order[-self.size + 1 :]])
