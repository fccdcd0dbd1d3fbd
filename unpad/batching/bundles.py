"""Bundles: sequences that one micro-batch must hold together, such as the two replies of a pair.

Strategies group a bundle as one piece with the length of all its pieces; afterwards every bundle is unfolded. So
strategies need not know about bundles, and cannot separate them.
"""

from __future__ import annotations

import numpy as np

from unpad.batching.grouping import Grouping, offsets_of, reorder_runs
from unpad.errors import PlanError
from unpad.recipes.training import PlanSettings


def bundled(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Order pieces by bundle; the others follow as they are.

    Args:
        numbers: bundle of every piece, (num_pieces,) int64; -1 for a piece by itself.

    Returns:
        Indices of the pieces, (num_pieces,) int64, and offsets of the bundles into them, (num_bundles + 1,) int64.
    """
    numbers = _own(numbers)
    order = np.argsort(numbers, kind="stable")
    return order, offsets_of(np.unique(numbers, return_counts=True)[1])


def unfold(grouping: Grouping, offsets: np.ndarray, lengths: np.ndarray, settings: PlanSettings) -> Grouping:
    """Put the pieces of every bundle in its place.

    A rectangle as wide as its longest bundle becomes one as wide as its longest piece.

    Args:
        offsets: start of each bundle in the pieces, (num_bundles + 1,) int64.
        lengths: tokens of each piece, (num_pieces,) int64.
    """
    order, moved = reorder_runs(offsets, grouping.order)
    micro_offsets = moved[grouping.micro_offsets]
    longest = np.maximum.reduceat(lengths[order], micro_offsets[:-1]) if len(order) else grouping.pad_to
    narrowed = (grouping.pad_to > 0) & (grouping.pad_to != settings.max_tokens)
    pad_to = np.where(narrowed, longest, grouping.pad_to).astype(np.int32)
    return grouping._replace(order=order, micro_offsets=micro_offsets, pad_to=pad_to)


def with_others(over: np.ndarray, numbers: np.ndarray, settings: PlanSettings) -> np.ndarray:
    """Extend a mask of sequences over a limit to the other sequences of their bundles, (n,) bool.

    Args:
        over: (n,) bool; numbers: bundles of the same sequences as in `bundled`, (n,) int64.

    Raises:
        PlanError: the settings would cut one of several sequences of a bundle.
    """
    _, bundle, sizes = np.unique(_own(numbers), return_inverse=True, return_counts=True)
    if settings.overflow not in ("error", "drop") and (over & (sizes[bundle] > 1)).any():
        raise PlanError(
            "a sequence is too long that belongs together with others, and such sequences are never cut",
            where=f"plan.overflow={settings.overflow}",
            fix="set plan.overflow=drop, which drops and counts all that belong together, or raise plan.max_tokens",
        )
    whole: np.ndarray = np.bincount(bundle, over, minlength=len(sizes))[bundle] > 0
    return whole if settings.overflow == "drop" else over


def _own(numbers: np.ndarray) -> np.ndarray:
    """Number sequences without a bundle as bundles of one, after all others."""
    alone: np.ndarray = np.where(numbers < 0, numbers.max(initial=0) + 1 + np.arange(len(numbers)), numbers)
    return alone
