"""Places of rows as messages name them, and rows found by such a place."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

# After the place: a copy's number, a reply of a pair, or a patient's name.
_PLACE = re.compile(r"(.*?)(?:(:\d+|\[\d+\])(#\d+|, \w+| \(.*\))?)?", re.DOTALL)


class Place(NamedTuple):
    """Place of a row: its file, and ":line", "[element]" or "" for a file that is a row itself; `rest` is more."""

    file: str
    item: str
    rest: str = ""

    @property
    def line(self) -> int | None:
        """The line, or row of a table; None for an element of an array, and for a file that is a row itself."""
        return int(self.item[1:]) if self.item.startswith(":") else None


def place_of(where: str) -> Place:
    """Take a place apart."""
    match = _PLACE.fullmatch(where)
    assert match is not None, "every text matches"
    return Place(match[1], match[2] or "", match[3] or "")


def file_test(given: str) -> Callable[[str], bool]:
    """A test for the names of one file: as it is given, another path to it, or a longer path with this end."""
    parts, real = Path(given).parts, Path(given).resolve()

    @cache
    def is_it(file: str) -> bool:
        path = Path(file)
        return file == given or (bool(parts) and path.parts[-len(parts) :] == parts) or path.resolve() == real

    return is_it
