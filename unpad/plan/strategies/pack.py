"""Ragged batches: real tokens only, no padding."""

from __future__ import annotations

import numpy as np

from unpad.plan.grouping import Grouping, runs_within
from unpad.recipe import PlanSettings


def group(lengths: np.ndarray, settings: PlanSettings, rng: np.random.Generator) -> Grouping:
    """Fill steps with shuffled pieces up to `tokens_per_step`, then cut each step into micro-batches.

    Inside a step the pieces are sorted by length, longest first, because attention groups neighbours of like length.
    No step and no micro-batch exceeds its number of tokens unless a single piece does.

    Args:
        lengths: tokens per piece, (num_pieces,) int64.
    """
    order = rng.permutation(len(lengths))
    bounds = runs_within(lengths[order], settings.tokens_per_step)  # (num_steps + 1,) into order
    step_of = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    longest = int(lengths.max(initial=0))
    order = order[np.argsort(step_of * (longest + 1) - lengths[order], kind="stable")]  # by step, then longest first
    micro_offsets = runs_within(lengths[order], settings.tokens_per_micro, ends=bounds[step_of + 1])
    none = np.zeros(len(micro_offsets) - 1, np.int32)
    return Grouping(order, micro_offsets, np.searchsorted(micro_offsets, bounds), none, none)
