"""Tables as CSV text with no cell that a spreadsheet would run as a formula."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a cell that begins so is a formula in Excel and LibreOffice


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows of cells as CSV; an apostrophe in front of a text that would be a formula makes it plain text.

    Numbers are written with all digits, as in JSON, and None as an empty cell.
    """
    return "".join(_line([f"'{cell}" if _is_formula(cell) else cell for cell in row]) for row in (head, *rows))


def _line(cells: Sequence[Any]) -> str:
    out = io.StringIO()
    csv.writer(out).writerow(cells)  # with its "\r\n" at the end, for which it quotes cells with either
    return out.getvalue().removesuffix("\r\n") + "\n"


def _is_formula(cell: Any) -> bool:
    """True for a text that begins like a formula and is no number."""
    if not isinstance(cell, str) or not cell.startswith(FORMULA):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return not cell.isprintable()  # such as "\t1", which float reads
