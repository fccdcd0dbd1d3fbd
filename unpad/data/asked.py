"""Questions of conversations that have different answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unpad.data.sources.example import Usable
from unpad.data.sources.named import place_of

MOST_SHOWN = 3  # questions, and places of each, that are named
_BITS, _MASK = 64, (1 << 64) - 1


@dataclass
class Asked:
    """Answers of every question so far, whatever file it is in.

    Attributes:
        different: question -> places of its first two different answers, of as many questions as are named.
        num_questions: questions with different answers; num_rows: rows with another answer than the first.
    """

    different: dict[int, list[str]] = field(default_factory=dict)
    num_rows: int = 0
    _several: set[int] = field(default_factory=set)
    # Question -> its first answer and the place of that, in one number: there may be millions.
    _first: dict[int, int] = field(default_factory=dict)
    _files: list[tuple[Path, str]] = field(default_factory=list)

    @property
    def num_questions(self) -> int:
        return len(self._several)

    def add(self, path: Path, row: Usable) -> None:
        """Take in a row of a file; rows without a question are passed over."""
        if row.question is None or row.answer is None:
            return
        place = place_of(row.where)
        number, opening = int(place.item.strip(":[]") or 0), place.item[:1]
        if not self._files or self._files[-1] != (path, opening):
            self._files.append((path, opening))
        packed = ((len(self._files) - 1) << 40 | number) << _BITS | row.answer
        first = self._first.setdefault(row.question, packed)
        if first & _MASK == row.answer:
            return
        self.num_rows += 1
        self._several.add(row.question)
        if len(self.different) < MOST_SHOWN or row.question in self.different:
            places = self.different.setdefault(row.question, [self._place(first >> _BITS)])
            if len(places) < MOST_SHOWN:
                places.append(row.where)

    def _place(self, packed: int) -> str:
        path, opening = self._files[packed >> 40]
        number = packed & ((1 << 40) - 1)
        return f"{path}[{number}]" if opening == "[" else f"{path}:{number}"

    @property
    def places(self) -> Sequence[Sequence[str]]:
        """Places of the first questions with different answers."""
        return list(self.different.values())

    def lines(self) -> list[str]:
        """Lines of the report; none where all answers agree."""
        if not self._several:
            return []
        is_one = self.num_questions == 1
        what = "1 question has" if is_one else f"{self.num_questions:,} questions have"
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows:,} rows"
        head = f"note: {what} different answers, in {rows} beside the first of each; keep one, unless all are meant"
        return [head, *(f"  {', '.join(places)}" for places in self.places)]

    def to_json(self) -> dict[str, Any]:
        return {"questions": self.num_questions, "rows": self.num_rows, "places": self.places}
