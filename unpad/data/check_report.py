"""Report of `unpad data check`: rows, pictures, notes, and questions of conversations that have different answers."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unpad.data.sources.bad_rows import faults_with_fixes
from unpad.data.sources.example import BadRow, Example, Unread, count_bad
from unpad.data.sources.images import ImageExample
from unpad.data.sources.split import turns_key
from unpad.terminal.printing import escaped
from unpad.terminal.table import cells, columns, number_of, wrapped

MOST_SHOWN = 3  # questions, and places of each, that are named


@dataclass
class Asked:
    """Answers of every question so far, whatever file it is in.

    Attributes:
        different: question -> places of its first different answers.
        num_rows: rows with another answer than the first.
    """

    different: dict[int, list[str]] = field(default_factory=dict)
    num_rows: int = 0
    _first: dict[int, tuple[int, str]] = field(default_factory=dict)  # question -> its first answer, and the place

    def add(self, row: Example) -> None:
        """Take in a row of a file; only conversations have questions."""
        if row.turns[-1].role != "assistant" or row.rejected is not None:
            return
        question, mine = turns_key(row.turns[:-1]), turns_key(row.turns[-1:])
        answer, where = self._first.setdefault(question, (mine, row.where))
        if answer == mine:
            return
        self.num_rows += 1
        places = self.different.setdefault(question, [where])
        if len(places) < MOST_SHOWN:
            places.append(row.where)

    def lines(self) -> list[str]:
        """Lines of the report; none where all answers agree."""
        if not self.different:
            return []
        what = f"{number_of(len(self.different), 'questions')} {'has' if len(self.different) == 1 else 'have'}"
        rows = number_of(self.num_rows, "rows")
        head = f"note: {what} different answers, in {rows} beside the first of each; keep one, unless all are meant"
        return [head, *(f"  {', '.join(places)}" for places in list(self.different.values())[:MOST_SHOWN])]

    def to_json(self) -> dict[str, Any]:
        places = list(self.different.values())[:MOST_SHOWN]
        return {"questions": len(self.different), "rows": self.num_rows, "places": places}


MAX_NOTES = 5
MOST_CLASSES = 10  # that are named


@dataclass
class PictureCounts:
    """Pictures of a file or folder, and their classes, sizes and modes, each with its count."""

    examples: list[ImageExample] = field(default_factory=list)
    classes: Counter[str] = field(default_factory=Counter)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)

    def add(self, picture: ImageExample) -> None:
        self.examples.append(picture)
        self.classes[picture.label] += 1
        self.sizes[picture.width, picture.height] += 1
        self.modes[picture.mode] += 1

    def lines(self) -> list[str]:
        few = self.classes.most_common(MOST_CLASSES)
        classes = ", ".join(f"{escaped(name)} {number:,}" for name, number in few)
        others = len(self.classes) - len(few)
        classes += f" and {others:,} more with {few[-1][1]:,} or fewer each" if others else ""
        (width, height), number = self.sizes.most_common(1)[0]
        sizes = f"all {width} x {height}"
        if len(self.sizes) > 1:
            (least, lowest), (most, highest) = self._range(min), self._range(max)
            sizes = f"{least} to {most} wide, {lowest} to {highest} high, most often {width} x {height} ({number:,})"
        modes = ", ".join(f"{name} {number:,}" for name, number in self.modes.most_common())
        return [f"{number_of(len(self.classes), 'classes')}: {classes}", f"sizes: {sizes}", f"modes: {modes}"]

    def _range(self, choose: Callable[[Iterable[int]], int]) -> tuple[int, int]:
        return choose(width for width, _ in self.sizes), choose(height for _, height in self.sizes)

    def to_json(self) -> dict[str, Any]:
        return {
            "classes": dict(self.classes.most_common()),
            "sizes": {"least": self._range(min), "most": self._range(max), "common": self.sizes.most_common(1)[0][0]},
            "modes": dict(self.modes.most_common()),
        }


@dataclass(frozen=True, slots=True)
class FileCheck:
    """Counts of one file: rows, and rows used.

    Args:
        kind: kind of data; None for a file that was refused as a whole, which counts as one row.
        num_repeated: usable rows equal to an earlier one of the check; None where rows are not compared.
        characters: (num_used,) int64 of each usable row; None for rows without text.
        note: a remark with its remedy, or "".
        pictures: with a class; None for other kinds of data.
        unread: fields of usable rows that nobody read.
    """

    path: Path
    kind: str | None
    num_rows: int
    num_used: int
    num_repeated: int | None = None
    characters: np.ndarray | None = None
    note: str = ""
    pictures: PictureCounts | None = None
    unread: Unread = field(default_factory=Unread)

    def lengths(self) -> dict[str, int] | None:
        """Characters of the usable rows: min, median, p95 and max."""
        if self.characters is None or not len(self.characters):
            return None
        shares = {"min": 0, "median": 50, "p95": 95, "max": 100}
        # An element, not a mean of two: no row has half a character.
        values = np.percentile(self.characters, list(shares.values()), method="inverted_cdf")
        return dict(zip(shares, values.astype(int).tolist(), strict=True))

    def line(self) -> str:
        if self.kind is None:
            return f"{escaped(str(self.path))}: not read"
        counts = f"{self.kind}, {self.num_used:,} of {number_of(self.num_rows, 'rows')} usable"
        if self.num_repeated:
            counts += f", {self.num_repeated} equal to an earlier one"
        path = escaped(str(self.path))
        head, *texts = [f"{path}: {counts}"] if cells(f"{path}: {counts}") <= columns() else [f"{path}:", counts]
        if spread := self.lengths():
            lengths = f"characters: {spread['min']:,} to {spread['max']:,}, median {spread['median']:,}"
            texts.append(f"{lengths}, 95 % of rows at most {spread['p95']:,}")
        texts += [*self.unread.lines(), *(self.pictures.lines() if self.pictures else [])]
        return "\n  ".join([head, *(part for text in texts for part in wrapped(text, columns() - 2))])


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of `unpad data check`.

    Args:
        notes: lines on what a recipe's tokenizer loses, on near-duplicates of its training rows, and on its tables.
        skipped: files of folders that are not read, each with the reason.
        asked: questions of conversations with their answers.
    """

    files: tuple[FileCheck, ...]
    bad: tuple[BadRow, ...]
    notes: tuple[str, ...] = ()
    skipped: tuple[tuple[Path, str], ...] = ()
    asked: Asked = field(default_factory=Asked)

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    @property
    def num_used(self) -> int:
        return sum(file.num_used for file in self.files)

    @property
    def passed(self) -> bool:
        return not self.bad and self.num_used > 0

    def lines(self) -> list[str]:
        """Lines of the report: the faults by their kinds with the fix of each, every file, and the totals."""
        lines = faults_with_fixes(self.bad)
        lines += [line for file in self.files for line in file.line().split("\n")]
        notes = [file.note for file in self.files if file.note]
        lines += [f"note: {note}" for note in notes[:MAX_NOTES]]
        if len(notes) > MAX_NOTES:
            lines.append(f"note: ... and {number_of(len(notes) - MAX_NOTES, 'more files')}")
        lines += [*self.asked.lines(), *self._skipped(), *self.notes]
        lines.append(f"rows read {self.num_rows} = rows used {self.num_used} + bad rows {count_bad(self.bad)}")
        if unknown := sum(row.num_rows is None for row in self.bad):
            lines.append(f"and an unknown number of rows beyond {unknown} of the faults, counted as one each")
        if self.num_used == 0:
            lines.append("E_EMPTY there is no usable row")
        return lines

    def _skipped(self) -> list[str]:
        """A line on the files of folders that are not read, with the first names."""
        if not self.skipped:
            return []
        names = ", ".join(escaped(path.name) for path, _ in self.skipped[:MAX_NOTES])
        more = ", ..." if len(self.skipped) > MAX_NOTES else ""
        files = "1 file is" if len(self.skipped) == 1 else f"{len(self.skipped):,} files are"
        return [f"note: {files} not read, by an ending that is not one of data: {names}{more}"]

    def to_json(self) -> dict[str, Any]:
        """The report for programs; a fault of unknown extent has null rows."""
        files = [
            {
                "path": str(file.path),
                "kind": file.kind,
                "rows": file.num_rows,
                "used": file.num_used,
                "repeated": file.num_repeated,
                "characters": file.lengths(),
                "note": file.note or None,
                "pictures": file.pictures.to_json() if file.pictures else None,
                "not_read": file.unread.shares,
            }
            for file in self.files
        ]
        bad = [
            {"where": row.where, "code": row.code, "what": row.what, "fix": row.fix, "rows": row.num_rows}
            for row in self.bad
        ]
        return {
            "passed": self.passed,
            "rows": self.num_rows,
            "used": self.num_used,
            "bad": count_bad(self.bad),
            "files": files,
            "notes": self.notes,
            "skipped": [{"path": str(path), "reason": reason} for path, reason in self.skipped],
            "contradictions": self.asked.to_json(),
            "faults": bad,
        }
