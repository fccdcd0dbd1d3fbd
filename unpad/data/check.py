"""`unpad data check`: what every row of a file is worth, before it is used."""

from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Protocol

from unpad.data.sources import chat, images
from unpad.data.sources.example import BadRow
from unpad.data.sources.files import TABLE_SUFFIXES, SourceFile, expand
from unpad.data.sources.jsonlines import count_blank_lines
from unpad.data.sources.rows import rows
from unpad.errors import RecipeError, SourceError
from unpad.recipes.data import DataSettings, EventSource, Source
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe

PEEK_ROWS = 20


class Checked(Protocol):
    """Module of `data/sources/` that is named after the kind of data it reads."""

    def check(self, file: SourceFile, data: DataSettings) -> tuple[int, list[BadRow]]:
        """Count the usable rows of a file, and return the others."""


@dataclass(frozen=True, slots=True)
class FileCheck:
    """Counts of one file: rows read, rows used, and blank lines, which are not rows."""

    path: Path
    kind: str
    num_rows: int
    num_used: int
    num_blank: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `unpad data check` found."""

    files: tuple[FileCheck, ...]
    bad: tuple[BadRow, ...]

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
        """The report as text: every bad row with its fix, every file, the sum."""
        lines = [line for row in self.bad for line in _bad_lines(row)]
        for file in self.files:
            blank = f", {file.num_blank} blank lines" if file.num_blank else ""
            lines.append(f"{file.path}: {file.kind}, {file.num_used} of {file.num_rows} rows usable{blank}")
        lines.append(f"rows read {self.num_rows} = rows used {self.num_used} + bad rows {len(self.bad)}")
        if self.num_used == 0:
            lines.append("E_EMPTY there is no usable row")
        return lines


def check(path: Path, kind: str | None = None) -> CheckReport:
    """Read a file, folder or glob with default settings and report every row that cannot be used.

    A folder without data files stands for the images of its sub-folders, one class each. A recipe stands for its
    tables of events, which are read with the columns that it names, and joined with its labels.

    Args:
        kind: one of KINDS; None tells each file's by its first rows or columns.

    Raises:
        SourceError: there is no such file, or it cannot be read; or what is wrong with tables of events concerns no
            single row.
        RecipeError: the recipe has no events.
    """
    if path.suffix.lower() in (".yaml", ".yml"):
        recipe = load_recipe(str(path))
        if not recipe.data.events:
            what, fix = "the recipe has no tables of events", "name a data file; of recipes only events are checked"
            raise RecipeError(what, where=str(path), fix=fix)
        return _check_events(recipe, trains=True)
    if kind == "events" or (kind is None and _looks_like_events(path)):
        return _check_events(Recipe(data=DataSettings(events=[EventSource(path=str(path))])), trains=False)
    if path.suffix.lower() in images.SUFFIXES or images.is_image(path):
        return _check_picture(path)
    source, data = [Source(path=str(path))], DataSettings()
    checked: list[FileCheck] = []
    every_bad: list[BadRow] = []
    for file in images.expand(source, Path) if _holds_classes(path) else expand(source, Path):
        chosen = kind or ("images" if file.path.is_dir() else _guess_kind(file, data))
        reader: Checked = import_module(f"unpad.data.sources.{chosen}")
        num_used, bad = reader.check(file, data)
        blank = count_blank_lines(file.path) if file.format == "jsonl" else 0
        checked.append(FileCheck(file.path, chosen, num_used + len(bad), num_used, blank))
        every_bad += bad
    return CheckReport(tuple(checked), tuple(every_bad))


def _check_picture(path: Path) -> CheckReport:
    """One image file by itself; its class does not matter."""
    found = images.examine(images.Found(str(path), "", path, str(path.resolve().parent)))
    bad = (found,) if isinstance(found, BadRow) else ()
    return CheckReport((FileCheck(path, "images", 1, 1 - len(bad), 0),), bad)


def _check_events(recipe: Recipe, trains: bool) -> CheckReport:
    """Tables of events with the labels and the split of the recipe; what a row is worth may depend on the others.

    Args:
        trains: whether to refuse patients of whom training would learn nothing, once no row is bad.
    """
    from unpad.data.histories.cohort import read_cohort, refuse_unlearnable

    rows, labels, cohort, _ = read_cohort(recipe)
    found = [*(part.bad for part in rows.parts), *([labels.bad] if labels else [])]
    tables = [*(part.table for part in rows.parts), *([labels.table] if labels else [])]
    bad = [row for some in found for row in some]
    refused = cohort.bad
    if trains and not bad and not refused:
        refuse_unlearnable(recipe, cohort)
    checked = []
    for table, own in zip(tables, found, strict=True):
        names = {file.shown for file in table.files}
        mine = [row for row in refused if row.where in names or row.where.rpartition(":")[0] in names]
        refused = [row for row in refused if row not in mine]
        bad += mine
        first = table.files[0].shown
        shown = first if len(table.files) == 1 else f"{first} and {len(table.files) - 1} more"
        num_rows = len(table) + len(table.bad) + sum(row.where in names for row in mine)  # a file without rows is one
        checked.append(FileCheck(Path(shown), "events", num_rows, num_rows - len(own) - len(mine), 0))
    return CheckReport(tuple(checked), tuple(bad))


def _looks_like_events(path: Path) -> bool:
    """Whether there are tables at `path`, and their columns are those of events."""
    if not any(file.suffix.lower() in TABLE_SUFFIXES for file in (path.rglob("*") if path.is_dir() else [path])):
        return False
    from unpad.data.histories.event_files import looks_like_events

    return looks_like_events(path)


def _holds_classes(path: Path) -> bool:
    """Whether a folder is one of images: there are some in it, and no manifest or parquet file."""
    if not path.is_dir():
        return False
    suffixes = {name.suffix.lower() for name in path.rglob("*")}
    return bool(suffixes & set(images.SUFFIXES)) and not suffixes & {".jsonl", ".parquet"}


def _guess_kind(file: SourceFile, data: DataSettings) -> str:
    """The kind of data that the first rows look like.

    Raises:
        SourceError: it is a table, and its columns are those of no kind.
    """
    fields = (*chat.FIELDS, "image", "label", "question", "caption")
    if file.path.suffix.lower() == ".csv" or (file.format == "parquet" and not _has_any(file.path, fields)):
        what = "the columns of this table are those of no kind of data"
        fix = "name them in a recipe and check that, `unpad data check RECIPE.yaml`, or say --kind"
        raise SourceError(what, where=str(file.path), fix=fix)
    try:
        first = list(islice(rows(file, data, fields), PEEK_ROWS))
    except OSError:
        return "text"  # reading it names the fault
    values = [row[1] for row in first if not isinstance(row, BadRow)]
    with_image = [value for value in values if isinstance(value, dict) and "image" in value]
    if 2 * len(with_image) > len(values):
        return "images" if any("label" in value for value in with_image) else "vqa"
    return "chat" if 2 * sum(map(chat.looks_like_chat, values)) > len(values) else "text"


def _has_any(path: Path, fields: tuple[str, ...]) -> bool:
    """Whether a table has one of these columns, or cannot be read: reading it names the fault."""
    from unpad.data.histories.tables import column_names

    try:
        return not set(fields).isdisjoint(column_names(path, str(path)))
    except SourceError:
        return True


def _bad_lines(row: BadRow) -> list[str]:
    found = [f"  found: {row.excerpt}"] if row.excerpt else []
    return [f"{row.where}: {row.code} {row.what}", *found, f"  do: {row.fix}"]
