"""Sequences of an epoch, drawn by the weights of their sources."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from unpad.errors import PlanError


def draw_sequences(source_of: np.ndarray, weights: Sequence[float], seed: int, epoch: int) -> np.ndarray:
    """Draw the sequences of one epoch: weight w takes each sequence floor(w) times, and a random share of the rest.

    The share is drawn without replacement, and its size is right on average over epochs.

    Args:
        source_of: source of each sequence, an index into weights, (num_sequences,) int.
        weights: epochs of each source per epoch of the run.

    Returns:
        Sequence ids in ascending order, (n,) int64; all of them once where every weight is 1.

    Raises:
        PlanError: a weight is not a positive number, or a sequence names a source without one.
    """
    source_of = np.asarray(source_of).astype(np.int64)
    for source, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise PlanError(f"source {source} has weight {weight}", fix="give it a positive number")
    if len(source_of) and not (source_of.min() >= 0 and source_of.max() < len(weights)):
        raise PlanError(f"a sequence is of source {source_of.max()}, there are {len(weights)} weights")
    # The third word separates this stream from the one that orders the plan.
    rng = np.random.default_rng([seed, epoch, 1])
    times = np.floor(np.array(weights)).astype(np.int64)[source_of]  # (num_sequences,)
    for source, weight in enumerate(weights):
        members = np.flatnonzero(source_of == source)
        share = math.floor(weight % 1 * len(members) + rng.random())
        times[rng.permutation(members)[:share]] += 1
    return np.repeat(np.arange(len(source_of)), times)
