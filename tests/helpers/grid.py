"""Cases of a grid: every pair of values of two axes, or every combination."""

import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def pairs(*axes: Iterable[Any], where: Callable[..., bool] | None = None) -> list[Any]:
    """Rows of a greedy covering design: whatever two values of two axes may meet do so in a row.

    With UNPAD_GRID=full, the other combinations follow, marked nightly.

    Args:
        axes: the values of each argument, in the order of `parametrize`.
        where: which combinations there are; all of them by default.
    """
    values = [list(axis) for axis in axes]
    rows = list(itertools.product(*(range(len(axis)) for axis in values)))
    rows = [row for row in rows if where is None or where(*_values(values, row))]
    met = [set(itertools.combinations(enumerate(row), 2)) or {(0, value) for value in row} for row in rows]
    missing, chosen = set[Any]().union(*met), list[int]()
    while missing:
        chosen.append(max(range(len(rows)), key=lambda index: len(met[index] & missing)))  # the first of the best
        missing -= met[chosen[-1]]
    others = sorted(set(range(len(rows))) - set(chosen)) if os.environ.get("UNPAD_GRID") == "full" else []
    cases = [_values(values, rows[index]) for index in sorted(chosen)]
    return cases + [pytest.param(*_values(values, rows[index]), marks=pytest.mark.nightly) for index in others]


def _values(axes: list[list[Any]], row: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(axis[index] for axis, index in zip(axes, row, strict=True))
