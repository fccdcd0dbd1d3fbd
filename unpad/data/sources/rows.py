"""Rows of any supported file, their conversion to examples, and checks of their fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from unpad.data.sources.example import BadRow, SplitName
from unpad.data.sources.files import HEAD_BYTES, SourceFile
from unpad.data.sources.jsonlines import RowFault, read_array, read_lines, type_name, wrong_encoding
from unpad.errors import SourceError
from unpad.recipes.data import DataSettings

if TYPE_CHECKING:
    import pyarrow as pa

END_OF_TEXT = "<|endoftext|>"
BATCH_ROWS = 1024
OPTIONAL = ("split", "group", "fact", "keywords")

# White space besides what str.strip() removes: zero-width space, joiners, word joiner, byte order mark.
_ZERO_WIDTH = "\u200b\u200c\u200d\u2060\ufeff"
_BLANK_LINES = re.compile(rb"\n[ \t]*(?:\n[ \t]*)*\n")

Row = tuple[str, Any]  # where it is, and its JSON value
T = TypeVar("T")


def rows(file: SourceFile, data: DataSettings, fields: tuple[str, ...]) -> Iterator[Row | BadRow]:
    """Yield (where, value) or the bad row: an object, a string of a JSON array, or a document of plain text.

    Args:
        fields: names that the wanted field of an object may have, best first.
    """
    if file.format == "text":
        yield from _documents(file, data.separator)
    elif file.format == "parquet":
        yield from _parquet(file, fields)
    else:
        lines = file.format == "jsonl"
        before, after = (f"{file.path}:", "") if lines else (f"{file.path}[", "]")
        for item in read_lines(file.path) if lines else read_array(file.path):
            yield item if isinstance(item, BadRow) else (f"{before}{item[0]}{after}", item[1])


def examples(
    file: SourceFile, data: DataSettings, fields: tuple[str, ...], convert: Callable[[str, Any], T]
) -> Iterator[T | BadRow]:
    """Yield `convert(where, value)` of every row, or the bad row where `convert` raises RowFault."""
    for item in rows(file, data, fields):
        if isinstance(item, BadRow):
            yield item
            continue
        where, value = item
        try:
            yield convert(where, value)
        except RowFault as fault:
            yield fault.at(where, value)


def collect(items: Iterator[T | BadRow], path: Path) -> tuple[list[T], list[BadRow]]:
    """Read a file to the end; every row is in exactly one of the two lists.

    Raises:
        SourceError: the file cannot be opened or read.
    """
    used: list[T] = []
    bad: list[BadRow] = []
    with reading(path):
        for item in items:
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
        what, fix = f"cannot be read: {error.strerror or error}", "check the file's permissions"
        raise SourceError(what, where=str(path.absolute()), fix=fix) from None


# --------------------------------------------------------------------------- plain text


def _documents(file: SourceFile, separator: str) -> Iterator[Row | BadRow]:
    r"""Split plain text at the separator; line ends become \n, blank documents are skipped."""
    raw = file.path.read_bytes()
    if wrong := wrong_encoding(raw[:HEAD_BYTES]):
        yield wrong.at(f"{file.path}:1", raw)
        return
    raw = raw.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    if b"\n" not in raw:
        raw = raw.replace(b"\r", b"\n")
    if separator == "auto" and END_OF_TEXT.encode() in raw:
        separator = END_OF_TEXT
    pattern = _BLANK_LINES if separator == "auto" else re.compile(re.escape(separator.encode()))
    begin, line, counted = 0, 1, 0
    for end, following in [*(match.span() for match in pattern.finditer(raw)), (len(raw), len(raw))]:
        document = raw[begin:end].strip(b"\n")
        if document and not document.isspace():
            start = raw.index(document, begin)
            line, counted = line + raw.count(b"\n", counted, start), start
            yield _document(f"{file.path}", line, document)
        begin = following


def _document(path: str, line: int, document: bytes) -> Row | BadRow:
    try:
        text = document.decode()
    except UnicodeDecodeError as error:
        inside = document.count(b"\n", 0, error.start)
        what = f"byte 0x{document[error.start]:02x} at byte {error.start} of the document is not UTF-8"
        return RowFault("E_UTF8", what).at(f"{path}:{line + inside}", document[max(0, error.start - 30) :])
    if "\0" in text:
        inside = text.count("\n", 0, text.index("\0"))
        return RowFault("E_CTRL", "a NUL character in plain text").at(f"{path}:{line + inside}", text)
    return f"{path}:{line}", text


# --------------------------------------------------------------------------- parquet


def _parquet(file: SourceFile, fields: tuple[str, ...]) -> Iterator[Row | BadRow]:
    """Yield the rows of a parquet file as objects, numbered from 1, a thousand in memory at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(file.path) as table:
            present = table.schema_arrow.names
            if not set(fields) & set(present):
                yield missing(fields, present, "column").at(str(file.path))
                return
            columns = [name for name in (*fields, *OPTIONAL) if name in present]
            for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                for item in _batch_rows(batch):
                    row += 1
                    where = f"{file.path}:{row}"
                    yield item.at(where) if isinstance(item, RowFault) else (where, item)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        what = f"cannot be read after row {row}: {str(error).splitlines()[0][:200]}"
        yield RowFault("E_PARQUET", what).at(f"{file.path}:{row + 1}")


def _batch_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | RowFault]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # raised before any row is returned, so each is tried alone
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield RowFault("E_UTF8", f"byte 0x{error.object[error.start]:02x} of a string is not UTF-8")


# --------------------------------------------------------------------------- checks of one row


def missing(fields: tuple[str, ...], present: list[str], kind: str = "field") -> RowFault:
    """Return the fault of a row without any of `fields`."""
    wanted = " or ".join(f'"{name}"' for name in fields)
    names = ", ".join(f'"{name[:40]}"' for name in present[:20]) or "none"
    return RowFault("E_MISSING", f"no {kind} {wanted}; there is {names}")


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
    split, keywords = row.get("split"), row.get("keywords")
    if split not in (None, "train", "holdout"):
        raise RowFault("E_SPLIT", f'"split" is {split!r:.60}, expected "train" or "holdout"')
    group = row["group"] if row.get("group") is not None else row.get("fact")
    if group is not None and type(group) not in (str, int):
        raise RowFault("E_TYPE", f'"group" is {type_name(group)}, expected a string')
    if keywords is not None and not (isinstance(keywords, list) and all(isinstance(word, str) for word in keywords)):
        raise RowFault("E_TYPE", '"keywords" is not a list of strings')
    return split, "" if group is None else str(group), tuple(keywords or ())
