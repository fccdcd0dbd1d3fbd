"""Units of rows that belong together, and the choice of units that add up to a share of the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_WORK = 1 << 28  # bits that an exact choice may look at; a second of work at most


def components(num: int, links: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> NDArray[np.int64]:
    """Number the connected components of rows, (num,) int64 from 0, by their first row.

    Args:
        num: number of rows.
        links: pairs of arrays of equal length, rows and keys: rows with a common key of the same pair are connected.
            Keys below 0 connect nothing.
    """
    rows, keys, first = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for row, key in links:
        known = key >= 0
        _, inverse = np.unique(key[known], return_inverse=True)
        rows.append(row[known])
        keys.append(inverse + first)
        first += int(inverse.max(initial=-1)) + 1
    row, key = np.concatenate(rows), np.concatenate(keys)
    label = np.arange(num)
    while True:  # the smallest row of a component spreads; a jump to the label's own label halves its way
        lowest = np.full(first, num)
        np.minimum.at(lowest, key, label[row])
        spread = label.copy()
        np.minimum.at(spread, row, lowest[key])
        spread = spread[spread]
        if np.array_equal(spread, label):
            break
        label = spread
    numbers: NDArray[np.int64] = np.unique(label, return_inverse=True)[1].astype(np.int64)
    return numbers


def take_share(
    sizes: NDArray[np.int64], classes: NDArray[np.int64], total: int, fewest: int, most: int
) -> NDArray[np.bool_]:
    """Choose units that add up to `total`, or as near to it as whole units allow, with a share of each class.

    Args:
        sizes: rows of each unit, (num_units,), in the order in which units are preferred.
        classes: class of each unit, (num_units,).
        fewest, most: bounds of the sum; with fewest above 0 one unit at least is chosen.

    Returns:
        (num_units,) bool.
    """
    chosen = np.zeros(len(sizes), np.bool_)
    total = min(max(total, fewest), most)
    names, of = np.unique(classes, return_inverse=True)
    rows = np.bincount(of, sizes, len(names)).astype(np.int64)
    quotas = share_out(rows, total)
    largest = np.zeros(len(names), np.int64)
    np.maximum.at(largest, of, sizes)
    carried = 0  # classes of large units come first, and the others make up for what these miss
    for class_number in np.argsort(-largest, kind="stable").tolist():
        mine = np.flatnonzero(of == class_number)
        wanted = int(quotas[class_number]) + carried
        inside = _nearest(sizes[mine], min(max(wanted, 0), int(rows[class_number])))
        chosen[mine[inside]] = True
        carried = wanted - int(sizes[mine[inside]].sum())
    if fewest and not chosen.any():
        chosen[int(np.argmin(np.abs(sizes - total)))] = True
    elif most < int(sizes.sum()) and chosen.all() and len(sizes) > 1:
        chosen[int(np.argmin(np.abs(sizes.sum() - sizes - total)))] = False
    return chosen


def share_out(rows: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Share `total` out over classes in proportion to their rows, (num_classes,) int64; the largest remainders get the
    rest, and of several classes none is taken whole while another has rows left.

    Args:
        rows: number of rows of each class, (num_classes,).
    """
    ideal = rows * (total / max(int(rows.sum()), 1))
    room = rows - 1 if len(rows) > 1 else rows
    quotas = np.minimum(np.floor(ideal + 1e-9).astype(np.int64), room)
    order = np.lexsort((-rows, -(ideal - quotas)))
    for limit in (room, rows):
        while (remaining := total - int(quotas.sum())) > 0:
            able = order[quotas[order] < limit[order]][:remaining]
            if not len(able):
                break
            quotas[able] += 1
    shared: NDArray[np.int64] = quotas.astype(np.int64)
    return shared


def _nearest(sizes: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Indices of units that add up to `total` or to the nearest sum; early units are preferred."""
    ends = np.cumsum(sizes)
    first = int(np.searchsorted(ends, total, "right"))
    remaining = total - (int(ends[first - 1]) if first else 0)
    taken = list(range(first))
    for index in range(first, len(sizes)):
        if not remaining:
            break
        if sizes[index] <= remaining:
            taken.append(index)
            remaining -= int(sizes[index])
    if not remaining or len(sizes) * 2 * total > MOST_WORK:
        return np.array(taken, np.int64)
    # Sums that the first units can reach, as bits; beyond twice the total nothing is nearer than the empty choice.
    reach = [1]
    mask = (1 << (2 * total + 1)) - 1
    for size in sizes.tolist():
        reach.append((reach[-1] | reach[-1] << size) & mask)
    goal = next(sum_ for off in range(total + 1) for sum_ in (total - off, total + off) if reach[-1] >> sum_ & 1)
    taken = []
    for index in range(len(sizes) - 1, -1, -1):
        if not reach[index] >> goal & 1:
            taken.append(index)
            goal -= int(sizes[index])
    return np.array(taken[::-1], np.int64)
