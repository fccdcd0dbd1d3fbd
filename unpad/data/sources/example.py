"""Records of source files: examples and bad rows."""

from dataclasses import dataclass
from typing import Literal

SplitName = Literal["train", "holdout", "test"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation; a plain text is a single turn with role "text"."""

    role: Literal["text", "system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Example:
    """One source record.

    Args:
        where: "file:line", or "file[element]" for an element of a JSON array; 1-based lines, 0-based elements.
        turns: the messages in order. At least one, none empty.
        split: split that the row declares, or None to let the seed decide.
        group: rows that share a non-empty group are phrasings of one fact; a group held out on purpose is declared,
            not leaked.
        keywords: words that a correct reply must contain; used by evaluation only.
    """

    where: str
    turns: tuple[Turn, ...]
    split: SplitName | None = None
    group: str = ""
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used: its place, a stable code such as E_UTF8, the fault, and the fix."""

    where: str
    code: str
    what: str
    fix: str
    excerpt: str = ""
