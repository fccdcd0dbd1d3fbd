"""Split of examples into training and held-out ones, by content and seed alone."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from unpad.data.sources.example import Example, SplitName


class Split(IntEnum):
    """Part of the data that an example belongs to.

    UNDECLARED examples leave the choice to the seed; TEST examples are left out of a run and counted.
    """

    UNDECLARED = -1
    TRAIN = 0
    HOLDOUT = 1
    TEST = 2


_BY_NAME = {None: Split.UNDECLARED, "train": Split.TRAIN, "holdout": Split.HOLDOUT, "test": Split.TEST}


def declared_splits(names: Iterable[SplitName | None]) -> NDArray[np.int8]:
    """Turn the names that rows declare into splits, (num_names,) int8 of `Split`."""
    return np.array([_BY_NAME[name] for name in names], np.int8)


def describe_split(split: NDArray[np.uint8]) -> str:
    """Describe the number of sequences of each split."""
    num_train, num_holdout = (int((split == side).sum()) for side in (Split.TRAIN, Split.HOLDOUT))
    return f"{num_train:,} to train on, {num_holdout:,} held out"


def content_key(example: Example) -> int:
    """64-bit hash of an example's roles and contents."""
    content = "\0".join(part for turn in example.turns for part in (turn.role, turn.content))
    return int.from_bytes(blake2b(content.encode(), digest_size=8).digest(), "little")


def assign(
    content_keys: NDArray[np.uint64], declared: NDArray[np.int8], holdout: float, seed: int
) -> NDArray[np.uint8]:
    """Choose a split for every document, TRAIN or HOLDOUT.

    A document's split depends on its key and the seed alone, and never on other documents. Equal documents share a
    split: copies of a declared one follow it, to training if the declarations disagree. Only if a split would be
    empty, the undeclared content with the smallest hash moves to HOLDOUT, or with the largest to TRAIN.

    Args:
        content_keys: `content_key` of each document, (num_documents,) uint64.
        declared: split that each document declares, (num_documents,) int8 of `Split`; declarations always hold.
        holdout: share of the undeclared documents to hold out, in [0, 1).

    Returns:
        (num_documents,) uint8 of `Split`.
    """
    drawn = _mix(content_keys ^ _mix(np.array([seed], np.uint64)))  # (num_documents,) uint64, uniform
    side = (drawn < np.uint64(int(holdout * 2.0**64))).astype(np.uint8)
    for value in (Split.HOLDOUT, Split.TRAIN):
        side[np.isin(content_keys, content_keys[declared == value])] = value
    side[declared != Split.UNDECLARED] = declared[declared != Split.UNDECLARED]
    free = (declared == Split.UNDECLARED) & ~np.isin(content_keys, content_keys[declared != Split.UNDECLARED])
    if holdout > 0 and np.unique(content_keys).size > 1 and free.any():
        if not side.any():
            side[free & (drawn == drawn[free].min())] = Split.HOLDOUT
        elif side.all():
            side[free & (drawn == drawn[free].max())] = Split.TRAIN
    return side


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele et al. 2014, "Fast splittable pseudorandom number generators")."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
