"""Score of a pruned model: its loss of accuracy, and the distance of its kept share from the wanted range."""

from __future__ import annotations

KEEP_RANGE = (0.10, 0.60)  # range of kept shares within which fewer tokens are only slightly better
OUTSIDE, INSIDE = 10.0, 0.1  # penalty per distance from that range, and per kept share within it
STEEPNESS = 50.0


def prune_score(accuracy_origin: float, accuracy: float, keep: float) -> float:
    """Higher is better: -drop (1 + 50 drop) for a drop in accuracy, and the gain as it is where there is none; less a
    penalty of 10 times the distance of `keep` from 0.10 to 0.60, or within these of a tenth of it.

    Args:
        accuracy_origin, accuracy: without pruning and with it, from 0 to 1.
        keep: share of the visual tokens that stays, from 0 to 1.
    """
    drop = accuracy_origin - accuracy
    worth = -drop * (1 + STEEPNESS * drop) if drop > 0 else -drop
    low, high = KEEP_RANGE
    distance = max(low - keep, keep - high, 0.0)
    return worth - (OUTSIDE * distance if distance else INSIDE * keep)
