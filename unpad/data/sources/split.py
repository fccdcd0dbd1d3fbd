"""Which documents are held out: decided by each document's own content and the seed."""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from unpad.data.sources.example import Example

UNDECLARED, TRAIN, HOLDOUT = -1, 0, 1


def content_key(example: Example) -> int:
    """64-bit hash of an example's roles and contents."""
    content = "\0".join(part for turn in example.turns for part in (turn.role, turn.content))
    return int.from_bytes(blake2b(content.encode(), digest_size=8).digest(), "little")


def assign(
    content_keys: NDArray[np.uint64], declared: NDArray[np.int8], holdout: float, seed: int
) -> NDArray[np.uint8]:
    """Choose a side for every document: 0 training, 1 held out.

    A document's side depends on its key and the seed alone, so other documents move nobody. Equal documents share a
    side: copies of a declared one follow it, to training where the declarations disagree. Only when a side would stay
    empty does the undeclared content with the smallest hash move to the held-out side, or the largest to training.

    Args:
        content_keys: `content_key` of each document, (num_documents,) uint64.
        declared: -1 undeclared, 0 training, 1 held out, (num_documents,) int8; declarations always hold.
        holdout: share of the undeclared documents to hold out, in [0, 1).

    Returns:
        (num_documents,) uint8.
    """
    drawn = _mix(content_keys ^ _mix(np.array([seed], np.uint64)))  # (num_documents,) uint64, uniform
    side = (drawn < np.uint64(int(holdout * 2.0**64))).astype(np.uint8)
    for value in (HOLDOUT, TRAIN):
        side[np.isin(content_keys, content_keys[declared == value])] = value
    side[declared != UNDECLARED] = declared[declared != UNDECLARED]
    free = (declared == UNDECLARED) & ~np.isin(content_keys, content_keys[declared != UNDECLARED])
    if holdout > 0 and np.unique(content_keys).size > 1 and free.any():
        if not side.any():
            side[free & (drawn == drawn[free].min())] = HOLDOUT
        elif side.all():
            side[free & (drawn == drawn[free].max())] = TRAIN
    return side


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele et al. 2014, "Fast splittable pseudorandom number generators")."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
