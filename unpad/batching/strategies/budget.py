"""Padded batches of similar lengths, limited by padded tokens."""

import numpy as np

from unpad.batching.grouping import Grouping, shuffled
from unpad.recipes.training import PlanSettings

JITTER = 0.05  # share of a piece's length; mixes neighbouring batches differently in every epoch


def group(lengths: np.ndarray, settings: PlanSettings, rng: np.random.Generator) -> Grouping:
    """Batches of similar lengths with at most `tokens_per_micro` padded tokens, in random order.

    A piece longer than `tokens_per_micro` forms a batch alone.

    Args:
        lengths: tokens per piece, (num_pieces,) int64.
    """
    noisy = lengths * rng.uniform(1 - JITTER, 1 + JITTER, len(lengths))
    order = np.argsort(noisy, kind="stable")
    limit, offsets, start, longest = settings.tokens_per_micro, [0], 0, 0
    for index, length in enumerate(lengths[order].tolist()):
        if length > longest:
            longest = length
        if longest * (index - start + 1) > limit and index > start:
            offsets.append(index)
            start, longest = index, length
    if len(order):
        offsets.append(len(order))
    return shuffled(lengths, order, np.array(offsets, np.int64), settings, rng)
