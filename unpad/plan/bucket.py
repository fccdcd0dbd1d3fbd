"""Padded batches of similar lengths: `bucket` by a fixed width, `budget` by padded tokens per batch."""

from __future__ import annotations

import numpy as np

from unpad.plan.grouping import Grouping, offsets_of
from unpad.plan.pad import shuffled
from unpad.recipe import PlanSettings

JITTER = 0.05  # share of a piece's length; moves sequences between neighbouring batches from epoch to epoch


def bucket(lengths: np.ndarray, settings: PlanSettings, rng: np.random.Generator) -> Grouping:
    """Batches of at most `batch_size` pieces from one bucket, floor(length / width) * width, in random order.

    Args:
        lengths: tokens per piece, (num_pieces,) int64.
    """
    order = rng.permutation(len(lengths))
    bucket_of = lengths[order] // settings.bucket_width
    by_bucket = np.argsort(bucket_of, kind="stable")
    counts = np.unique(bucket_of, return_counts=True)[1]
    num_batches = -(-counts // settings.batch_size)  # (num_buckets,)
    batch = np.arange(num_batches.sum()) - np.repeat(offsets_of(num_batches)[:-1], num_batches)
    starts = np.repeat(offsets_of(counts)[:-1], num_batches) + batch * settings.batch_size
    return shuffled(lengths, order[by_bucket], np.append(starts, len(order)), settings, rng)


def budget(lengths: np.ndarray, settings: PlanSettings, rng: np.random.Generator) -> Grouping:
    """Batches of similar lengths with at most `tokens_per_micro` padded tokens, in random order.

    A piece longer than `tokens_per_micro` is a batch of its own.

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
