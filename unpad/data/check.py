"""`unpad data check`: usable and unusable rows of data files, before training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from unpad.data.sources import chat, images
from unpad.data.sources.documents import single_document
from unpad.data.sources.example import BadRow, Usable, count_bad
from unpad.data.sources.files import TABLE_SUFFIXES, SourceFile, expand
from unpad.data.sources.jsonlines import count_blank_lines
from unpad.data.sources.rows import reading, rows
from unpad.errors import RecipeError, SourceError, nearest
from unpad.recipes.data import KINDS, DataSettings, EventSource, Source
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe
from unpad.terminal.progress import counted
from unpad.terminal.table import WIDTH, cells, wrapped

PEEK_ROWS = 20
MAX_NOTES = 5


class Checked(Protocol):
    """Module of `data/sources/` named after the kind of data that it reads."""

    def check(self, file: SourceFile, data: DataSettings) -> Iterator[Usable | BadRow]:
        """Yield every row of a file as usable or as a bad row."""


@dataclass(frozen=True, slots=True)
class FileCheck:
    """Counts of one file: rows, rows used, and blank lines, which are not rows.

    Args:
        num_repeated: usable rows equal to an earlier one of the check; None where rows are not compared.
        characters: (num_used,) int64 of each usable row; None for rows without text.
        note: a remark with its remedy, or "".
    """

    path: Path
    kind: str
    num_rows: int
    num_used: int
    num_blank: int
    num_repeated: int | None = None
    characters: np.ndarray | None = None
    note: str = ""

    def lengths(self) -> dict[str, int] | None:
        """Characters of the usable rows: min, median, p95 and max."""
        if self.characters is None or not len(self.characters):
            return None
        shares = {"min": 0, "median": 50, "p95": 95, "max": 100}
        # An element, not a mean of two: no row has half a character.
        values = np.percentile(self.characters, list(shares.values()), method="inverted_cdf")
        return dict(zip(shares, values.astype(int).tolist(), strict=True))

    def line(self) -> str:
        blank = f", {self.num_blank} blank lines" if self.num_blank else ""
        counts = f"{self.kind}, {self.num_used} of {self.num_rows} rows usable{blank}"
        if self.num_repeated:
            counts += f", {self.num_repeated} equal to an earlier one"
        line = f"{self.path}: {counts}"
        if cells(line) > WIDTH:
            line = "\n  ".join([f"{self.path}:", *wrapped(counts, WIDTH - 2)])
        if found := self.lengths():
            line += f"\n  characters: {found['min']:,} to {found['max']:,}, median {found['median']:,}"
            line += f", 95 % of rows at most {found['p95']:,}"
        return line


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of `unpad data check`; `notes` are lines on what a recipe's tokenizer makes of the usable rows."""

    files: tuple[FileCheck, ...]
    bad: tuple[BadRow, ...]
    notes: tuple[str, ...] = ()

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
        """Lines of the report: every bad row with its fix, every file, and the totals."""
        lines = [line for row in self.bad for line in _bad_lines(row)]
        lines += [line for file in self.files for line in file.line().split("\n")]
        notes = [file.note for file in self.files if file.note]
        lines += [f"note: {note}" for note in notes[:MAX_NOTES]]
        if len(notes) > MAX_NOTES:
            lines.append(f"note: ... and so are {len(notes) - MAX_NOTES} more files")
        lines += self.notes
        lines.append(f"rows read {self.num_rows} = rows used {self.num_used} + bad rows {count_bad(self.bad)}")
        unknown = sum(row.num_rows is None for row in self.bad)
        if unknown:
            lines.append(f"and an unknown number of rows beyond {unknown} of the faults, counted as one each")
        if self.num_used == 0:
            lines.append("E_EMPTY there is no usable row")
        return lines

    def to_json(self) -> dict[str, Any]:
        """The report for programs; a fault of unknown extent has null rows."""
        files = [
            {
                "path": str(file.path),
                "kind": file.kind,
                "rows": file.num_rows,
                "used": file.num_used,
                "blank_lines": file.num_blank,
                "repeated": file.num_repeated,
                "characters": file.lengths(),
                "note": file.note or None,
            }
            for file in self.files
        ]
        bad = [
            {"where": row.where, "code": row.code, "what": row.what, "fix": row.fix, "rows": row.num_rows}
            for row in self.bad
        ]
        rows, used = self.num_rows, self.num_used
        return {
            "passed": self.passed,
            "rows": rows,
            "used": used,
            "bad": count_bad(self.bad),
            "files": files,
            "notes": self.notes,
            "faults": bad,
        }


def check(paths: Path | Sequence[Path], kind: str | None = None) -> CheckReport:
    """Read files, folders, globs or recipes, and report every unusable row.

    A folder without data files is read as images in one sub-folder per class. Of a recipe, all its sources are read
    with its settings; its tables of events are joined with its labels, and what its tokenizer loses is counted.

    Args:
        kind: one of KINDS; None infers it for each file from its first rows or columns.

    Raises:
        SourceError: a file is missing or unreadable, its rows are of no known kind, or tables of events have a fault
            that concerns no single row.
        RecipeError: there is no such kind of data, or a recipe names no data.
    """
    if kind not in (None, *KINDS):
        raise RecipeError(f'there is no kind of data "{kind}"', where="--kind", fix=nearest(str(kind), list(KINDS)))
    seen: set[int] = set()
    reports = [_check_path(path, kind, seen) for path in ([paths] if isinstance(paths, Path) else paths)]
    files = tuple(file for report in reports for file in report.files)
    bad = tuple(row for report in reports for row in report.bad)
    return CheckReport(files, bad, tuple(note for report in reports for note in report.notes))


def _check_path(path: Path, kind: str | None, seen: set[int]) -> CheckReport:
    if path.suffix.lower() in (".yaml", ".yml"):
        return _check_recipe(path, seen)
    if kind == "events" or (kind is None and _looks_like_events(path)):
        return _check_events(Recipe(data=DataSettings(events=[EventSource(path=str(path))])), trains=False)
    if path.suffix.lower() in images.SUFFIXES or images.is_image(path):
        return _check_picture(path)
    source, data = [Source(path=str(path))], DataSettings()
    files = images.expand(source, Path) if _holds_classes(path) or kind == "images" else expand(source, Path)
    return _check_files([(_kind_of(file, data, kind), file) for file in files], data, seen)


def _check_files(files: Sequence[tuple[str, SourceFile]], data: DataSettings, seen: set[int]) -> CheckReport:
    """Check files of known kinds.

    Args:
        seen: hashes of usable rows so far, by kind; those of these files are added.
    """
    checked: list[FileCheck] = []
    every_bad: list[BadRow] = []
    for kind, file in files:
        reader: Checked = import_module(f"unpad.data.sources.{kind}")
        bad: list[BadRow] = []
        characters: list[int] = []
        num_used = num_keys = num_repeated = 0
        with reading(file.path):
            for row in counted(reader.check(file, data), f"reading {file.path.name}", unit="rows"):
                if isinstance(row, BadRow):
                    bad.append(row)
                    continue
                num_used += 1
                if row.characters is not None:
                    characters.append(row.characters)
                if row.key is not None:
                    num_keys += 1
                    num_repeated += row.key in seen
                    seen.add(row.key)
        checked.append(
            FileCheck(
                path=file.path,
                kind=kind,
                num_rows=num_used + count_bad(bad),
                num_used=num_used,
                num_blank=count_blank_lines(file.path) if file.format == "jsonl" else 0,
                num_repeated=num_repeated if num_keys else None,
                characters=np.array(characters, np.int64) if characters else None,
                note=single_document(file, data.separator, num_used) or "" if kind == "text" else "",
            )
        )
        every_bad += bad
    return CheckReport(tuple(checked), tuple(every_bad))


def _check_recipe(path: Path, seen: set[int]) -> CheckReport:
    from unpad.data.sources.places import resolve_path  # imports pyarrow

    recipe = load_recipe(str(path))
    data = recipe.data
    resolve = partial(resolve_path, data)
    files = [
        (kind, file)
        for kind in KINDS
        if kind != "events"
        for file in (images.expand if kind == "images" else expand)(getattr(data, kind), resolve)
    ]
    if not files and not data.events:
        fix = f"set {' or '.join(f'data.{kind}' for kind in KINDS)}, or name a data file"
        raise RecipeError("the recipe names no data", where=str(path), fix=fix)
    report = _check_files(files, data, seen)
    if data.events:
        events = _check_events(recipe, trains=True)
        return CheckReport((*report.files, *events.files), (*report.bad, *events.bad))
    if recipe.tokenizer.path is None or report.bad or not (data.text or data.chat):
        return report
    from unpad.data.tokens.corpus import prepare

    lost = prepare(recipe)[2].lost  # of characters, by the tokenizer of a file
    lost.refuse(recipe.tokenizer.path)
    return CheckReport(report.files, report.bad, tuple(lost.lines()))


def guess_kind(path: Path) -> str:
    """Infer the kind of data of a file, folder or glob from the first rows of its first file.

    Raises:
        SourceError: there is no file, or its rows match no kind.
    """
    if _holds_classes(path):
        return "images"
    return _kind_of(expand([Source(path=str(path))], Path)[0], DataSettings(), None)


def _check_picture(path: Path) -> CheckReport:
    """Check one image file, without a class."""
    image = images.examine(images.Found(str(path), "", path, str(path.resolve().parent)))
    bad = (image,) if isinstance(image, BadRow) else ()
    return CheckReport((FileCheck(path, "images", 1, 1 - len(bad), 0),), bad)


def _check_events(recipe: Recipe, trains: bool) -> CheckReport:
    """Check tables of events with the labels and the split of a recipe; a row's use may depend on other rows.

    Args:
        trains: whether to refuse what training would refuse, if no row is bad.
    """
    from unpad.data.histories.cohort import read_cohort

    read = read_cohort(recipe)
    rows, labels, cohort = read.rows, read.labels, read.cohort
    bad_of_tables = [*(part.bad for part in rows.parts), *([labels.bad] if labels else [])]
    tables = [*(part.table for part in rows.parts), *([labels.table] if labels else [])]
    bad = [row for rows_of_table in bad_of_tables for row in rows_of_table]
    refused = cohort.bad
    if trains and not bad and not refused:
        from unpad.data.patients import open_tables

        open_tables(recipe, read, None)
    checked = []
    for table, own_bad in zip(tables, bad_of_tables, strict=True):
        names = {file.shown for file in table.files}
        refused_here = [row for row in refused if row.where in names or row.where.rpartition(":")[0] in names]
        refused = [row for row in refused if row not in refused_here]
        bad += refused_here
        first = table.files[0].shown
        shown = first if len(table.files) == 1 else f"{first} and {len(table.files) - 1} more"
        num_rows = (
            len(table) + len(table.bad) + sum(row.where in names for row in refused_here)
        )  # an empty file counts as a row
        checked.append(FileCheck(Path(shown), "events", num_rows, num_rows - len(own_bad) - len(refused_here), 0))
    return CheckReport(tuple(checked), tuple(bad))


def _looks_like_events(path: Path) -> bool:
    """Whether `path` has tables with the columns of events."""
    if not any(file.suffix.lower() in TABLE_SUFFIXES for file in (path.rglob("*") if path.is_dir() else [path])):
        return False
    from unpad.data.histories.event_files import looks_like_events

    return looks_like_events(path)


def _holds_classes(path: Path) -> bool:
    """Whether a folder has images, and neither a manifest nor a parquet file."""
    if not path.is_dir():
        return False
    suffixes = {name.suffix.lower() for name in path.rglob("*")}
    return bool(suffixes & set(images.SUFFIXES)) and not suffixes & {".jsonl", ".parquet"}


def _kind_of(file: SourceFile, data: DataSettings, kind: str | None) -> str:
    """Return the requested kind of data, or infer it from the first rows.

    Raises:
        SourceError: the rows match no kind.
    """
    if kind is not None or file.path.is_dir():
        return kind or "images"
    fields = (*chat.FIELDS, "image")
    try:
        first = list(islice(rows(file, data, (*fields, "label")), PEEK_ROWS))
    except OSError:
        return "text"  # reading the file reports the fault
    bad = [row for row in first if isinstance(row, BadRow)]
    values = [row[1] for row in first if not isinstance(row, BadRow)]
    unknown = all(type(value) is dict and not set(fields) & set(value) for value in values)
    if unknown and (values or any(row.code == "E_MISSING" for row in bad)):
        names = sorted({name for value in values for name in value})[:20]
        columns = next((row.what.partition("; ")[2] for row in bad if row.code == "E_MISSING"), "")
        there = f"there is {', '.join(names)}" if names else columns
        what = "the rows or columns match no kind of data" + (f"; {there}" if there else "")
        fix = "set --kind, or name the fields or columns in a recipe and check it with `unpad data check RECIPE.yaml`"
        raise SourceError(what, where=str(file.path), fix=fix)
    with_image = [value for value in values if isinstance(value, dict) and "image" in value]
    if 2 * len(with_image) > len(values):
        return "images" if any("label" in value for value in with_image) else "vqa"
    return "chat" if 2 * sum(map(chat.looks_like_chat, values)) > len(values) else "text"


def _bad_lines(row: BadRow) -> list[str]:
    found = [f"  found: {row.excerpt}"] if row.excerpt else []
    return [f"{row.where}: {row.code} {row.what}", *found, f"  do: {row.fix}"]
