"""Rows of a fixed number of tokens filled with whole pieces, for compilers that need few shapes."""

from bisect import bisect_left, insort

import numpy as np

from unpad.batching.grouping import Grouping, follow, offsets_of, runs_within
from unpad.errors import PlanError
from unpad.recipes.training import PlanSettings


def group(lengths: np.ndarray, settings: PlanSettings, rng: np.random.Generator) -> Grouping:
    """Fill rows of `row_tokens` by best fit, shuffle them, and take them in turn.

    A step is rows of at most `tokens_per_step` real tokens; a micro-batch is at most `tokens_per_micro` // `row_tokens`
    of its rows, at least one, filled up to whole rows.

    Args:
        lengths: tokens per piece, (num_pieces,) int64.

    Raises:
        PlanError: a piece is longer than `row_tokens`.
    """
    size = settings.row_tokens
    if lengths.max(initial=0) > size:
        what = f"a sequence of {lengths.max()} tokens does not fit a row of {size}"
        fix = f"raise plan.row_tokens to {lengths.max()}, or set plan.max_tokens={size}"
        raise PlanError(what, where="plan.row_tokens", fix=fix)
    row_of = best_fit_decreasing(np.maximum(lengths, 1), size)  # a piece without tokens takes the room of one token
    num_rows = int(row_of.max(initial=-1)) + 1
    row_of = rng.permutation(num_rows)[row_of]
    order = np.argsort(row_of, kind="stable")
    real = np.bincount(row_of, weights=lengths, minlength=num_rows).astype(np.int64)  # exact: far below 2**53
    bounds = runs_within(real, settings.tokens_per_step)  # (num_steps + 1,) into rows
    ends = np.repeat(bounds[1:], np.diff(bounds))
    per_micro = max(1, settings.tokens_per_micro // size)
    micros = follow(np.minimum(np.arange(num_rows) + per_micro, ends))  # (num_micros + 1,) into rows
    pieces_before = offsets_of(np.bincount(row_of, minlength=num_rows))
    fill_to = (np.diff(micros) * size).astype(np.int32)
    return Grouping(order, pieces_before[micros], np.searchsorted(micros, bounds), np.zeros_like(fill_to), fill_to)


def best_fit_decreasing(lengths: np.ndarray, row_tokens: int) -> np.ndarray:
    """Put each piece, longest first, into the row with the least space that holds it; open rows as needed.

    Best-fit decreasing: Johnson (1974), "Fast algorithms for bin packing". Pieces of one length are placed together,
    and rows with the same space form a class: the best row for a length stays the best until it is full for that
    length, so a class takes its pieces at once. A class loses at least half its space each time, which bounds the work
    by (different lengths) * log2(row_tokens).

    Args:
        lengths: tokens per piece, (num_pieces,) int64, each from 1 to row_tokens.

    Returns:
        The row of each piece, (num_pieces,) int64; rows count from 0 without gaps.
    """
    row_of = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(-lengths, return_counts=True)
    space_of: dict[int, list[np.ndarray]] = {}  # space left -> row numbers, in chunks
    spaces: list[int] = []  # its keys, ascending
    num_rows = first = 0

    def give_back(space: int, row_ids: np.ndarray) -> None:
        if space and len(row_ids):
            if space not in space_of:
                insort(spaces, space)
            space_of.setdefault(space, []).append(row_ids)

    for length, count in zip((-values).tolist(), counts.tolist(), strict=True):
        left = count
        while left:
            place = bisect_left(spaces, length)
            if place < len(spaces):
                space = spaces.pop(place)
                chunks = space_of.pop(space)
                row_ids = np.concatenate(chunks) if len(chunks) > 1 else chunks[0]
            else:
                space = row_tokens
                row_ids = np.arange(num_rows, num_rows - (-left // (row_tokens // length)))
                num_rows += len(row_ids)
            each = space // length
            full = min(len(row_ids), left // each)  # rows that take `each` pieces
            some = min(left - full * each, each) if full < len(row_ids) else 0  # pieces of one more row
            taken = np.concatenate((np.repeat(row_ids[:full], each), np.repeat(row_ids[full : full + 1], some)))
            row_of[by_length[first : first + len(taken)]] = taken
            first, left = first + len(taken), left - len(taken)
            give_back(space - each * length, row_ids[:full])
            used = full + (some > 0)
            give_back(space - some * length, row_ids[full:used])
            give_back(space, row_ids[used:])
    return row_of
