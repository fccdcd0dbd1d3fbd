"""Parquet files: pages held against their checksums, and rows that take no more memory than their file warrants.

A few bytes of a parquet file can stand for gigabytes: a dictionary of one long text that every row names, or pages that
are compressed zeros. What compresses far better than any data does was made to exhaust memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

MOST_FREE = 1 << 26  # bytes that the rows of any file may take
MOST_GROWTH = 1000  # times their bytes in the file, beyond that
ROW_BYTES = 50  # that a row takes at least, as an object
MOST_AT_ONCE = 1 << 27  # bytes of a batch
BATCH_ROWS = 1 << 16


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
        # Sizes of row groups: a damaged footer ends the process at their columns, unless these were read (`_probe`).
        stated = sum(table.metadata.row_group(group).total_byte_size for group in range(table.num_row_groups))
        self._stated = max(stated, ROW_BYTES * table.metadata.num_rows)
        self._decoded = 0

    def batches(self, group: int, batch_rows: int = BATCH_ROWS, *, threads: bool = True) -> Iterator[pa.RecordBatch]:
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
        self._probe(group)
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

    def _probe(self, group: int) -> None:
        """Read a first row, where pyarrow tells of a damaged footer; elsewhere it ends the process for the same."""
        for _ in self._table.iter_batches(1, [group], self._columns):
            break

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
