"""Causes of a wrong loss of a trainer's own, found by trying it on other batches and other numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unpad.proof.foreign.judge import raise_memory
from unpad.proof.foreign.known import Batch

FITS = 1e-5  # relative difference of two losses that are the same
CROSSES = (
    "the loss of sequences that share a row is not the sum of theirs: it reads tokens or labels across their ends, as "
    "heads for tokens further ahead and terms of earlier targets do"
)
BY_ARGUMENTS = (
    "the loss divides by args.gradient_accumulation_steps, and an update can have fewer micro-batches; divide by "
    "current_gradient_accumulation_steps"
)
DIVIDED = (
    "the loss is divided by num_items_in_batch, and other batches of the same sequences have another: a term of it is "
    "one per batch or per row, or reads several rows"
)
# Loss of an update by its micro-batches, the factor of its divisor, and that of the accumulation in the arguments.
Try = Callable[[Sequence[Batch], int, int], float]


def cause_of(loss: Try, batches: Sequence[Batch], alone: Sequence[Batch], truth: float, shares_rows: bool) -> str:
    """Cause for which a loss is not that of its sequences one at a time; empty where nothing shows.

    Args:
        alone: the batch of each sequence with a target.
        truth: the loss of the sequences one at a time.
        shares_rows: whether a row of the batches has several sequences.
    """

    def tried(*given: object) -> float:
        try:
            return loss(*given)  # type: ignore[arg-type]
        except Exception as error:
            raise_memory(error)
            return float("nan")

    def same(one: float, other: float) -> bool:
        return abs(one - other) <= FITS * abs(other)

    now = tried(batches, 1, 1)
    if shares_rows and same(tried(alone, 1, 1), truth):
        return CROSSES
    if not same(tried(batches, 1, 2), now):
        return BY_ARGUMENTS
    return "" if same(tried(batches, 2, 1), now) else DIVIDED
