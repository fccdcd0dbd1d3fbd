"""Result type of a strategy, and the cuts that strategies share.

A strategy is a function (piece lengths, settings, generator) -> Grouping.
"""

from typing import NamedTuple

import numpy as np

from unpad.errors import PlanError
from unpad.recipes.training import PlanSettings


class Grouping(NamedTuple):
    """Pieces in order, cut into micro-batches, which are cut into steps.

    Args:
        order: indices of pieces, (num_pieces,) int64.
        micro_offsets: (num_micros + 1,) int64 into order.
        step_offsets: (num_steps + 1,) int64 into the micro-batches.
        pad_to: (num_micros,) int32, length that every sequence is padded to; 0 is ragged.
        fill_to: (num_micros,) int32, tokens of the flat run with its filler; 0 is without filler.
    """

    order: np.ndarray
    micro_offsets: np.ndarray
    step_offsets: np.ndarray
    pad_to: np.ndarray
    fill_to: np.ndarray


def split_steps(grouping: Grouping, num_steps: int) -> tuple[Grouping, np.ndarray]:
    """Keep the first steps of a grouping; also return the pieces of the other steps, (num_left,) int64."""
    micros = grouping.step_offsets[num_steps]
    pieces = grouping.micro_offsets[micros]
    order, micro_offsets, step_offsets, pad_to, fill_to = grouping
    first = Grouping(
        order[:pieces], micro_offsets[: micros + 1], step_offsets[: num_steps + 1], pad_to[:micros], fill_to[:micros]
    )
    return first, order[pieces:]


def joined(parts: list[Grouping]) -> Grouping:
    """Concatenate groupings."""
    whole = parts[0]
    for part in parts[1:]:
        whole = Grouping(
            np.concatenate([whole.order, part.order]),
            np.concatenate([whole.micro_offsets, whole.micro_offsets[-1] + part.micro_offsets[1:]]),
            np.concatenate([whole.step_offsets, whole.step_offsets[-1] + part.step_offsets[1:]]),
            np.concatenate([whole.pad_to, part.pad_to]),
            np.concatenate([whole.fill_to, part.fill_to]),
        )
    return whole


def runs_within(tokens: np.ndarray, limit: int, ends: np.ndarray | None = None) -> np.ndarray:
    """Cut a list into consecutive runs of at most `limit` tokens; an item above the limit forms a run alone.

    Args:
        tokens: (n,) int64.
        ends: (n,) int64, for each item the index where its run must end at the latest.

    Returns:
        Offsets (num_runs + 1,) int64.
    """
    sums = offsets_of(tokens)
    following = np.searchsorted(sums, sums[:-1] + limit, side="right") - 1
    if ends is not None:
        following = np.minimum(following, ends)
    return follow(np.maximum(following, np.arange(1, len(tokens) + 1)))


def runs_reaching(tokens: np.ndarray, limit: int) -> np.ndarray:
    """Cut a list into consecutive runs that end as soon as they hold `limit` tokens; the last may hold fewer.

    Args:
        tokens: (n,) int64, each at least 1.

    Returns:
        Offsets (num_runs + 1,) int64.
    """
    sums = offsets_of(tokens)
    following = np.searchsorted(sums, sums[:-1] + limit, side="left")
    return follow(np.minimum(following, len(tokens)))


def follow(following: np.ndarray) -> np.ndarray:
    """Walk from 0 along `following` (each entry above its index) to the end; return the places visited, int64."""
    jumps = following.tolist()
    here, visited = 0, [0]
    while here < len(jumps):
        here = jumps[here]
        visited.append(here)
    return np.array(visited, np.int64)


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """Running total that starts at 0, (n + 1,) int64."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def sum_runs(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Sum of each run, (num_runs,) int64."""
    return np.diff(offsets_of(values)[offsets])


def reorder_runs(offsets: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put runs into another order.

    Args:
        offsets: (num_runs + 1,) int64.
        order: (num_runs,) int64, a permutation.

    Returns:
        The index that gathers the items, (n,) int64, and the new offsets.
    """
    counts = np.diff(offsets)[order]
    moved = offsets_of(counts)
    return np.arange(moved[-1]) + np.repeat(offsets[order] - moved[:-1], counts), moved


def shuffled(
    lengths: np.ndarray, order: np.ndarray, offsets: np.ndarray, settings: PlanSettings, rng: np.random.Generator
) -> Grouping:
    """Padded batches in random order, so that their lengths do not drift over the epoch."""
    index, offsets = reorder_runs(offsets, rng.permutation(len(offsets) - 1))
    return padded(lengths, order[index], offsets, settings)


def padded(lengths: np.ndarray, order: np.ndarray, offsets: np.ndarray, settings: PlanSettings) -> Grouping:
    """Pad each batch to its longest piece.

    A step is `batches_per_step` batches in a row, or as many as it takes to hold `tokens_per_step` real tokens.
    """
    ordered = lengths[order]
    longest = np.maximum.reduceat(ordered, offsets[:-1]) if len(ordered) else np.zeros(0, np.int64)
    if settings.batches_per_step is not None:
        steps = np.append(np.arange(0, len(longest), settings.batches_per_step), len(longest))
    else:
        steps = runs_reaching(sum_runs(ordered, offsets), settings.tokens_per_step)
    return Grouping(order, offsets, steps, longest.astype(np.int32), np.zeros(len(longest), np.int32))


# --------------------------------------------------------------------------- bundles

# Sequences that one micro-batch must hold together, such as the two replies of a pair. Strategies group a bundle as one
# piece with the length of all its pieces; afterwards every bundle is unfolded. So strategies need not know about
# bundles, and cannot separate them.


def bundled(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Order pieces by bundle; the others follow as they are.

    Args:
        numbers: bundle of every piece, (num_pieces,) int64; -1 for a piece by itself.

    Returns:
        Indices of the pieces, (num_pieces,) int64, and offsets of the bundles into them, (num_bundles + 1,) int64.
    """
    numbers = _numbered(numbers)
    order = np.argsort(numbers, kind="stable")
    return order, offsets_of(np.unique(numbers, return_counts=True)[1])


def unfold(grouping: Grouping, offsets: np.ndarray, lengths: np.ndarray, settings: PlanSettings) -> Grouping:
    """Put the pieces of every bundle in its place.

    A rectangle as wide as its longest bundle becomes one as wide as its longest piece.

    Args:
        offsets: start of each bundle in the pieces, (num_bundles + 1,) int64.
        lengths: tokens of each piece, (num_pieces,) int64.
    """
    order, moved = reorder_runs(offsets, grouping.order)
    micro_offsets = moved[grouping.micro_offsets]
    longest = np.maximum.reduceat(lengths[order], micro_offsets[:-1]) if len(order) else grouping.pad_to
    narrowed = (grouping.pad_to > 0) & (grouping.pad_to != settings.max_tokens)
    pad_to = np.where(narrowed, longest, grouping.pad_to).astype(np.int32)
    return grouping._replace(order=order, micro_offsets=micro_offsets, pad_to=pad_to)


def with_others(over: np.ndarray, numbers: np.ndarray, settings: PlanSettings) -> np.ndarray:
    """Extend a mask of sequences over a limit to the other sequences of their bundles, (n,) bool.

    Args:
        over: (n,) bool; numbers: bundles of the same sequences as in `bundled`, (n,) int64.

    Raises:
        PlanError: the settings would cut one of several sequences of a bundle.
    """
    _, bundle, sizes = np.unique(_numbered(numbers), return_inverse=True, return_counts=True)
    if settings.overflow not in ("error", "drop") and (over & (sizes[bundle] > 1)).any():
        what = "a sequence is too long that belongs together with others, and such sequences are never cut"
        fix = "set plan.overflow=drop, which drops and counts all that belong together, or raise plan.max_tokens"
        raise PlanError(what, where=f"plan.overflow={settings.overflow}", fix=fix)
    whole: np.ndarray = np.bincount(bundle, over, minlength=len(sizes))[bundle] > 0
    return whole if settings.overflow == "drop" else over


def _numbered(numbers: np.ndarray) -> np.ndarray:
    """Number sequences without a bundle as bundles of one, after all others."""
    return np.where(numbers < 0, numbers.max(initial=0) + 1 + np.arange(len(numbers)), numbers)
