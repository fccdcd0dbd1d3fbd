"""Rows of any supported file, their conversion to examples, and checks of their fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar

from unpad.data.sources.arrays import read_array
from unpad.data.sources.delimited import Advise, read_delimited
from unpad.data.sources.documents import read_documents
from unpad.data.sources.example import SPLIT_NAMES, BadRow, Example, SplitName, Usable
from unpad.data.sources.fields import SpellingError, advice, spelling
from unpad.data.sources.files import SourceFile, unreadable
from unpad.data.sources.jsonlines import FIXES, RowFault, missing, read_lines, twice, type_name
from unpad.data.sources.parquet import read_parquet
from unpad.data.sources.split import content_key, turns_key
from unpad.recipes.data import DataSettings
from unpad.terminal.progress import counted

OPTIONAL = ("split", "group", "fact", "keywords")
# White space besides what str.strip() removes: zero-width space, joiners, word joiner, byte order mark.
_ZERO_WIDTH = "\u200b\u200c\u200d\u2060\ufeff"

Row = tuple[str, Any]  # where it is, and its JSON value
T = TypeVar("T")


def rows(
    file: SourceFile,
    data: DataSettings,
    fields: tuple[str, ...],
    optional: tuple[str, ...] = OPTIONAL,
    advise: Advise | None = None,
) -> Iterator[Row | BadRow]:
    """Yield (where, value) or the bad row: an object, a string of a JSON array, or a document of plain text.

    Fields that are known ones in another spelling, such as `Text`, have the known names.

    Args:
        fields: names that the wanted field of an object may have, best first; optional: of other known fields.
        advise: what to do about a table without any of `fields`, from its first rows.
    """
    if file.format == "text":
        yield from read_documents(file.path, data.separator, by_ending=file.by_ending)
    elif file.format == "csv":
        yield from read_delimited(file.path, fields, optional, advise)
    elif file.format == "parquet":
        yield from read_parquet(file.path, fields, optional, advise)
    else:
        lines, known = file.format == "jsonl", (*fields, *optional)
        before, after = (f"{file.path}:", "") if lines else (f"{file.path}[", "]")
        for item in read_lines(file.path) if lines else read_array(file.path):
            if isinstance(item, BadRow):
                yield item
                continue
            where, value = f"{before}{item[0]}{after}", item[1]
            try:
                yield where, spelled(value, known) if type(value) is dict else value
            except RowFault as fault:
                yield fault.at(where, value)


def spelled(row: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """The row with the known names of fields that it spells in another way.

    Raises:
        RowFault: two fields could be the same known one.
    """
    try:
        near = spelling(tuple(row), known)
    except SpellingError as error:
        raise twice(error) from None
    return {near.get(name, name): value for name, value in row.items()} if near else row


def examples(
    file: SourceFile,
    data: DataSettings,
    fields: tuple[str, ...],
    convert: Callable[[str, Any], T],
    kind: str,
    optional: tuple[str, ...] = OPTIONAL,
) -> Iterator[T | BadRow]:
    """Yield `convert(where, value)` of every row, or the bad row where `convert` raises RowFault.

    Args:
        kind: section of the recipe's `data` that reads the file; advice on a missing field names it.
    """
    advise = partial(advice, kind, file.path, asked=file.field)
    advised: str | None = None  # by the first row without the fields, so that all have one fix
    for item in rows(file, data, fields, optional, advise):
        if isinstance(item, BadRow):
            yield item
            continue
        where, value = item
        try:
            yield convert(where, value)
        except RowFault as fault:
            if fault.code == "E_MISSING" and fault.fix == FIXES["E_MISSING"] and type(value) is dict:
                advised = advise([value]) if advised is None else advised
                fault.fix = advised or fault.fix
            yield fault.at(where, value)


def converted(items: Iterable[Row | BadRow], convert: Callable[[str, Any], T]) -> Iterator[T | BadRow]:
    """Yield `convert(where, value)` of every row, or the bad row where `convert` raises RowFault."""
    for item in items:
        if isinstance(item, BadRow):
            yield item
            continue
        try:
            yield convert(*item)
        except RowFault as fault:
            yield fault.at(*item)


def usable(item: Example | BadRow) -> Usable | BadRow:
    """Return the length and the hash of an example, and of a conversation also those of its last question and reply."""
    if isinstance(item, BadRow):
        return item
    *before, last = item.turns
    characters, key = sum(len(turn.content) + len(turn.thoughts) for turn in item.every_turn), content_key(item)
    if last.role != "assistant" or item.rejected is not None:
        return Usable(characters, key, item.where)
    return Usable(characters, key, item.where, turns_key(before), turns_key([last]))


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


# --------------------------------------------------------------------------- checks of one row


def require_fields(row: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return a row that is an object with all of these fields.

    Raises:
        RowFault: it is another value, or lacks one of them.
    """
    if type(row) is not dict:
        raise RowFault("E_NOT_OBJECT", f"the row is {type_name(row)}, expected an object")
    for name in names:
        if name not in row:
            raise missing((name,), list(row))
    return row


def require_text(value: object, name: str) -> str:
    """Return `value` if it is a text with content.

    Raises:
        RowFault: it is null, not a string, blank, or contains a NUL.
    """
    if type(value) is not str:
        if value is None:
            raise RowFault("E_NULL", f"{name} is null, expected a string")
        fix = "join the parts into one string" if isinstance(value, list) else ""
        raise RowFault("E_TYPE", f"{name} is {type_name(value)}, expected a string", fix)
    if not value.strip().strip(_ZERO_WIDTH):
        raise RowFault("E_EMPTY", f"{name} is {'blank' if value else 'empty'}")
    if "\0" in value:
        raise RowFault("E_NUL", f"{name} holds a NUL character")
    return value


def optional_fields(row: dict[str, Any]) -> tuple[SplitName | None, str, tuple[str, ...]]:
    """Return a row's own split, group (also called fact) and keywords; null is the same as absent.

    Raises:
        RowFault: a value has the wrong type.
    """
    split, group, keywords = declared_split(row), declared_group(row), row.get("keywords")
    if keywords is not None and not (isinstance(keywords, list) and all(isinstance(word, str) for word in keywords)):
        raise RowFault("E_TYPE", '"keywords" is not a list of strings')
    return split, group, tuple(keywords or ())


def declared_split(row: dict[str, Any]) -> SplitName | None:
    """Return the part that a row declares by a name of SPLIT_NAMES; None leaves it to the seed.

    Raises:
        RowFault: it is no such name.
    """
    split = row.get("split")
    if split is None:
        return None
    known = SPLIT_NAMES.get(split.strip().lower()) if type(split) is str else None
    if known is None:
        raise RowFault("E_SPLIT", f'"split" is {split!r:.60}, expected "train", "valid" or "test"')
    return known


def declared_group(row: dict[str, Any]) -> str:
    """Return the group of a row (also called fact), "" without one; rows of a group stay in one part of the split.

    Raises:
        RowFault: it is neither text nor a whole number.
    """
    group = row["group"] if row.get("group") is not None else row.get("fact")
    if group is not None and type(group) not in (str, int):
        raise RowFault("E_TYPE", f'"group" is {type_name(group)}, expected a string')
    return "" if group is None else str(group)


TEXT_KINDS = ("text", "chat", "pairs")  # sections of a recipe's `data` that become tokens
PAIRS = "pairs"  # the one of them with two sequences per document


class TextReader(Protocol):
    """Members of a module such as `sources/chat.py`."""

    def read(self, file: SourceFile, data: DataSettings) -> Iterator[Example | BadRow]:
        """Yield every row of a file as an example or as a bad row."""


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
    reader: TextReader = import_module(f"unpad.data.sources.{kind}")
    return reader.read(file, data)
