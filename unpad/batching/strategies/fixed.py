"""Padded batches of a fixed number of sequences, all padded to one length."""

import numpy as np

from unpad.batching.grouping import Grouping
from unpad.batching.strategies import dynamic
from unpad.recipes.training import PlanSettings


def group(lengths: np.ndarray, settings: PlanSettings, rng: np.random.Generator) -> Grouping:
    """Consecutive shuffled batches of `batch_size`, padded to `max_tokens`, by default to the longest piece.

    Args:
        lengths: tokens per piece, (num_pieces,) int64.
    """
    grouping = dynamic.group(lengths, settings, rng)
    cap = settings.max_tokens or int(lengths.max(initial=0))
    return grouping._replace(pad_to=np.full_like(grouping.pad_to, cap))
