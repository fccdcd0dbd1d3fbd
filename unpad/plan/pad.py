"""Padded batches of a fixed number of sequences: `fixed` pads to the global cap, `dynamic` to the batch's longest."""

from __future__ import annotations

import numpy as np

from unpad.plan.grouping import Grouping, reorder_runs, runs_reaching, sum_runs
from unpad.recipe import PlanSettings


def fixed(lengths: np.ndarray, settings: PlanSettings, rng: np.random.Generator) -> Grouping:
    """Consecutive shuffled batches of `batch_size`, padded to `max_tokens`, or the longest piece where there is no cap.

    Args:
        lengths: tokens per piece, (num_pieces,) int64.
    """
    grouping = dynamic(lengths, settings, rng)
    cap = settings.max_tokens or int(lengths.max(initial=0))
    return grouping._replace(pad_to=np.full_like(grouping.pad_to, cap))


def dynamic(lengths: np.ndarray, settings: PlanSettings, rng: np.random.Generator) -> Grouping:
    """Consecutive shuffled batches of `batch_size`, each padded to its own longest piece.

    Args:
        lengths: tokens per piece, (num_pieces,) int64.
    """
    order = rng.permutation(len(lengths))
    offsets = np.append(np.arange(0, len(order), settings.batch_size), len(order))
    return padded(lengths, order, offsets, settings.tokens_per_step)


def shuffled(
    lengths: np.ndarray, order: np.ndarray, offsets: np.ndarray, settings: PlanSettings, rng: np.random.Generator
) -> Grouping:
    """Padded batches in random order, so that their lengths do not drift over the epoch."""
    index, offsets = reorder_runs(offsets, rng.permutation(len(offsets) - 1))
    return padded(lengths, order[index], offsets, settings.tokens_per_step)


def padded(lengths: np.ndarray, order: np.ndarray, offsets: np.ndarray, tokens_per_step: int) -> Grouping:
    """Pad each batch to its longest piece; a step is batches in a row until they hold `tokens_per_step` real tokens."""
    ordered = lengths[order]
    longest = np.maximum.reduceat(ordered, offsets[:-1]) if len(ordered) else np.zeros(0, np.int64)
    steps = runs_reaching(sum_runs(ordered, offsets), tokens_per_step)
    return Grouping(order, offsets, steps, longest.astype(np.int32), np.zeros(len(longest), np.int32))
