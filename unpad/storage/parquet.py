"""Tables as parquet files, written as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unpad.errors import RecipeError
from unpad.storage.files import write_atomic

if TYPE_CHECKING:
    import pyarrow as pa

NOT_PARQUET = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".npy", ".npz", ".xlsx")  # other names are the user's choice


def refuse_other_name(out: Path) -> None:
    """Refuse a name that promises another format.

    Raises:
        RecipeError: the name ends so.
    """
    if out.suffix.lower() in NOT_PARQUET:
        raise RecipeError("the file will be parquet", where=str(out), fix=f"name it {out.with_suffix('.parquet').name}")


def write_parquet(out: Path, columns: Mapping[str, Any] | pa.Table, *, private: bool = False) -> None:
    """Write columns, or a table of pyarrow, to a file, replacing an existing one.

    Raises:
        DiskError: it cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, sink = columns if isinstance(columns, pa.Table) else pa.table(dict(columns)), pa.BufferOutputStream()
    pq.write_table(table, sink)
    write_atomic(out, sink.getvalue().to_pybytes(), private=private)
