"""Records of source files: examples and bad rows, and their places as messages name them."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

SplitName = Literal["train", "holdout", "test"]
# Names that a row, a table or a folder may give a part; `held_out` is MEDS's name of the test part.
SPLIT_NAMES: dict[str, SplitName] = {
    "train": "train", "training": "train",
    "valid": "holdout", "validation": "holdout", "val": "holdout", "dev": "holdout", "tuning": "holdout",
    "holdout": "holdout",
    "test": "test", "held_out": "test",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation; a plain text is a single turn with role "text".

    Args:
        thoughts: thoughts of a reply from a field of their own; "" where there are none or `content` has them.
    """

    role: Literal["text", "system", "user", "assistant"]
    content: str
    thoughts: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """One source record.

    Args:
        where: "file:line", or "file[element]" for an element of a JSON array; 1-based lines, 0-based elements.
        turns: the messages in order. At least one, none empty.
        split: part that the row declares, or None to let the seed decide; "holdout" is the part called valid.
        group: rows that share a non-empty group, such as phrasings of one fact, stay in one part unless they declare
            others; a group held out on purpose is declared, not leaked.
        keywords: words that a correct reply must contain; used by evaluation only.
        rejected: reply of a pair that is worse than the last turn, its chosen reply; None for other data.
    """

    where: str
    turns: tuple[Turn, ...]
    split: SplitName | None = None
    group: str = ""
    keywords: tuple[str, ...] = ()
    rejected: Turn | None = None

    @property
    def every_turn(self) -> tuple[Turn, ...]:
        """All messages, those of a pair with the rejected reply at the end."""
        return self.turns if self.rejected is None else (*self.turns, self.rejected)


@dataclass(frozen=True, slots=True)
class Usable:
    """A row that can be used, as `unpad data check` counts it.

    Args:
        characters: of its texts; None for rows without text.
        key: 64-bit hash of its content, equal for equal rows; None where rows are not compared.
        where: its place.
        question, answer: 64-bit hashes of all before the last reply of a conversation, and of the reply; else None.
        picture: the `ImageExample` of a picture with a class; else None.
    """

    characters: int | None = None
    key: int | None = None
    where: str = ""
    question: int | None = None
    answer: int | None = None
    picture: Any = None


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used: its place, a stable code such as E_UTF8, the fault, and the fix.

    Args:
        num_rows: rows that the fault takes along, such as the rest of a damaged file; None where that is unknown.
    """

    where: str
    code: str
    what: str
    fix: str
    excerpt: str = ""
    num_rows: int | None = 1


def count_bad(bad: Iterable[BadRow]) -> int:
    """Count the rows that faults take along; a fault of unknown extent counts as one."""
    return sum(1 if row.num_rows is None else row.num_rows for row in bad)


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
