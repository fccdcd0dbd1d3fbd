"""Ragged batches: real tokens only, no padding."""

import numpy as np

from unpad.batching.grouping import Grouping, runs_within
from unpad.recipes.training import PlanSettings

# Number of pieces after the end of a step with which a piece of the step may trade places.
WINDOW = 64
# Tokens of a step that no trade fills are a multiple of this: matrix libraries prepare a kernel for every new size.
ROUND_TOKENS = 64
# Most steps to look for trades in, at some 50 microseconds per step.
MOST_STEPS = 20_000


def group(lengths: np.ndarray, settings: PlanSettings, rng: np.random.Generator) -> Grouping:
    """Fill steps with shuffled pieces up to `tokens_per_step`, then cut each step into micro-batches.

    Inside a step the pieces are sorted by length, longest first, because attention groups neighbours of like length.
    Steps and micro-batches exceed their number of tokens only if a single piece does.

    Args:
        lengths: tokens per piece, (num_pieces,) int64.
    """
    order, bounds = filled_runs(lengths, rng.permutation(len(lengths)), settings.tokens_per_step)
    step_of = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    longest = int(lengths.max(initial=0))
    order = order[np.argsort(step_of * (longest + 1) - lengths[order], kind="stable")]  # by step, then longest first
    micro_offsets = runs_within(lengths[order], settings.tokens_per_micro, ends=bounds[step_of + 1])
    none = np.zeros(len(micro_offsets) - 1, np.int32)
    return Grouping(order, micro_offsets, np.searchsorted(micro_offsets, bounds), none, none)


def filled_runs(lengths: np.ndarray, order: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut pieces in random order into runs of at most `limit` tokens, most of them full to the token.

    If a run ends below the limit, one of its pieces trades places with one of the next WINDOW, so that the run is full,
    or else a multiple of ROUND_TOKENS below. Trades depend on lengths alone and reach a few steps ahead.

    Args:
        lengths: tokens per piece, (num_pieces,) int64.
        order: a permutation, (num_pieces,) int64.

    Returns:
        The order with pieces traded, and offsets of the runs into it, (num_runs + 1,) int64.
    """
    if lengths.sum() > limit * MOST_STEPS:
        return order, runs_within(lengths[order], limit)
    order, tokens, bounds = order.copy(), lengths[order], [0]
    while bounds[-1] < len(order):
        begin = bounds[-1]
        end = begin + _count_within(tokens, begin, limit)
        bounds.append(end)
        gap, later = limit - int(tokens[begin:end].sum()), tokens[end : end + WINDOW]
        if gap <= 0 or not later.size:
            continue
        gains = later - tokens[begin:end, None]  # (pieces of the run, pieces after it), tokens that a trade adds
        fits = (gains <= gap) & (gains > gap - limit // 8) & ((gap - gains) % ROUND_TOKENS == 0)
        if fits.any():
            mine, theirs = np.divmod(np.where(fits, gains, -limit).argmax(), later.size)
            trade = [begin + mine, end + theirs]
            order[trade], tokens[trade] = order[trade[::-1]], tokens[trade[::-1]]
    return order, np.array(bounds, np.int64)


def _count_within(tokens: np.ndarray, begin: int, limit: int) -> int:
    """Number of pieces from `begin` on with at most `limit` tokens together; at least one."""
    reach = 64
    while True:
        sums = np.cumsum(tokens[begin : begin + reach])
        count = int(np.searchsorted(sums, limit, side="right"))
        if count < reach or begin + reach >= len(tokens):
            return max(count, 1)
        reach *= 4
