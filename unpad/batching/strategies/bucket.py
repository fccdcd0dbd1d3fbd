"""Padded batches of a fixed number of sequences from one bucket of lengths."""

import numpy as np

from unpad.batching.grouping import Grouping, offsets_of, shuffled
from unpad.recipes.training import PlanSettings


def group(lengths: np.ndarray, settings: PlanSettings, rng: np.random.Generator) -> Grouping:
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
