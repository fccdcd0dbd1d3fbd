"""Split of rows into parts to train on, to choose by and to test on, by content, group and seed alone."""

from collections.abc import Hashable, Iterable, Sequence
from enum import Enum, IntEnum
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from unpad.data.sources.example import SPLIT_NAMES, Example, SplitName, Turn
from unpad.recipes.data import DataSettings
from unpad.terminal.table import number_of

Ints = NDArray[np.int64]
Links = Sequence[tuple[Ints, Ints]]  # pairs of rows and keys

MOST_WORK = 1 << 28  # bits that an exact choice may look at; a second of work at most


def components(num: int, links: Links) -> Ints:
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
    return np.unique(label, return_inverse=True)[1].astype(np.int64)


def take_share(sizes: Ints, classes: Ints, total: int, fewest: int, most: int) -> NDArray[np.bool_]:
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


def share_out(rows: Ints, total: int) -> Ints:
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
    return quotas.astype(np.int64)


def _nearest(sizes: Ints, total: int) -> Ints:
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


class Split(IntEnum):
    """Part of the data that a row belongs to.

    UNDECLARED rows leave the choice to the seed. HOLDOUT is the part called valid: training measures itself on it and
    chooses weights by it. Rows of TEST take no part in training: they are counted, and read by `unpad eval`.
    """

    UNDECLARED = -1
    TRAIN = 0
    HOLDOUT = 1
    TEST = 2


class Wanted(Enum):
    """Rows that `open_data` of a family returns.

    LEARNING: those to train on and to choose by, with their parts; rows of the test part are counted only. TEST: the
    rows of the test part. NEW: every row, for files the run was not trained on; a row is of the part that it declares,
    of TEST if it declares none.
    """

    LEARNING = "learning"
    TEST = "test"
    NEW = "new"


PARTS = {Split.TRAIN: "train", Split.HOLDOUT: "valid", Split.TEST: "test"}
WRITE_SPLIT = "write train, valid or test"
_BY_NAME = {None: Split.UNDECLARED, "train": Split.TRAIN, "holdout": Split.HOLDOUT, "test": Split.TEST}


def declared_splits(names: Iterable[SplitName | None]) -> NDArray[np.int8]:
    """Turn the names that rows declare into splits, (num_names,) int8 of `Split`."""
    return np.array([_BY_NAME[name] for name in names], np.int8)


def split_number(name: str) -> Split:
    """`Split` of a name of SPLIT_NAMES in any case; UNDECLARED for another."""
    return _BY_NAME[SPLIT_NAMES.get(name.strip().lower())]


def describe_split(split: NDArray[np.uint8]) -> str:
    """Describe the number of sequences of each split."""
    if len(split) and not np.isin(split, (Split.TRAIN, Split.HOLDOUT)).any():  # new data, or a test part
        return f"{len(split):,} to evaluate"
    num_train, num_holdout, num_test = (int((split == side).sum()) for side in (Split.TRAIN, Split.HOLDOUT, Split.TEST))
    test = f", {num_test:,} of the test part" if num_test else ""
    return f"{num_train:,} to train on, {num_holdout:,} held out{test}"


def describe_groups(unit: Ints, shared: int, what: str) -> list[str]:
    """Lines on rows that belong together; none where no two do.

    Args:
        unit: (num_rows,) number of each row's unit; what: name of the rows, plural.
        shared: number of groups on both sides of the split.
    """
    sizes = np.unique(unit, return_counts=True)[1]
    several = sizes[sizes > 1]
    if not len(several):
        return []
    where = f"{shared:,} of them are both in training and held out" if shared else "each is on one side of the split"
    groups = number_of(len(several), "groups")
    return [f"  {int(several.sum()):,} {what} are in {groups} or copies of each other; {where}"]


def content_key(example: Example) -> int:
    """64-bit hash of an example's roles and contents."""
    return turns_key(example.every_turn, example.given)


def turns_key(turns: Sequence[Turn], given: str = "") -> int:
    """64-bit hash of the roles and contents of some turns, and of what the template is given beside them."""
    parts = [
        part
        for turn in turns
        for part in (turn.role, turn.content, *filter(None, [turn.thoughts]), *[""] * (not turn.learned))
    ]
    return text_key("\0".join([*parts, given] if given else parts))


def text_key(text: str) -> int:
    """64-bit hash of a text; with the seed, that of an id or a content decides the side."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def numbered(values: Sequence[Hashable]) -> Ints:
    """Number the different values by first appearance, (num_values,) int64; -1 for an empty text and for None."""
    known: dict[Hashable, int] = {}
    return np.array([-1 if value in ("", None) else known.setdefault(value, len(known)) for value in values], np.int64)


def divide(
    content_keys: NDArray[np.uint64],
    declared: NDArray[np.int8],
    data: DataSettings,
    seed: int,
    wanted: Wanted = Wanted.LEARNING,
    *,
    links: Links = (),
    classes: Ints | None = None,
) -> NDArray[np.uint8]:
    """Choose the part of every row, as the recipe says; see `assign`.

    Returns:
        (num_rows,) uint8 of `Split`. The caller keeps those that `taken` selects.
    """
    if wanted is Wanted.NEW:
        return np.where(declared == Split.UNDECLARED, Split.TEST, declared).astype(np.uint8)
    if data.split_version == 1:
        side = np.full(len(declared), Split.TEST, np.uint8)
        mine = declared != Split.TEST
        side[mine] = assign_by_hash(content_keys[mine], declared[mine], data.holdout, seed)
        return side
    return assign(content_keys, declared, data.holdout, seed, links=links, classes=classes)


def taken(side: NDArray[np.uint8], wanted: Wanted) -> NDArray[np.bool_]:
    """Rows that `wanted` asks for, (num_rows,) bool."""
    if wanted is Wanted.NEW:
        return np.ones(len(side), np.bool_)
    return (side == Split.TEST) == (wanted is Wanted.TEST)


def assign(
    content_keys: NDArray[np.uint64],
    declared: NDArray[np.int8],
    holdout: float,
    seed: int,
    *,
    links: Links = (),
    classes: Ints | None = None,
) -> NDArray[np.uint8]:
    """Choose a part for every row: TRAIN or HOLDOUT, or TEST for rows that declare it and those that go with them.

    Declarations always hold. Rows of equal content, of one group and those that `links` ties together are one unit, and
    the undeclared rows of a unit are all in one part: that of its declared rows, the first of train, valid and test if
    these disagree. If the other units have n rows, round(holdout * n) of them are held out, a share of every class;
    whole units come as near to that as they can. Units follow in the order of a hash of their content and the seed, so
    neither the order of the rows nor their files matter. Both parts get a row if there are two units.

    Args:
        content_keys: hash of each row's content, (num_rows,) uint64.
        declared: part that each row declares, (num_rows,) int8 of `Split`.
        holdout: share of the undeclared rows to hold out, in [0, 1).
        links: pairs of arrays of equal length, rows and keys; rows with a common key are one unit, and keys of
            different pairs have nothing to do with each other. Keys below 0 tie nothing.
        classes: (num_rows,) int64; None has no classes.

    Returns:
        (num_rows,) uint8 of `Split`.
    """
    num = len(content_keys)
    unit = units(content_keys, links)
    num_units = int(unit.max(initial=-1)) + 1
    side = np.full(num_units, Split.TRAIN, np.uint8)
    free = np.ones(num_units, np.bool_)
    for value in (Split.TEST, Split.HOLDOUT, Split.TRAIN):
        declaring = unit[declared == value]
        side[declaring], free[declaring] = value, False
    drawn = np.full(num_units, np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(drawn, unit, mixed(content_keys ^ mixed(np.array([seed], np.uint64))))
    sizes = np.bincount(unit, minlength=num_units)
    of_class = np.full(num_units, np.iinfo(np.int64).max, np.int64)
    np.minimum.at(of_class, unit, np.zeros(num, np.int64) if classes is None else classes)
    if holdout > 0 and free.any():
        order = np.flatnonzero(free)[np.argsort(drawn[free], kind="stable")]
        rows = int(sizes[order].sum())
        fewest = 0 if (declared == Split.HOLDOUT).any() or (len(order) == 1 and free.all()) else 1
        most = rows if (declared == Split.TRAIN).any() else rows - 1
        chosen = take_share(sizes[order], of_class[order], round(holdout * rows), fewest, most)
        side[order[chosen]] = Split.HOLDOUT
    parts: NDArray[np.uint8] = side[unit]
    parts[declared != Split.UNDECLARED] = declared[declared != Split.UNDECLARED]
    return parts


def assign_end(unit: Ints, holdout: float) -> NDArray[np.uint8]:
    """Hold out the last round(holdout * n) of n rows, at least one, but for those whose unit begins before; a part of a
    text whose neighbours are trained on measures too well.

    Args:
        unit: (num_rows,) number of the unit of each row, as of `units`.

    Returns:
        (num_rows,) uint8 of `Split`.
    """
    first = len(unit) - (max(1, round(holdout * len(unit))) if holdout and len(unit) > 1 else 0)
    return np.where(np.isin(unit, unit[:first]), Split.TRAIN, Split.HOLDOUT).astype(np.uint8)


def assign_by_hash(
    content_keys: NDArray[np.uint64], declared: NDArray[np.int8], holdout: float, seed: int
) -> NDArray[np.uint8]:
    """Rule of `data.split_version` 1: every row by its own hash, without groups and classes, about the asked share.

    Arguments and result as of `assign`, without TEST. Only if a part would be empty, the undeclared content with the
    smallest hash moves to HOLDOUT, or with the largest to TRAIN.
    """
    drawn = mixed(content_keys ^ mixed(np.array([seed], np.uint64)))  # (num_documents,) uint64, uniform
    side = (drawn < np.uint64(int(holdout * 2.0**64))).astype(np.uint8)
    for value in (Split.HOLDOUT, Split.TRAIN):
        side[np.isin(content_keys, content_keys[declared == value])] = value
    side[declared != Split.UNDECLARED] = declared[declared != Split.UNDECLARED]
    free = (declared == Split.UNDECLARED) & ~np.isin(content_keys, content_keys[declared != Split.UNDECLARED])
    if holdout > 0 and np.unique(content_keys).size > 1 and free.any():
        if not side.any():
            side[free & (drawn == drawn[free].min())] = Split.HOLDOUT
        elif side.all():
            side[free & (drawn == drawn[free].max())] = Split.TRAIN
    return side


def units(content_keys: NDArray[np.uint64], links: Links) -> Ints:
    """Number the units of rows that belong together by content or `links`, (num_rows,) int64; see `assign`."""
    num = len(content_keys)
    _, same = np.unique(content_keys, return_inverse=True)
    return components(num, [(np.arange(num), same.astype(np.int64)), *links])


def groups_on_both_sides(groups: Ints, side: NDArray[np.uint8]) -> int:
    """Number of groups with rows both in training and in another part; a group below 0 is none.

    Args:
        groups, side: (num_rows,).
    """
    trained = np.unique(groups[(side == Split.TRAIN) & (groups >= 0)])
    return int(np.isin(np.unique(groups[(side != Split.TRAIN) & (groups >= 0)]), trained).sum())


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele et al. 2014, "Fast splittable pseudorandom number generators")."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
