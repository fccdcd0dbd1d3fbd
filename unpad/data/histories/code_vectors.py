"""Vectors of codes, such as embeddings of their names: a table with a column `Key` and a column per dimension."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from unpad.data.histories import columns
from unpad.data.histories.columns import Faults
from unpad.data.histories.tables import TableFile, column_names, open_table
from unpad.errors import SourceError

KEY = "Key"


def read_vectors(path: Path, names: tuple[str, ...]) -> tuple[np.ndarray, list[str]]:
    """Read the vectors of these codes in this order, and list the codes without a vector.

    Returns:
        (num_codes, dim) float32, zeros for codes without a vector.

    Raises:
        SourceError: the table cannot be read, a vector has another width than the others, or a code has two.
    """
    file = TableFile(path, str(path))
    others = [name for name in column_names(path, file.shown) if name != KEY]
    if not others:
        what = f"E_WIDTH there is no column besides {KEY}"
        raise SourceError(what, where=file.shown, fix="write one column per dimension")
    table = open_table([file], {"code": (KEY,), **{f"at {name}": (name,) for name in others}}, (), "the table")
    if table.bad:
        row = table.bad[0]
        raise SourceError(f"E_WIDTH {row.what}", where=row.where, fix="write vectors of one width")
    faults = Faults(table)
    keys = columns.codes(table, faults).to_pylist()
    vectors = np.stack([columns.numbers(table, f"at {name}", faults) for name in others], 1)  # (num_rows, dim)
    faults.add(np.isnan(vectors).any(1), "E_WIDTH", f"the vector has fewer than {len(others)} numbers", "fill it in")
    seen: dict[str, int] = {}
    again = np.array([seen.setdefault(key, row) != row for row, key in enumerate(keys)], np.bool_)
    faults.add(again, "E_DUPKEY", "the code has a vector above", "leave one row per code")
    if faults.bad:
        worst = faults.bad[0]
        raise SourceError(f"{worst.code} {worst.what}", where=worst.where, fix=worst.fix)
    rows = np.array([seen.get(name, -1) for name in names], np.int64)
    ordered = np.zeros((len(names), len(others)), np.float32)
    ordered[rows >= 0] = vectors[rows[rows >= 0]]
    return ordered, [name for name, row in zip(names[1:], rows[1:].tolist(), strict=True) if row < 0]
