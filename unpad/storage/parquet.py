"""Tables as files of parquet, CSV or JSON lines, written as a whole."""

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unpad.errors import RecipeError
from unpad.storage.disk import disk_errors
from unpad.storage.files import write_atomic
from unpad.storage.paths import refuse_format
from unpad.storage.strict_json import finite
from unpad.terminal.table import csv_text

if TYPE_CHECKING:
    import pyarrow as pa


def check_file(out: Path, *formats: str) -> None:
    """Refuse a file for rows before the work that they take.

    Args:
        formats: suffixes that it may have, the usual one first.

    Raises:
        RecipeError: its name promises another format, or it is a folder.
        DiskError: its folder is missing or closed.
    """
    refuse_format(out, *formats)
    if out.is_dir():
        fix = f"name a file, such as rows{formats[0]}"
        raise RecipeError("the file for the rows is a folder", where=str(out), fix=fix)
    with disk_errors(out):
        if not out.parent.is_dir():
            raise OSError(errno.ENOENT, "")
        if not os.access(out.parent, os.W_OK):
            raise OSError(errno.EACCES, "")


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


def write_table(out: Path, rows: Sequence[Mapping[str, Any]], *, private: bool = False) -> None:
    """Write rows as CSV, JSON lines or parquet, by the name of the file, replacing an existing one.

    In CSV the parts of a list are joined; a column of parquet with values of several kinds has texts, of JSON.

    Raises:
        DiskError: it cannot be written.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    if out.suffix.lower() == ".csv":
        text = csv_text(names, ([_cell(row.get(name)) for name in names] for row in rows))
        write_atomic(out, text, private=private)
    elif out.suffix.lower() == ".jsonl":
        lines = (json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        write_atomic(out, "".join(lines), private=private)
    else:
        write_parquet(out, {name: _column([row.get(name) for row in rows]) for name in names}, private=private)


def _cell(value: Any) -> Any:
    return "; ".join(map(str, value)) if isinstance(value, list) else value


def _column(values: list[Any]) -> "pa.Array":
    import pyarrow as pa

    try:
        return pa.array(values)
    except pa.ArrowException:
        return pa.array([value if isinstance(value, str | None) else json.dumps(value) for value in values])
