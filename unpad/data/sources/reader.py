"""Rows of any supported file, and their conversion to examples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from unpad.data.sources.delimited import read_delimited
from unpad.data.sources.documents import read_documents
from unpad.data.sources.example import BadRow, Example, Unread
from unpad.data.sources.faults import FIXES, FieldFault, RowFault, excerpt, spelled
from unpad.data.sources.fields import Advise, advice, setting
from unpad.data.sources.files import SourceFile, unreadable
from unpad.data.sources.json_rows import read_array, read_lines
from unpad.data.sources.parquet import read_parquet
from unpad.data.sources.row import Row
from unpad.data.sources.unread import count_unread
from unpad.errors import SourceError
from unpad.recipes.data import DataSettings
from unpad.terminal.progress import counted

OPTIONAL = ("split", "group", "fact", "keywords")
TEXT_KINDS = ("text", "chat", "pairs")  # sections of a recipe's `data` that become tokens
PAIRS = "pairs"  # the one of them with two sequences per document

T = TypeVar("T")


def read(
    file: SourceFile,
    data: DataSettings,
    fields: tuple[str, ...],
    optional: tuple[str, ...] = OPTIONAL,
    advise: Advise | None = None,
) -> Iterator[Row | BadRow]:
    """Yield every row of a file, or the bad row: an object, a string of a JSON array, or a document of plain text.

    Fields that are known ones in another spelling, such as `Text`, have the known names.

    Args:
        fields: names that the wanted field of an object may have, best first; optional: of other known fields.
        advise: what to do about a table without any of `fields`, from its first rows.

    Raises:
        OSError: the file cannot be opened or read.
    """
    if file.format == "text":
        yield from read_documents(file.path, data.separator, join=data.join, by_ending=file.by_ending)
    elif file.format == "csv":
        yield from read_delimited(file.path, fields, optional, advise)
    elif file.format == "parquet":
        yield from read_parquet(file.path, fields, optional, advise)
    else:
        known, exact = (*fields, *optional), ()  # names of the last row that has none in another spelling
        for row in read_lines(file.path) if file.format == "jsonl" else read_array(file.path):
            if not isinstance(row, BadRow) and type(row.value) is dict and (names := tuple(row.value)) != exact:
                value = row.value
                try:
                    row.value = spelled(value, known)
                except RowFault as fault:
                    yield fault.at(row.where, value)
                    continue
                exact = names if row.value is value else exact
            yield row


def examples(
    file: SourceFile,
    data: DataSettings,
    fields: tuple[str, ...],
    convert: Callable[[Row], T],
    kind: str,
    optional: tuple[str, ...] = OPTIONAL,
) -> Iterator[T | BadRow]:
    """Yield `convert(row)` of every row, or the bad row where `convert` raises RowFault.

    Args:
        kind: section of the recipe's `data` that reads the file; advice on a missing field names it.
    """
    advise = partial(advice, kind, file.named or str(file.path), asked=file.fields)
    rows = read(file, data, fields, optional, advise)
    file.unread.clear()
    rows = _without_ignored(rows, file) if file.ignore else rows
    return converted(rows, convert, advise, partial(_leave, kind, file), file.unread)


def _without_ignored(rows: Iterable[Row | BadRow], file: SourceFile) -> Iterator[Row | BadRow]:
    """Leave fields out of rows; their messages leave them out when they are read.

    Raises:
        SourceError: there is none of such a name.
    """
    present: set[str] = set()
    for row in rows:
        if isinstance(row, Row) and type(row.value) is dict:
            present |= row.leave_out(file.ignore)
        yield row
    if absent := [name for name in file.ignore if name not in present]:
        where, fix = str(file.path), "correct its name, or take it out of `ignore`"
        raise SourceError(f'no row has the field "{absent[0]}", which `ignore` leaves out', where=where, fix=fix)


def refuse_given(kind: str, file: SourceFile, examples: Sequence[Example]) -> list[BadRow]:
    """Bad rows in place of examples that give a chat template more than messages, where there is no template."""
    bad = []
    for example in examples:
        if example.given:
            fields = json.loads(example.given)
            field = "tools" if "tools" in fields else "chat_template_kwargs"
            what = f'"{field}" is for the chat template of an imported model (`unpad import`), and there is none'
            bad.append(BadRow(example.where, "E_FIELD", what, _leave(kind, file, field), excerpt(example.given)))
    return bad


def _leave(kind: str, file: SourceFile, *fields: str) -> str:
    """What to do about fields that change the meaning of a row."""
    leave = setting(kind, file.named or file.path, **file.fields, ignore=(*file.ignore, *fields))
    means = "the field out if it means" if len(fields) == 1 else "the fields out if they mean"
    return f"mend the row, or leave {means} nothing: {leave}"


def converted(
    rows: Iterable[Row | BadRow],
    convert: Callable[[Row], T],
    advise: Advise | None = None,
    leave: Callable[..., str] | None = None,
    unread: Unread | None = None,
) -> Iterator[T | BadRow]:
    """Yield `convert(row)` of every row, or the bad row where `convert` raises RowFault.

    Args:
        advise: what to do about rows without a field, by the first of them, so that all have one fix.
        leave: what to do about fields that change the meaning of a row, by their names.
        unread: counts the fields that nobody read of the rows that are converted.
    """
    advised: str | None = None
    for row in rows:
        if isinstance(row, BadRow):
            yield row
            continue
        try:
            made = convert(row)
            if row.doubts:
                raise FieldFault(row.doubts)
        except RowFault as fault:
            if advise and fault.code == "E_MISSING" and fault.fix == FIXES["E_MISSING"] and type(row.value) is dict:
                advised = advise([row.value]) if advised is None else advised
                fault.fix = advised or fault.fix
            elif leave and isinstance(fault, FieldFault):
                fault.fix = leave(*fault.fields)
            yield fault.at(row.where, row.value)
            continue
        if unread is not None:
            count_unread(unread, row)
        yield made


def collect(items: Iterator[T | BadRow], path: Path) -> tuple[list[T], list[BadRow]]:
    """Read a file to the end; every row is in exactly one of the two lists.

    Raises:
        SourceError: the file cannot be opened or read.
    """
    used: list[T] = []
    bad: list[BadRow] = []
    with reading(path):
        for item in counted(items, f"reading {path.name}", unit="rows"):
            if isinstance(item, BadRow):
                bad.append(item)
            else:
                used.append(item)
    return used, bad


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error of the system while a file is read into a SourceError that names the file."""
    try:
        yield
    except OSError as error:
        raise unreadable(error, str(path.absolute())) from None


def read_file(kind: str, file: SourceFile, data: DataSettings) -> tuple[list[Example], list[BadRow]]:
    """Read one file to the end; every row is in exactly one of the two lists.

    Args:
        kind: one of TEXT_KINDS.

    Raises:
        SourceError: the file cannot be opened or read.
    """
    return collect(read_rows(kind, file, data), file.path)


def read_rows(kind: str, file: SourceFile, data: DataSettings) -> Iterator[Example | BadRow]:
    """Yield the rows of one file in order, as a stream; see `read_file`.

    Raises:
        OSError: the file cannot be opened or read.
    """
    rows: Iterator[Example | BadRow] = import_module(f"unpad.data.sources.{kind}").read(file, data)
    return rows
