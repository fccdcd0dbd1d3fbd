"""Padded batches of a fixed number of sequences, each padded to its longest (apart: its name is that of its file)."""

import numpy as np

from unpad.batching.grouping import Grouping, padded
from unpad.recipes.training import PlanSettings


def group(lengths: np.ndarray, settings: PlanSettings, rng: np.random.Generator) -> Grouping:
    """Consecutive shuffled batches of `batch_size`, each padded to its longest piece.

    Args:
        lengths: tokens per piece, (num_pieces,) int64.
    """
    order = rng.permutation(len(lengths))
    return padded(lengths, order, np.append(np.arange(0, len(order), settings.batch_size), len(order)), settings)
