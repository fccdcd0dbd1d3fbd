"""Tables as parquet files, written as a whole."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unpad.storage.files import write_atomic

if TYPE_CHECKING:
    import pyarrow as pa


def write_parquet(out: Path, columns: "Mapping[str, Any] | pa.Table", *, private: bool = False) -> None:
    """Write columns, or a table of pyarrow, to a file, replacing an existing one.

    Raises:
        DiskError: it cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, sink = columns if isinstance(columns, pa.Table) else pa.table(dict(columns)), pa.BufferOutputStream()
    pq.write_table(table, sink)
    write_atomic(out, sink.getvalue().to_pybytes(), private=private)
