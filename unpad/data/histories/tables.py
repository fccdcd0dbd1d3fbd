"""Tables in parquet or CSV as columns, with the place of every row.

Messages never contain a patient's id: they name a row by its file and number, a patient by `alias`, and a file that is
named after a patient by its number in its folder.
"""

import hmac
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from unpad.data.sources.delimited import NOT_UTF8, csv_records
from unpad.data.sources.example import LOUD, BadRow, Unread
from unpad.data.sources.faults import RowFault, there_is, twice
from unpad.data.sources.fields import EVENT_LIKE, SpellingError, folded, looks_like_data, spelling
from unpad.data.sources.files import refuse_special, unreadable
from unpad.data.sources.parquet import GrowthError, ParquetRows, open_parquet
from unpad.data.sources.row import UNSEEN
from unpad.data.sources.split import Split
from unpad.data.sources.unread import count_field, tells_of_events
from unpad.errors import SourceError, nearest
from unpad.terminal.progress import counted

CELLS_AT_ONCE = 1 << 18  # of CSV, that become arrays together


_names_key = secrets.token_bytes(32)  # of this process; not a ContextVar, as readers are threads


def alias(patient: str, key: bytes | None = None) -> str:
    """Pseudonym of a patient in messages: the first ten digits of the id's HMAC-SHA256.

    Without the key nobody can find the id by trying all numbers, as with a plain hash.

    Args:
        key: default the key of `named_by`, and outside of it one of this process.
    """
    return hmac.new(key or _names_key, patient.encode(), "sha256").hexdigest()[:10]


def names_key() -> bytes:
    """Key of pseudonyms in use: that of `named_by`, or a random one of this process, which a run begun here keeps."""
    return _names_key


@contextmanager
def named_by(key: bytes) -> Iterator[None]:
    """Use a run's key for all pseudonyms inside."""
    global _names_key
    before, _names_key = _names_key, key
    try:
        yield
    finally:
        _names_key = before


@dataclass(frozen=True, slots=True)
class TableFile:
    """One file of a table.

    Args:
        shown: name in messages: the path, or, for files named after patients, folder[n], the n-th file there in
            natural order from 0.
        owner: id of the patient of the whole file; None if a column has the ids.
        split: `Split` that its folder declares.
    """

    path: Path
    shown: str
    owner: str | None = None
    split: int = Split.UNDECLARED


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of all files of a table, end to end.

    Args:
        columns: by their requested names; optional ones may be absent.
        names: name of each column in the first file that has it.
        file_of: (num_rows,) int32, index into `files`.
        row: (num_rows,) int64, rows of parquet counted from 1, or lines of CSV.
        bad: lines of CSV that are not rows.
        unread: the other columns.
    """

    columns: pa.Table
    names: dict[str, str]
    files: list[TableFile]
    file_of: np.ndarray
    row: np.ndarray
    bad: list[BadRow]
    unread: Unread

    def __len__(self) -> int:
        return len(self.row)

    def has(self, name: str) -> bool:
        return name in self.columns.column_names

    def column(self, name: str) -> pa.Array:
        """Return a column as one array, with its texts as plain strings."""
        array = self.columns.column(name).combine_chunks()
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        is_text = pa.types.is_large_string(array.type) or pa.types.is_string_view(array.type)
        return array.cast(pa.string()) if is_text else array

    def where(self, index: int) -> str:
        return f"{self.files[self.file_of[index]].shown}:{self.row[index]}"


def open_table(
    files: Sequence[TableFile],
    wanted: Mapping[str, Sequence[str]],
    optional: Collection[str] = (),
    key: str = "the recipe",
    fields: Mapping[str, str] | None = None,
) -> Table:
    """Read the columns of a table's files.

    Args:
        wanted: requested name of a column -> the names that it may have in a file, best first.
        optional: columns that a file may lack.
        key: place in the recipe where the name of a column is set, for messages.
        fields: requested name of a column -> the field there that names it, where it has another name.

    Raises:
        SourceError: a file cannot be read, lacks a column or has it twice, or files differ in the type of a column.
    """
    read_file = partial(_read, partial(_choose, wanted, optional, key, fields or {}), len(files) == 1)
    with ThreadPoolExecutor() as pool:
        each = pool.map(read_file, files) if files[1:] else map(read_file, files)
        read = list(counted(each, "reading tables", len(files), "files"))
    parts = [columns for columns, *_ in read]
    try:
        joined = pa.concat_tables(parts, promote_options="permissive").combine_chunks()
    except pa.ArrowException:
        raise _type_differs(parts, files) from None
    return Table(
        columns=joined,
        names={name: column for _, names, *_ in reversed(read) for name, column in names.items()},
        files=list(files),
        file_of=np.repeat(np.arange(len(parts), dtype=np.int32), [part.num_rows for part in parts]),
        row=np.concatenate([np.zeros(0, np.int64), *(rows for _, _, rows, _, _ in read)]),
        bad=[row for _, _, _, bad, _ in read for row in bad],
        unread=Unread.of([unread for *_, unread in read], files=False),
    )


def column_names(path: Path, shown: str) -> list[str]:
    """Read the names of a file's columns.

    Raises:
        SourceError: it cannot be read.
    """
    refuse_special(path, shown)
    if _is_parquet(path):
        return list(_parquet(path, shown, lambda file: file.schema_arrow.names))
    return _open_csv(path, shown)[0]


def _read(
    choose: Callable[[list[str], str], dict[str, str]], alone: bool, file: TableFile
) -> tuple[pa.Table, dict[str, str], np.ndarray, list[BadRow], Unread]:
    """Read one file: its columns, their names there, the numbers of its rows, lines that are not rows, and the others.

    Args:
        choose: from the columns of a file, and its name in messages, to those that are read, by their requested names.
        alone: whether only this file is read at the time.
    """
    refuse_special(file.path, file.shown)
    if not _is_parquet(file.path):
        present, records = _open_csv(file.path, file.shown)
        names = choose(present, file.shown)
        return _csv_columns(file, present, records, names)

    def get(table: pq.ParquetFile) -> tuple[dict[str, str], pa.Table]:
        names = choose(table.schema_arrow.names, file.shown)
        columns = list(dict.fromkeys(names.values()))
        others = [field.name for field in table.schema_arrow if field.name not in columns and _is_plain(field.type)]
        bounded, groups = ParquetRows(file.path, table, [*columns, *others]), range(table.num_row_groups)
        batches = []
        for batch in (batch for group in groups for batch in bounded.batches(group, threads=alone)):
            named = zip(batch.schema.names, batch.columns, strict=True)
            _count(unread, {name: _values(column) for name, column in named if name in others}, "time" in names)
            batches.append(batch.select(columns))
        unread.num_rows = table.metadata.num_rows
        unseen = {*table.schema_arrow.names} - {*columns, *others}
        _count(unread, {name: {UNSEEN: unread.num_rows} for name in unseen})
        none = pa.schema([table.schema_arrow.field(name) for name in columns])
        return names, pa.Table.from_batches(batches, batches[0].schema if batches else none)

    unread = Unread()
    names, columns = _parquet(file.path, file.shown, get)
    chosen = pa.table({name: columns.column(column) for name, column in names.items()})
    return chosen, names, np.arange(1, columns.num_rows + 1), [], unread


def _is_plain(kind: pa.DataType) -> bool:
    """Whether a column of a type that nobody asks for is looked at, which lists, objects and bytes are not."""
    return not (pa.types.is_nested(kind) or "binary" in str(kind))


def _values(column: pa.Array) -> Mapping[Any, int]:
    """Values of a column that nobody asks for -> their rows; of numbers the least, without rows, and the most."""
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        ends = pc.min_max(column)
        return {ends["min"].as_py(): 0, ends["max"].as_py(): len(column) - column.null_count}
    column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    texts = column.drop_null().cast(pa.string()).cast(pa.binary()).to_pylist()  # which may not be UTF-8
    return Counter(text.decode(errors="replace") for text in texts)


def _count(unread: Unread, columns: Mapping[str, Mapping[Any, int]], timed: bool = False) -> None:
    """Count the values of columns that nobody asks for; of events with a time, kinds and values are no metadata."""
    for name, values in columns.items():
        for value, num_rows in values.items():
            count_field(unread, name, value, num_rows=num_rows)
        if timed and tells_of_events(name, values):
            unread.add(name, 0, {LOUD})


def _choose(
    wanted: Mapping[str, Sequence[str]], optional: Collection[str], key: str, fields: Mapping[str, str],
    present: list[str], shown: str,
) -> dict[str, str]:  # fmt: skip
    """Map requested names to the columns of a file."""
    names = {}
    for name, candidates in wanted.items():
        column = _column_of(present, candidates, shown)
        if column is not None:
            names[name] = column
            if present.count(column) > 1:
                what = f'E_DUPKEY the column "{column}" occurs twice'
                raise SourceError(what, where=shown, fix="keep one of the two")
        elif name not in optional:
            sought = " or ".join(f'"{candidate}"' for candidate in candidates)
            fix = f"name yours with `{fields.get(name, name)}:` in {key}; {_near(name, candidates[0], present)}"
            raise SourceError(f"E_MISSING no column {sought}; {there_is(present)}", where=shown, fix=fix)
    return names


def _column_of(present: list[str], candidates: Sequence[str], shown: str) -> str | None:
    """The column of the first of some names, or else one of another spelling, such as `Patient ID` for `patient_id`.

    Raises:
        SourceError: two columns could be the one.
    """
    for candidate in candidates:
        if candidate in present:
            return candidate
    try:
        near = spelling(tuple(present), tuple(candidates))
    except SpellingError as error:
        fault = twice(error)
        raise SourceError(f"{fault.code} {fault.what}", where=shown, fix=fault.fix) from None
    return min(near, key=lambda name: list(candidates).index(near[name]), default=None)


def _near(name: str, sought: str, present: list[str]) -> str:
    """Hint at the columns with names like the one that is sought, or with a usual one of such columns."""
    if looks_like_data(present):
        return "begin the file with a line of names for its columns"
    usual = [column for column in present if folded(column) in EVENT_LIKE.get(name, ())]
    if name in ("code", "value") and not usual and len(present) > 4:
        return "or, where each measurement has a column, write a row for each, as pandas.melt does"
    return f"did you mean {' or '.join(usual)}?" if usual else nearest(sought, present)


def _type_differs(parts: list[pa.Table], files: Sequence[TableFile]) -> SourceError:
    """Name the first file with another type of a column than a file before it."""
    first: dict[str, tuple[pa.DataType, str]] = {}
    for part, file in zip(parts, files, strict=True):
        for field in part.schema:
            kind, shown = first.setdefault(field.name, (field.type, file.shown))
            if field.type != kind:
                what = f'E_TYPE the column "{field.name}" holds {field.type}, that of {shown} {kind}'
                return SourceError(what, where=file.shown, fix="write both files with one type")
    raise AssertionError("tables of equal types can be joined")


# --------------------------------------------------------------------------- parquet


def _is_parquet(path: Path) -> bool:
    if path.suffix.lower() in (".csv", ".tsv"):
        return False
    try:
        with path.open("rb") as handle:
            return path.suffix.lower() == ".parquet" or handle.read(4) == b"PAR1"
    except OSError:
        return True  # reading the file reports the fault


def _parquet(path: Path, shown: str, get: Callable[[pq.ParquetFile], Any]) -> Any:
    try:
        with open_parquet(path) as file:
            return get(file)
    except UnicodeDecodeError:
        what = "E_UTF8 the name of a column is not UTF-8"
    except GrowthError as error:
        what = f"E_PARQUET {error}"
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.strerror:
            raise unreadable(error, shown) from None
        # The message of pyarrow may contain the path, which may contain a patient's id.
        what = "E_PARQUET it is not a whole parquet file"
    raise SourceError(what, where=shown, fix="write the file again")


# --------------------------------------------------------------------------- CSV


def _open_csv(path: Path, shown: str) -> tuple[list[str], Iterator[tuple[int, list[str], int]]]:
    """Open a CSV file: the names of its columns, and its further records as of `csv_records`."""
    records = csv_records(path)
    try:
        return next(records)[1], records
    except OSError as error:
        raise unreadable(error, shown) from None
    except RowFault as fault:
        raise SourceError(f"{fault.code} {fault.what}", where=f"{shown}:1", fix=fault.fix) from None


def _not_utf8(match: re.Match[str], where: str) -> SourceError:
    byte = ord(match[0]) - 0xDC00
    return SourceError(f"E_UTF8 byte 0x{byte:02x} is not UTF-8", where=where, fix="save the file as UTF-8")


def _csv_columns(
    file: TableFile, present: list[str], records: Iterator[tuple[int, list[str], int]], names: dict[str, str]
) -> tuple[pa.Table, dict[str, str], np.ndarray, list[BadRow], Unread]:
    """Read the columns of a CSV file as texts; a line with too few or too many fields is a bad row."""
    if match := NOT_UTF8.search("".join(present)):
        raise _not_utf8(match, f"{file.shown}:1")
    lines, bad, parts, width = list[int](), list[BadRow](), list[pa.Table](), len(present)
    places, schema = [present.index(column) for column in names.values()], pa.schema(dict.fromkeys(names, pa.string()))
    others, unread = {name: at for at, name in enumerate(present) if name not in names.values()}, Unread()
    cells = list[str]()  # of some rows, end to end: texts alone keep the collector of garbage out

    def close() -> None:
        try:
            parts.append(pa.table([pa.array(cells[place::width], pa.string()) for place in places], schema=schema))
        except UnicodeEncodeError:
            at, match = next((at, match) for at, cell in enumerate(cells) if (match := NOT_UTF8.search(cell)))
            raise _not_utf8(match, f"{file.shown}:{lines[at // width - len(cells) // width]}") from None
        _count(unread, {name: Counter(cells[place::width]) for name, place in others.items()}, "time" in names)
        cells.clear()

    for line, row, num_lines in records:
        if len(row) == width:
            if any(row):  # a line of delimiters alone is none
                cells += row
                lines.append(line)
        elif row:
            what = f"the line has {len(row)} fields, the header {width}"
            bad.append(BadRow(f"{file.shown}:{line}", "E_CSV", what, "quote fields that hold the delimiter"))
        else:
            what = f"E_CSV a quote does not end well; it would take along {num_lines} lines"
            fix = "end it, and double quotes inside of quotes"
            raise SourceError(what, where=f"{file.shown}:{line}", fix=fix)
        if len(cells) >= CELLS_AT_ONCE:
            close()
    close()
    unread.num_rows = len(lines)
    return pa.concat_tables(parts), names, np.array(lines, np.int64), bad, unread
