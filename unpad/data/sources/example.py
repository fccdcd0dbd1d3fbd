"""Records of source files: examples and bad rows."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

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
        picture: class, width, height and mode of a picture with a class; else None.
    """

    characters: int | None = None
    key: int | None = None
    where: str = ""
    question: int | None = None
    answer: int | None = None
    picture: tuple[str, int, int, str] | None = None


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
