"""`unpad data check`: usable and unusable rows of data files, before training."""

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Protocol

from unpad.data.sources import chat, images
from unpad.data.sources.example import BadRow
from unpad.data.sources.files import TABLE_SUFFIXES, SourceFile, expand
from unpad.data.sources.jsonlines import count_blank_lines
from unpad.data.sources.places import resolve_path
from unpad.data.sources.read import TEXT_KINDS
from unpad.data.sources.rows import rows
from unpad.errors import RecipeError, SourceError
from unpad.recipes.data import DataSettings, EventSource, Source
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe

PEEK_ROWS = 20


class Checked(Protocol):
    """Module of `data/sources/` named after the kind of data that it reads."""

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
        for file in self.files:
            blank = f", {file.num_blank} blank lines" if file.num_blank else ""
            lines.append(f"{file.path}: {file.kind}, {file.num_used} of {file.num_rows} rows usable{blank}")
        lines += self.notes
        lines.append(f"rows read {self.num_rows} = rows used {self.num_used} + bad rows {len(self.bad)}")
        if self.num_used == 0:
            lines.append("E_EMPTY there is no usable row")
        return lines


def check(path: Path, kind: str | None = None) -> CheckReport:
    """Read a file, folder or glob with default settings, and report every unusable row.

    A folder without data files is read as images in one sub-folder per class. Of a recipe, its tables of events are
    read, with the columns that it names, and joined with its labels; or its texts and conversations, and what its
    tokenizer loses of them is counted.

    Args:
        kind: one of KINDS; None infers it for each file from its first rows or columns.

    Raises:
        SourceError: a file is missing or unreadable, or tables of events have a fault that concerns no single row.
        RecipeError: the recipe has neither events nor texts nor conversations.
    """
    if path.suffix.lower() in (".yaml", ".yml"):
        recipe = load_recipe(str(path))
        if recipe.data.text or recipe.data.chat:
            return _check_texts(recipe)
        if not recipe.data.events:
            what = "the recipe has neither tables of events nor texts nor conversations"
            raise RecipeError(what, where=str(path), fix="name a data file; of recipes only these are checked")
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


def _check_texts(recipe: Recipe) -> CheckReport:
    """Check the texts and conversations of a recipe; a tokenizer of a file may lose some of their characters.

    Raises:
        SourceError: next to nothing of the text survives the tokenizer.
    """
    data = recipe.data
    checked: list[FileCheck] = []
    every_bad: list[BadRow] = []
    for kind in TEXT_KINDS:
        reader: Checked = import_module(f"unpad.data.sources.{kind}")
        for file in expand(getattr(data, kind), partial(resolve_path, data)):
            num_used, bad = reader.check(file, data)
            blank = count_blank_lines(file.path) if file.format == "jsonl" else 0
            checked.append(FileCheck(file.path, kind, num_used + len(bad), num_used, blank))
            every_bad += bad
    notes: list[str] = []
    if recipe.tokenizer.path is not None and not every_bad:
        from unpad.data.tokens.corpus import prepare

        lost = prepare(recipe)[2].lost
        lost.refuse(recipe.tokenizer.path)
        notes = lost.lines()
    return CheckReport(tuple(checked), tuple(every_bad), tuple(notes))


def _check_picture(path: Path) -> CheckReport:
    """Check one image file, without a class."""
    image = images.examine(images.Found(str(path), "", path, str(path.resolve().parent)))
    bad = (image,) if isinstance(image, BadRow) else ()
    return CheckReport((FileCheck(path, "images", 1, 1 - len(bad), 0),), bad)


def _check_events(recipe: Recipe, trains: bool) -> CheckReport:
    """Check tables of events with the labels and the split of a recipe; a row's use may depend on other rows.

    Args:
        trains: whether to refuse data from which training would learn nothing, if no row is bad.
    """
    from unpad.data.histories.cohort import read_cohort, refuse_unlearnable

    read = read_cohort(recipe)
    rows, labels, cohort = read.rows, read.labels, read.cohort
    bad_of_tables = [*(part.bad for part in rows.parts), *([labels.bad] if labels else [])]
    tables = [*(part.table for part in rows.parts), *([labels.table] if labels else [])]
    bad = [row for rows_of_table in bad_of_tables for row in rows_of_table]
    refused = cohort.bad
    if trains and not bad and not refused:
        refuse_unlearnable(recipe, cohort)
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


def _guess_kind(file: SourceFile, data: DataSettings) -> str:
    """Infer the kind of data from the first rows.

    Raises:
        SourceError: the columns of a table match no kind.
    """
    fields = (*chat.FIELDS, "image", "label", "question", "caption")
    if file.path.suffix.lower() == ".csv" or (file.format == "parquet" and not _has_any(file.path, fields)):
        what = "the columns of this table match no kind of data"
        fix = "name the columns in a recipe and check it with `unpad data check RECIPE.yaml`, or set --kind"
        raise SourceError(what, where=str(file.path), fix=fix)
    try:
        first = list(islice(rows(file, data, fields), PEEK_ROWS))
    except OSError:
        return "text"  # reading the file reports the fault
    values = [row[1] for row in first if not isinstance(row, BadRow)]
    with_image = [value for value in values if isinstance(value, dict) and "image" in value]
    if 2 * len(with_image) > len(values):
        return "images" if any("label" in value for value in with_image) else "vqa"
    return "chat" if 2 * sum(map(chat.looks_like_chat, values)) > len(values) else "text"


def _has_any(path: Path, fields: tuple[str, ...]) -> bool:
    """Whether a table has one of the columns; True for an unreadable one, whose fault is reported when it is read."""
    from unpad.data.histories.tables import column_names

    try:
        return not set(fields).isdisjoint(column_names(path, str(path)))
    except SourceError:
        return True


def _bad_lines(row: BadRow) -> list[str]:
    found = [f"  found: {row.excerpt}"] if row.excerpt else []
    return [f"{row.where}: {row.code} {row.what}", *found, f"  do: {row.fix}"]
