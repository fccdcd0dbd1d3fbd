"""Parquet files: pages held against their checksums, and rows, a row group at a time.

A few bytes of a parquet file can stand for gigabytes: a dictionary of one long text that every row names, or pages that
are compressed zeros. What compresses far better than any data does was made to exhaust memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unpad.data.sources.delimited import SAMPLE_ROWS
from unpad.data.sources.example import BadRow
from unpad.data.sources.faults import RowFault, columns_of
from unpad.data.sources.fields import Advise
from unpad.data.sources.row import Row

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

MOST_FREE = 1 << 26  # bytes that the rows of any file may take
MOST_GROWTH = 1000  # times their bytes in the file, beyond that
ROW_BYTES = 50  # that a row takes at least, as an object
MOST_AT_ONCE = 1 << 27  # bytes of a batch
ROWS_PER_READ = 1 << 16


class GrowthError(Exception):
    """The rows of a file would take far more memory than the file has bytes."""


def open_parquet(path: Path | str, as_entries: Sequence[str] = ()) -> pq.ParquetFile:
    """Open a parquet file, and compare its pages with their checksums if it has any.

    Args:
        as_entries: columns of texts to read as numbers of entries of a dictionary.
    """
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, read_dictionary=list(as_entries), page_checksum_verification=True)


class ParquetRows:
    """Rows of an open parquet file, in batches of bounded size.

    Args:
        table: of `path`, opened.
        columns: to read; all others are skipped.
    """

    def __init__(self, path: Path, table: pq.ParquetFile, columns: Sequence[str]) -> None:
        self._path, self._table, self._columns = path, table, list(columns)
        self._in_file = path.stat().st_size
        # Sizes of row groups: a damaged footer ends the process at their columns, unless these were read.
        stated = sum(table.metadata.row_group(group).total_byte_size for group in range(table.num_row_groups))
        self._stated = max(stated, ROW_BYTES * table.metadata.num_rows)
        self._decoded = 0

    def batches(self, group: int, batch_rows: int = ROWS_PER_READ, *, threads: bool = True) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a row group.

        Args:
            batch_rows: most rows of a batch.
            threads: whether several columns are decoded at once.

        Raises:
            GrowthError: the rows outgrow the file by far; raised before they take the memory.
            OSError, pyarrow.ArrowException: they cannot be read, or are not as many as the file's footer says.
        """
        import pyarrow as pa

        self._refuse(self._stated)
        # A first row: pyarrow tells of a damaged footer there; elsewhere it ends the process for the same.
        next(self._table.iter_batches(1, [group], self._columns), None)
        repeated = [chunk.path_in_schema for chunk in self._chunks(group) if _repeats_texts(chunk)]
        longest = self._longest_entry(group, repeated) if repeated else 0
        rows = min(batch_rows, MOST_AT_ONCE // max(longest, 1)) or 1
        expected, num_rows = self._table.metadata.row_group(group).num_rows, 0
        for batch in self._table.iter_batches(rows, [group], self._columns, use_threads=threads):
            num_rows += batch.num_rows
            if num_rows > expected:
                break
            self._decoded += batch.nbytes + ROW_BYTES * batch.num_rows
            self._refuse(self._decoded)
            yield batch
        if num_rows != expected:
            raise pa.ArrowInvalid(f"a row group holds {num_rows:,} rows or more, and its footer says {expected:,}")

    def _chunks(self, group: int) -> list[pq.ColumnChunkMetaData]:
        row_group = self._table.metadata.row_group(group)
        chunks = [row_group.column(index) for index in range(row_group.num_columns)]
        return [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in self._columns]

    def _longest_entry(self, group: int, names: list[str]) -> int:
        """Bytes of the longest dictionary value in some columns; every row may repeat it."""
        import pyarrow as pa
        import pyarrow.compute as pc

        longest, waiting = 0, list[pa.Array]()
        with open_parquet(self._path, names) as table:
            for batch in table.iter_batches(1, [group], names):
                waiting += batch.columns
                break
        while waiting:
            array = waiting.pop()
            if pa.types.is_dictionary(array.type):
                longest = max(longest, pc.max(pc.binary_length(array.dictionary)).as_py() or 0)
            elif pa.types.is_struct(array.type):
                waiting += [array.field(index) for index in range(array.type.num_fields)]
            elif hasattr(array, "values"):  # a list or a map
                waiting.append(array.values)
        return longest

    def _refuse(self, num_bytes: int) -> None:
        if num_bytes > max(MOST_FREE, MOST_GROWTH * self._in_file):
            what = f"the rows would take {num_bytes:,} bytes of memory or more, over {MOST_GROWTH:,} times the"
            raise GrowthError(f"{what} {self._in_file:,} that they take in the file")


def _repeats_texts(chunk: pq.ColumnChunkMetaData) -> bool:
    """True if rows may name entries of a dictionary of texts, and copies of these would take much memory."""
    is_small = chunk.total_uncompressed_size * chunk.num_values <= MOST_FREE
    return chunk.physical_type == "BYTE_ARRAY" and chunk.has_dictionary_page and not is_small


BATCH_ROWS, BATCH_BYTES = 1024, 1 << 24  # that are rows of Python at once, about


def read_parquet(
    path: Path, wanted: tuple[str, ...], optional: tuple[str, ...], advise: Advise | None = None
) -> Iterator[Row | BadRow]:
    """Yield every row, numbered from 1, or the bad row; columns of bytes are left out unless they are known.

    A file or a row group that cannot be read is one bad row with the number of rows that are lost with it.

    Args:
        wanted: the file must have one of these columns; optional: others, also read under near spellings.
        advise: what to do about a file without any of `wanted`, from its first rows.
    """
    import pyarrow as pa

    group = first = inside = 0  # number of the row group, rows of those before, rows of it that were read
    try:
        with open_parquet(path) as table:
            sizes = [table.metadata.row_group(index).num_rows for index in range(table.num_row_groups)]
            try:
                columns = _columns(table, wanted, optional)
            except RowFault as wrong:
                if advise and wrong.code == "E_MISSING":
                    wrong.fix = advise(_sample(path, table)) or wrong.fix
                yield wrong.at(str(path), num_rows=max(sum(sizes), 1))
                return
            others = tuple(name for name in table.schema_arrow.names if name not in columns)
            bounded = ParquetRows(path, table, list(columns))
            for group, size in enumerate(sizes):
                inside, num_bytes = 0, table.metadata.row_group(group).total_byte_size
                try:
                    for rows in bounded.batches(group, min(BATCH_ROWS, BATCH_BYTES * size // max(num_bytes, 1)) or 1):
                        for row in _rows(rows.rename_columns(list(columns.values()))):
                            where = f"{path}:{first + inside + 1}"
                            place = group, inside
                            yield row.at(where) if isinstance(row, RowFault) else Row(where, row, others, place)
                            inside += 1
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


def _columns(table: pq.ParquetFile, wanted: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, str]:
    """Choose the columns to read, with the known name of each: the known ones first, and those that have no bytes.

    Raises:
        RowFault: none of them is wanted, or two could be the same.
    """
    columns = columns_of(table.schema_arrow.names, wanted, optional)
    known, of_bytes = (*wanted, *optional), {one.name for one in table.schema_arrow if "binary" in str(one.type)}
    rest = [column for name, column in columns.items() if name not in known and column not in of_bytes]
    return {columns[name]: name for name in known if name in columns} | {column: column for column in rest}


def column_named(table: pq.ParquetFile, name: str) -> str:
    """The column of an open file that is read under a known name."""
    with suppress(RowFault):
        return next(iter(_columns(table, (name,), ())))
    return name


def _sample(path: Path, table: pq.ParquetFile) -> list[dict[str, Any]]:
    """First rows of a file with all columns, as far as they can be read; else a row of its columns' names."""
    import pyarrow as pa

    names = dict.fromkeys(table.schema_arrow.names, "")
    with suppress(pa.ArrowException, GrowthError, OSError):
        for batch in ParquetRows(path, table, list(names)).batches(0, SAMPLE_ROWS):
            return [names, *(row for row in _rows(batch) if isinstance(row, dict))]
    return [names]


def _unreadable(error: Exception, what: str) -> RowFault:
    return RowFault("E_PARQUET", f"{what} cannot be read: {str(error).splitlines()[0][:200]}")


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | RowFault]:
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):  # raised before any row is returned, so each is tried alone
        yield from (_one_row(batch, index) for index in range(batch.num_rows))


def _one_row(batch: pa.RecordBatch, index: int) -> dict[str, Any] | RowFault:
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
