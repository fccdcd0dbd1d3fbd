"""Parts of a batch: consecutive sequences that a forward pass computes by themselves."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import PaddedLayout


def in_parts(batch: RaggedBatch, most: int) -> list[RaggedBatch]:
    """Cut a batch between its sequences, in order; bundles stay whole, and rows of a rectangle keep their width.

    Args:
        most: computed tokens of a part, as far as sequences and bundles allow.

    Returns:
        The parts; the batch itself if it is one of them.
    """
    bounds = _bounds(batch)  # (num_units + 1,) first sequences of what stays together
    tokens = np.append(0, np.cumsum(_computed(batch)))[bounds]
    cuts = [0]
    for unit in range(1, len(bounds) - 1):
        if tokens[unit + 1] - tokens[cuts[-1]] > most:
            cuts.append(unit)
    cuts.append(len(bounds) - 1)
    if len(cuts) <= 2:
        return [batch]
    return [batch.select(range(bounds[a], bounds[b])) for a, b in pairwise(cuts)]


def _computed(batch: RaggedBatch) -> np.ndarray:
    """Tokens of every sequence, or its cells in a rectangle, (num_seqs,) int64."""
    if isinstance(batch.layout, PaddedLayout):
        return np.full(batch.num_seqs, batch.layout.attention_mask.shape[1], np.int64)
    return batch.layout.lengths().cpu().numpy()


def _bounds(batch: RaggedBatch) -> np.ndarray:
    """Places of sequences between which a batch may be cut, its ends included, (num_units + 1,) int64."""
    last = np.zeros(batch.num_seqs + 1, np.int64)  # end of the bundles that have begun so far
    for members in batch.bundles:
        last[min(members) + 1] = max(members) + 1
    reach = np.maximum.accumulate(last)
    places = np.arange(batch.num_seqs + 1)
    bounds: np.ndarray = np.flatnonzero(reach <= places)
    return bounds
