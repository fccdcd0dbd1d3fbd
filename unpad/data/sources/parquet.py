"""Rows of parquet files, a row group at a time; a row group that cannot be read costs its own rows only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unpad.data.sources.delimited import SAMPLE_ROWS, Advise
from unpad.data.sources.example import BadRow
from unpad.data.sources.fields import SpellingError, spelling
from unpad.data.sources.jsonlines import RowFault, missing, twice
from unpad.data.sources.parquet_file import GrowthError, ParquetRows, open_parquet

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

BATCH_ROWS = 1024


def read_parquet(
    path: Path, wanted: tuple[str, ...], optional: tuple[str, ...], advise: Advise | None = None
) -> Iterator[tuple[str, Any] | BadRow]:
    """Yield ("file:row", object) of every row, numbered from 1, or the bad row.

    Args:
        wanted: the file must have one of these columns; optional: further columns to read.
        advise: what to do about a file without any of `wanted`, from its first rows.
    """
    for item in read_batches(path, wanted, optional, BATCH_ROWS, advise):
        if isinstance(item, BadRow):
            yield item
            continue
        first, _, _, batch = item
        for index, row in enumerate(_rows(batch)):
            where = f"{path}:{first + index}"
            yield row.at(where) if isinstance(row, RowFault) else (where, row)


def read_batches(
    path: Path, wanted: tuple[str, ...], optional: tuple[str, ...], batch_rows: int, advise: Advise | None = None
) -> Iterator[tuple[int, int, int, pa.RecordBatch] | BadRow]:
    """Yield (number of the batch's first row in the file from 1, row group, its first row there from 0, batch).

    A file or a row group that cannot be read is one bad row with the number of rows that are lost with it.
    """
    import pyarrow as pa

    group = first = inside = 0  # number of the row group, rows of those before, rows of it that were read
    try:
        with open_parquet(path) as table:
            sizes = [table.metadata.row_group(index).num_rows for index in range(table.num_row_groups)]
            columns = _columns(table, wanted, optional)
            if isinstance(columns, RowFault):
                if advise and columns.code == "E_MISSING":
                    columns.fix = advise(_sample(path, table)) or columns.fix
                yield columns.at(str(path), num_rows=max(sum(sizes), 1))
                return
            bounded = ParquetRows(path, table, list(columns))
            for group, size in enumerate(sizes):
                inside = 0
                try:
                    for batch in bounded.batches(group, batch_rows):
                        yield first + inside + 1, group, inside, batch.rename_columns(list(columns.values()))
                        inside += batch.num_rows
                except (pa.ArrowException, GrowthError, OSError) as error:
                    fault = _unreadable(error, f"the last {size - inside:,} of {size:,} rows of row group {group}")
                    yield fault.at(f"{path}:{first + inside + 1}", num_rows=max(size - inside, 1))
                first += size
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        yield _unreadable(error, "it").at(f"{path}:1", num_rows=None)
    except UnicodeDecodeError as error:
        fault = RowFault("E_UTF8", f"byte 0x{error.object[error.start]:02x} of a column's name is not UTF-8")
        yield fault.at(str(path), num_rows=None)


def _columns(table: pq.ParquetFile, wanted: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, str] | RowFault:
    """Choose the columns to read, with the known name of each, or return the fault of the file's columns."""
    present = table.schema_arrow.names
    known = (*wanted, *optional)
    try:
        near = spelling(tuple(present), known)
    except SpellingError as error:
        return twice(error)
    meant = {near.get(name, name): name for name in present}
    if not set(wanted) & set(meant):
        return missing(wanted, present, "column")
    columns = {meant[name]: name for name in known if name in meant}
    again = next((name for name in columns if present.count(name) > 1), None)
    return columns if again is None else RowFault("E_DUPKEY", f'the column "{again}" occurs twice')


def column_named(table: pq.ParquetFile, name: str) -> str:
    """The column of an open file that is read under a known name."""
    columns = _columns(table, (name,), ())
    return name if isinstance(columns, RowFault) else next(iter(columns))


def _sample(path: Path, table: pq.ParquetFile) -> list[dict[str, Any]]:
    """First rows of a file with all columns, as far as they can be read; else a row of its columns' names."""
    import pyarrow as pa

    names = dict.fromkeys(table.schema_arrow.names, "")
    try:
        batch = next(ParquetRows(path, table, list(names)).batches(0, SAMPLE_ROWS), None)
        return [names, *(row for row in _rows(batch) if isinstance(row, dict))] if batch is not None else [names]
    except (pa.ArrowException, GrowthError, OSError):
        return [names]


def _unreadable(error: Exception, what: str) -> RowFault:
    return RowFault("E_PARQUET", f"{what} cannot be read: {str(error).splitlines()[0][:200]}")


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | RowFault]:
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):  # raised before any row is returned, so each is tried alone
        for index in range(batch.num_rows):
            row = one_row(batch, index)
            yield row


def one_row(batch: pa.RecordBatch, index: int) -> dict[str, Any] | RowFault:
    """Return a row of a batch as an object, or the fault of a cell that Python has no value for."""
    row = {}
    for name in batch.schema.names:
        column = batch.column(name)
        try:
            row[name] = column[index].as_py()
        except UnicodeDecodeError as error:
            return RowFault("E_UTF8", f"byte 0x{error.object[error.start]:02x} of a string is not UTF-8")
        except (ValueError, OverflowError):
            what = f'"{name}" holds a {column.type} that cannot be read'
            return RowFault("E_TYPE", what, "write the column as texts or whole numbers")
    return row
