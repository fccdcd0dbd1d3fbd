"""`unpad data check`: usable and unusable rows of data files, before training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from unpad.data.check_report import Asked, CheckReport, FileCheck, PictureCounts
from unpad.data.sources import chat, images, pairs, vqa
from unpad.data.sources import files as source_files
from unpad.data.sources.bad_rows import are_allowed
from unpad.data.sources.documents import describe_book, single_document
from unpad.data.sources.example import BadRow, Example, count_bad
from unpad.data.sources.faults import there_is
from unpad.data.sources.fields import MESSAGES, REPLIES, REQUESTS, Advise, advice, is_picture
from unpad.data.sources.files import FORMATS, SourceFile, expand, files_below, skipped_files
from unpad.data.sources.reader import OPTIONAL, TEXT_KINDS, read, read_rows, reading, refuse_given
from unpad.data.sources.split import content_key
from unpad.errors import RecipeError, SourceError, nearest
from unpad.recipes.data import KINDS, DataSettings, EventSource, ImageSettings, Source
from unpad.recipes.file import SUFFIXES, load_recipe, load_settings, recipe_names
from unpad.recipes.recipe import Recipe
from unpad.storage.remote import data_path
from unpad.terminal.progress import counted

PEEK_ROWS = 20


def check(
    paths: Path | Sequence[Path], kind: str | None = None, field: str | None = None, overrides: Sequence[str] = ()
) -> CheckReport:
    """Read files, folders, globs or recipes, and report every unusable row.

    A folder without data files is read as images in one sub-folder per class. All sources of a recipe are read with
    its settings; its tables of events are joined with its labels, and the characters that its tokenizer loses are
    counted. Among several paths or files, one that is refused as a whole is a fault in the report.

    Args:
        kind: one of KINDS; None infers it for each file from its first rows or columns.
        field: field or column that holds the text, as in a recipe; None for the usual names.
        overrides: changes of the recipes among the paths, or of the defaults that files are read by, as key=value.

    Raises:
        SourceError: the only file is missing or unreadable, or its rows are of no known kind, or the only tables of
            events have a fault that concerns no single row.
        RecipeError: there is no such kind of data, a recipe names no data, or an override does not fit.
    """
    if kind not in (None, *KINDS):
        raise RecipeError(f'there is no kind of data "{kind}"', where="--kind", fix=nearest(str(kind), list(KINDS)))
    seen = _CheckMemory()
    every = [paths] if isinstance(paths, Path) else paths
    settings = Recipe() if all(map(_is_recipe, every)) else load_settings(overrides)
    recipe, data = partial(_check_recipe, overrides, seen), partial(_check_path, kind, field, settings, seen)
    report = _join([(path, partial(recipe if _is_recipe(path) else data, path)) for path in every])
    return replace(report, asked=seen.asked)


@dataclass
class _CheckMemory:
    """Memory of a check over its files: hashes of usable rows so far, of all kinds, and questions."""

    keys: set[int] = dataclass_field(default_factory=set)
    asked: Asked = dataclass_field(default_factory=Asked)
    has_template: bool = False  # of an imported model


def _join(checks: Sequence[tuple[Path, Callable[[], CheckReport]]]) -> CheckReport:
    """Make the reports of several paths or files, and join them; what refuses one of several is a fault of it."""
    reports = []
    for path, check_one in checks:
        try:
            reports.append(check_one())
        except (SourceError, RecipeError) as error:
            if len(checks) == 1:
                raise
            reports.append(_refused(path, error))
    files = tuple(file for report in reports for file in report.files)
    bad = tuple(row for report in reports for row in report.bad)
    notes = tuple(note for report in reports for note in report.notes)
    return CheckReport(files, bad, notes, tuple(skip for report in reports for skip in report.skipped))


def _refused(path: Path, error: SourceError | RecipeError) -> CheckReport:
    """Report of a path that was refused as a whole; nobody has counted its rows."""
    code, _, what = error.what.partition(" ")
    if not code.startswith("E_"):
        code, what = "E_RECIPE" if isinstance(error, RecipeError) else "E_FILE", error.what
    bad = BadRow(error.where or str(path), code, what, error.fix, num_rows=None)
    return CheckReport((FileCheck(path, None, 1, 0),), (bad,))


def _is_recipe(path: Path) -> bool:
    """True for a file of a recipe, and for the name of a packaged one that no file here has."""
    return path.suffix.lower() in SUFFIXES or (str(path) in recipe_names() and not path.exists())


def _check_path(kind: str | None, field: str | None, settings: Recipe, seen: _CheckMemory, path: Path) -> CheckReport:
    source_files.refuse_system(path)
    data, seen.has_template = settings.data, settings.tokenizer.path is not None
    if kind == "events" or (kind is None and field is None and _looks_like_events(path)):
        data = data.model_copy(update={"events": [EventSource(path=str(path))]})
        return _check_events(settings.model_copy(update={"data": data}), trains=False)
    if path.suffix.lower() in images.SUFFIXES or images.is_image(path):
        return _check_picture(settings.images, path)
    source = [Source(path=str(path), field=field)]
    of_pictures = _holds_classes(path) or kind == "images"
    files = images.expand(source, data_path) if of_pictures else expand(source, data_path)
    report = _join([(file.path, partial(_check_file, kind, file, data, seen)) for file in files])
    if pictures := [picture for file in report.files if file.pictures for picture in file.pictures.examples]:
        report = replace(report, notes=(*report.notes, *_picture_remarks(pictures, settings.images)))
    manifests = any(file.kind in ("images", "vqa") for file in report.files)
    known = (*FORMATS, *images.SUFFIXES) if manifests else tuple(FORMATS)
    return report if of_pictures else replace(report, skipped=tuple(skipped_files(path, known)))


def _check_file(kind: str | None, file: SourceFile, data: DataSettings, seen: _CheckMemory) -> CheckReport:
    """Check a file.

    Args:
        kind: None infers it.
        seen: in the files so far; what this file has is added.
    """
    kind = _kind_of(file, data, kind)
    bad: list[BadRow] = []
    characters, pictures = list[int](), PictureCounts()
    num_used = num_keys = num_repeated = 0
    with reading(file.path):
        for row in counted(_checked(kind, file, data, seen.has_template), f"reading {file.path.name}", unit="rows"):
            if isinstance(row, BadRow):
                bad.append(row)
                continue
            num_used += 1
            key = None
            if isinstance(row, Example):
                characters.append(sum(len(turn.content) + len(turn.thoughts) for turn in row.every_turn))
                key = content_key(row)
                seen.asked.add(row)
            elif isinstance(row, images.ImageExample):
                pictures.add(row)
                key = images.content_key(row)
            elif isinstance(row, vqa.VqaExample):
                characters.append(len(row.question) + len(row.answer))
            if key is not None:
                num_keys += 1
                num_repeated += key in seen.keys
                seen.keys.add(key)
    file_check = FileCheck(
        path=file.path,
        kind=kind,
        num_rows=num_used + count_bad(bad),
        num_used=num_used,
        num_repeated=num_repeated if num_keys else None,
        characters=np.array(characters, np.int64) if characters else None,
        pictures=pictures if pictures.classes else None,
        note="; ".join(_remarks(kind, file, data, characters)),
        unread=file.unread,
    )
    return CheckReport((file_check,), tuple(bad))


def _checked(kind: str, file: SourceFile, data: DataSettings, has_template: bool) -> Iterator[Any]:
    """Rows of a file as its reader has them, and bad ones."""
    if kind in TEXT_KINDS:
        for row in read_rows(kind, file, data):
            refused = [] if has_template or isinstance(row, BadRow) else refuse_given(kind, file, [row])
            yield refused[0] if refused else row
    elif kind == "vqa":
        used, _, bad = vqa.read_all(file, data)
        yield from (*used, *bad)
    else:
        yield from import_module(f"unpad.data.sources.{kind}").read(file, data)


def _remarks(kind: str, file: SourceFile, data: DataSettings, characters: Sequence[int]) -> Iterator[str]:
    """Remarks with their remedies on a plain text that is one document or one book, or of an unknown ending."""
    if kind != "text" or file.format != "text" or not characters:
        return
    for shape in (single_document(file, data, len(characters)), describe_book(file, data, characters)):
        if shape:
            yield f"{shape.what}; {shape.fix}"
    suffix = file.path.suffix.lower()
    if file.by_ending and suffix not in FORMATS:
        tags = ", and its tags would be learnt (try pandoc -t plain)" * suffix.endswith(("html", ".htm", ".xml"))
        yield f"{file.path} is read as plain text{tags}; in a folder it is skipped, as its ending is not a known one"


def _check_recipe(overrides: Sequence[str], seen: _CheckMemory, path: Path) -> CheckReport:
    recipe = load_recipe(str(path), overrides)
    data, seen.has_template = recipe.data, recipe.tokenizer.path is not None
    resolve = partial(source_files.resolve_path, data)
    files = [
        (kind, file)
        for kind in KINDS
        if kind != "events"
        for file in (images.expand if kind == "images" else expand)(getattr(data, kind), resolve)
    ]
    if not files and not data.events:
        fix = f"set {' or '.join(f'data.{kind}' for kind in KINDS)}, or name a data file"
        raise RecipeError("the recipe names no data", where=str(path), fix=fix)
    checks = [(file.path, partial(_check_file, kind, file, data, seen)) for kind, file in files]
    checks += [(path, partial(_check_events, recipe, trains=True))] if data.events else []
    folders = [resolve(source.path) for kind in TEXT_KINDS for source in data.sources(kind)]
    skipped = tuple(skip for folder in folders for skip in skipped_files(folder))
    report = replace(_join(checks), skipped=skipped)
    if not report.num_used or not are_allowed(report.bad, report.num_rows, data):
        return report
    near = _near_duplicates(recipe)
    if recipe.tokenizer.path is None or not (data.text or data.converses):
        return replace(report, notes=(*report.notes, *near))
    from unpad.data.meaning import claims
    from unpad.data.tokens.corpus import open_corpus

    corpus = open_corpus(recipe)
    lost = corpus.report.lost  # of characters, by the tokenizer of a file
    lost.refuse(recipe.tokenizer.path)
    wrong = [f"warning: not so: {claim.name}; {claim.wrong[0]}" for claim in claims(corpus, recipe) if claim.wrong]
    return replace(report, notes=(*report.notes, *lost.lines(), *wrong, *near))


def _near_duplicates(recipe: Recipe) -> list[str]:
    """Lines on near-duplicates in the data of every family that the recipe names, whichever its model reads."""
    from unpad.data.family import Family

    families: list[Family] = [import_module(f"unpad.data.{name}") for name in ("patients", "text", "images", "vqa")]
    named = [family for family in families if any(map(recipe.data.sources, family.KINDS))]
    return [line for family in named for line in family.near_duplicates(recipe)]


def guess_kind(path: Path) -> str:
    """Infer the kind of data of a file, folder or glob from the first rows of its first file.

    Raises:
        SourceError: there is no file, or its rows match no kind.
    """
    if _looks_like_events(path):
        return "events"
    if images.is_image(path):
        raise SourceError("one picture is no data to train on", where=str(path), fix="name the folder of all classes")
    if _holds_classes(path):
        return "images"
    return _kind_of(expand([Source(path=str(path))], data_path)[0], DataSettings(), None)


def _no_kind(file: SourceFile, values: list[Any], bad: list[BadRow], advise: Advise) -> SourceError:
    """The error of a file of no known kind, with the setting that reads it where its rows show one."""
    header = next((row for row in bad if row.code == "E_MISSING"), None)
    if not values and header:
        there, fix = header.what.partition("; ")[2], header.fix
    else:
        there, fix = there_is({name: cell for value in values for name, cell in value.items()}), advise(values)
    if any(not set(REQUESTS).isdisjoint(value) for value in values):
        fix = f"write the reply that is wanted beside each request, as {' or '.join(REPLIES)}"
    return SourceError(f"E_KIND the rows or columns match no kind of data; {there}", where=str(file.path), fix=fix)


def _picture_remarks(
    pictures: Sequence[images.ImageExample], settings: ImageSettings, labelled: bool = True
) -> list[str]:
    from unpad.data.pictures.alike import label_remarks, pixel_remarks  # imports torch

    return [*(label_remarks(pictures) if labelled else []), *pixel_remarks(pictures, settings)]


def _check_picture(settings: ImageSettings, path: Path) -> CheckReport:
    """Check one image file, without a class."""
    image = images.examine(images.ImageRow(str(path), "", path, str(path.resolve().parent)))
    bad = (image,) if isinstance(image, BadRow) else ()
    notes = () if isinstance(image, BadRow) else (*_picture_remarks([image], settings, labelled=False),)
    return CheckReport((FileCheck(path, "images", 1, 1 - len(bad)),), bad, notes)


def _check_events(recipe: Recipe, trains: bool) -> CheckReport:
    """Check tables of events with the labels and the split of a recipe; a row's use may depend on other rows.

    Args:
        trains: whether to refuse what training would refuse, if no row is bad that the recipe does not allow.
    """
    from unpad.data.histories.cohort import read_cohort
    from unpad.data.histories.report import cohort_lines

    read = read_cohort(recipe)
    own, remarks = list[str](), read.notes
    if trains:
        own = cohort_lines(read.cohort, recipe.events.labels.competing if recipe.events.labels else ())
    if trains and are_allowed(read.bad, read.num_rows, recipe.data):
        from unpad.data.patients import open_tables

        data = open_tables(recipe, read, None)
        data.check_trainable()
        own = [*own, data.report.without_events(data.sets, data.unit), *data.leak_lines()]
        remarks = data.report.warnings
    reports = []
    for table, bad_rows in read.tables:
        names = {file.shown for file in table.files}
        refused = [row for row in read.refused if row.where in names or row.where.rpartition(":")[0] in names]
        first = table.files[0].shown
        shown = first if len(table.files) == 1 else f"{first} and {len(table.files) - 1} more"
        empty_files = sum(row.where in names for row in refused)  # each counts as a row
        num_rows = len(table) + len(table.bad) + empty_files
        num_used = num_rows - len(bad_rows) - len(refused)
        unread = table.unread
        reports.append((FileCheck(Path(shown), "events", num_rows, num_used, unread=unread), (*bad_rows, *refused)))
    notes = (*own, *(f"warning: {note}" for note in remarks))
    return CheckReport(tuple(file for file, _ in reports), tuple(row for _, bad in reports for row in bad), notes)


def _looks_like_events(path: Path) -> bool:
    """True if `path` has tables with the columns of events."""
    listed = files_below(path) if path.is_dir() else [path]
    if not any(file.suffix.lower() in source_files.TABLE_SUFFIXES for file in listed):
        return False
    from unpad.data.histories.event_files import looks_like_events

    return looks_like_events(path)


def _holds_classes(path: Path) -> bool:
    """True if a folder has images, and neither a manifest nor a parquet file."""
    if not path.is_dir():
        return False
    suffixes = {name.suffix.lower() for name in files_below(path)}
    return bool(suffixes & set(images.SUFFIXES)) and not suffixes & {".jsonl", ".parquet"}


def _kind_of(file: SourceFile, data: DataSettings, kind: str | None) -> str:
    """Return the requested kind of data, or infer it from the first rows.

    Raises:
        SourceError: the rows match no kind.
    """
    if kind is not None or file.path.is_dir():
        return kind or "images"
    fields = (file.field,) if file.field else (*chat.FIELDS, *pairs.FIELDS, "image")
    advise = partial(advice, "", file.path, asked=file.fields)
    try:
        first = list(islice(read(file, data, fields, (*OPTIONAL, "label"), advise), PEEK_ROWS))
    except OSError:
        return "text"  # reading the file reports the fault
    bad = [row for row in first if isinstance(row, BadRow)]
    values = [row.value for row in first if not isinstance(row, BadRow)]
    kinds = Counter(kind for value in values if (kind := _kind_of_row(_by_field(value, file.field))))
    if not kinds and (values or any(row.code == "E_MISSING" for row in bad)):
        raise _no_kind(file, values, bad, advise)
    return kinds.most_common(1)[0][0] if kinds else "text"


def _by_field(value: Any, field: str | None) -> Any:
    """A row under the names that are known, by the source's own field."""
    if field is None or not isinstance(value, dict):
        return value
    cell = value.get(field)
    names = ("messages",) if isinstance(cell, list) else ("image", "label") if is_picture(cell) else ("text",)
    replies = {name: value[name] for name in pairs.REPLIES if name in value and name != field}
    return replies | dict.fromkeys(names if field in value else (), cell)


def _kind_of_row(value: Any) -> str:
    """The kind of data that a row looks like; "" for none."""
    if not isinstance(value, dict):
        return "chat" if chat.looks_like_chat(value) else "text"
    if "image" in value:
        return "images" if "label" in value else "vqa" if {"question", "caption", *MESSAGES} & {*value} else ""
    if all(name in value for name in pairs.REPLIES):
        return "pairs"
    return "chat" if chat.looks_like_chat(value) else "text" if "text" in value else ""
