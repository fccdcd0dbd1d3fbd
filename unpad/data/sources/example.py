"""Records of source files: examples and bad rows, and their places as messages name them."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from unpad.terminal.printing import escaped

LOUD, USUAL = "loud", "usual"
MOST_NAMED, NOT_READ = 16, "not read: "  # fields that a line names, and its begin
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
        learned: False for a reply that only precedes others.
    """

    role: Literal["text", "system", "user", "assistant"]
    content: str
    thoughts: str = ""
    learned: bool = True

    @property
    def has_loss(self) -> bool:
        """True for a text and for a reply that is learned."""
        return self.learned and self.role in ("text", "assistant")


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
        given: what a chat template is given beside the messages, such as tools, as JSON of an object; "" for nothing.
    """

    where: str
    turns: tuple[Turn, ...]
    split: SplitName | None = None
    group: str = ""
    keywords: tuple[str, ...] = ()
    rejected: Turn | None = None
    given: str = ""

    @property
    def every_turn(self) -> tuple[Turn, ...]:
        """All messages, those of a pair with the rejected reply at the end."""
        return self.turns if self.rejected is None else (*self.turns, self.rejected)


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


@dataclass
class Unread:
    """Fields that rows fill and nobody reads.

    Attributes:
        counts: field -> rows that fill it.
        read: field -> rows that fill it and where it was read, such as a mark that says what is done anyway.
        says: field -> what its values are: 0, 1, 0.5 for numbers between and for verdicts, None for all that is no
            mark, "" for metadata in words; LOUD of what is no metadata; USUAL of dates and names such as
            replaced_by_id, which are metadata where every row has one.
    """

    num_rows: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    says: dict[str, set[float | str | None]] = field(default_factory=dict)
    read: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, num_rows: int, says: Collection[float | str | None]) -> None:
        """Count a field in rows."""
        self.counts[name] += num_rows
        self.says.setdefault(name, set()).update(says)

    @classmethod
    def of(cls, parts: "Sequence[Unread]", files: bool = True) -> "Unread":
        """Those of several files, or else of several parts of a table."""
        made = cls(sum(part.num_rows for part in parts))
        for part in parts:
            marks = part.marks
            made.read.update(part.read)
            for name, num_rows in (part.named if files else part.counts).items():
                made.add(name, num_rows, {LOUD, 0.5 if name in marks else None} if files else part.says[name])
        return made

    def clear(self) -> None:
        """Forget all rows."""
        self.num_rows = 0
        self.counts.clear()
        self.says.clear()
        self.read.clear()

    @property
    def _loud(self) -> set[str]:
        """What is no metadata, and what is 0 in some rows and 1 in the others, whatever its name says."""
        return {
            name
            for name, says in self.says.items()
            if LOUD in says or (says - {USUAL} == {0, 1} and self.counts[name] > 2)
        }

    @property
    def named(self) -> Counter[str]:
        """The counts without metadata."""
        some = {name for name, num in self.counts.items() if USUAL in self.says[name] and num < self.num_rows}
        return Counter({name: self.counts[name] for name in self.counts if name in self._loud | some})

    @property
    def marks(self) -> set[str]:
        """Named fields with truth values, numbers from 0 to 1 and verdicts alone."""
        return {name for name in self._loud if None not in self.says[name] and self.says[name] & {0, 0.5, 1}}

    @property
    def shares(self) -> dict[str, float]:
        """Field -> share of the rows that fill it, the largest first; of many, marks and what only some rows have."""
        named, marks = self.named.most_common(), self.marks
        if len(named) > MOST_NAMED:
            named.sort(key=lambda one: (one[0] not in marks, one[1] == self.num_rows))
        return {name: count / max(self.num_rows, 1) for name, count in named}

    @property
    def facts(self) -> dict[str, dict[str, float]]:
        """The shares as logs and reports have them; empty where every field was read."""
        return {"not_read": self.shares} if self.shares else {}

    def lines(self) -> list[str]:
        """A line on the fields; none where there are none."""
        parts = [
            f"{escaped(name)} in {100 * share:.3g} %"
            + f" and read in {100 * self.read[name] / max(self.num_rows, 1):.3g} %" * (name in self.read)
            + " (a mark or a weight?)" * (name in self.marks)
            for name, share in self.shares.items()
        ]
        if not parts:
            return []
        parts = [parts[0].replace(" %", " % of rows", 1), *parts[1:MOST_NAMED]]
        more = f", and {len(self.shares) - MOST_NAMED:,} more" * (len(self.shares) > MOST_NAMED)
        return [f"{NOT_READ}{', '.join(parts)}{more}"]


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
