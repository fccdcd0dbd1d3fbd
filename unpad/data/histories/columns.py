"""Columns of a table as ids, codes, words and numbers, with every row that cannot be read; `times.py` reads times."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unpad.data.histories.tables import Table, alias
from unpad.data.sources.example import BadRow
from unpad.errors import SourceError

MOST = 1e30  # larger numbers measure nothing, and their squares would not fit
NOTHING = ("", "NA", "N/A", "null", "NULL", "None")  # CSV spellings of a missing number

# RE2, as pyarrow has it.
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_NONFINITE = r"^[+-]?(?i:nan|inf|infinity)$"
_ODD = "[\uff10-\uff19\uff0e\uff0d\u200b\u2060\ufeff]"  # full-width digits, point and minus; characters without width

# Results in words, which messages may show because they identify nobody.
RESULTS = (
    r"(?i:neg(ative)?|pos(itive)?|(ab)?normal|(not )?detected|(non[- ]?)?reactive|trace|present|absent|true|false|yes"
    r"|no|high|low|[+-]{1,4})"
)
MOST_WORD = 40  # characters of a word that becomes a part of a code


Explain = Callable[[int], tuple[str, str]]  # row -> what is wrong, what to do


class Faults:
    """Rows of a table that cannot be used; only the first fault of a row is reported.

    Attributes:
        good: (num_rows,) bool, rows without a fault so far.
        ids: id of the patient of every row, once they are known.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.good = np.ones(len(table), np.bool_)
        self.ids: pa.Array | None = None
        self._found: list[tuple[int, BadRow]] = []

    def add(self, wrong: np.ndarray, code: str, what: str | Explain, fix: str = "") -> None:
        """Refuse rows.

        Args:
            wrong: (num_rows,) bool.
            what: fault of all of them, or a function from the row to the fault and the fix.
        """
        for index in np.flatnonzero(wrong & self.good).tolist():
            message, remedy = (what, fix) if isinstance(what, str) else what(index)
            message = f"patient {alias(self.ids[index].as_py())}: {message}" if self.ids is not None else message
            self._found.append((index, BadRow(self.table.where(index), code, message, remedy)))
        self.good &= ~wrong

    @property
    def bad(self) -> list[BadRow]:
        """All bad rows, in the order of the table."""
        return [*self.table.bad, *(row for _, row in sorted(self._found, key=lambda entry: entry[0]))]


def ids(table: Table, faults: Faults) -> tuple[pa.Array, bool]:
    """Read the patient's id of every row.

    Whole numbers are ids in their usual form, whatever their type: 7, 7.0 and "7" are one patient, "007" is another.

    Returns:
        Ids as strings, never null, and whether all of them were whole numbers of a numeric column.

    Raises:
        SourceError: the column holds a value that cannot be an id.
    """
    if not table.has("id"):
        owners = pa.array([file.owner or "" for file in table.files], pa.string())
        return owners.take(pa.array(table.file_of)), False
    column = table.column("id")
    faults.add(~valid(column), "E_NULL", "there is no id", "fill it in or remove the row")
    if pa.types.is_floating(column.type):
        values = np.asarray(column.fill_null(0).cast(pa.float64()))
        whole = np.isfinite(values) & (values == np.floor(values)) & (np.abs(values) < 2**53)
        faults.add(~whole, "E_ID", "the id is not a whole number", "write ids as whole numbers or as texts")
        return pa.array(np.where(whole, values, 0).astype(np.int64)).cast(pa.string()), True
    if pa.types.is_integer(column.type):
        return column.fill_null(0).cast(pa.string()), True
    if not pa.types.is_string(column.type):
        raise wrong_type(table, "id", column.type, "whole numbers or texts")
    column = utf8(column, faults).fill_null("")
    faults.add(_equal(column, ""), "E_NULL", "there is no id", "fill it in or remove the row")
    spaced = ~_equal(column, pc.utf8_trim_whitespace(column)) | matches(column, _ODD)
    fix = "write the id as in the other tables, in plain digits or letters"
    faults.add(spaced, "E_ID", "the id has white space or full-width digits", fix)
    return pc.replace_substring_regex(column, r"^(-?\d+)\.0$", r"\1"), False


def are_whole(ids: pa.Array) -> bool:
    """Check that all ids, strings, are whole numbers in their usual form that fit int64; "007" is not."""
    try:
        return bool(ids.cast(pa.int64()).cast(pa.string()).equals(ids))
    except pa.ArrowInvalid:
        return False


def codes(table: Table, faults: Faults) -> pa.Array:
    """Read the code of every event, as strings, never null.

    Raises:
        SourceError: the column holds neither texts nor whole numbers.
    """
    column = table.column("code")
    if pa.types.is_floating(column.type):  # whole numbers in a column with empty rows
        values = np.asarray(column.cast(pa.float64(), safe=False).fill_null(0))
        if np.array_equal(values, np.floor(values)) and np.abs(values).max(initial=0) < 2**53:
            column = column.cast(pa.int64())
    if pa.types.is_integer(column.type):
        column = column.cast(pa.string())
    if not pa.types.is_string(column.type):
        raise wrong_type(table, "code", column.type, "texts or whole numbers")
    fix = "fill in the code or remove the row"
    faults.add(~valid(column), "E_NULL", "the code is null", fix)
    column = utf8(column, faults).fill_null("")
    faults.add(_equal(pc.utf8_trim_whitespace(column), ""), "E_EMPTY", "the code is blank", fix)
    return column


def numbers(
    table: Table,
    name: str,
    faults: Faults,
    expected: str = "a number",
    truths: bool = False,
    words: pa.Array | None = None,
) -> np.ndarray:
    """Read a column of numbers, (num_rows,) float64; nan for empty rows.

    Args:
        expected: what messages ask for in place of a text that cannot be read as a number.
        truths: whether the texts True and False, in any case, are 1 and 0.
        words: (num_rows,) strings, texts that are no numbers and are read elsewhere; nan here.

    Raises:
        SourceError: the column holds no numbers.
    """
    column = table.column(name)
    if pa.types.is_null(column.type):
        return np.full(len(column), np.nan)
    if pa.types.is_string(column.type):
        if truths:
            for word, digit in (("true", "1"), ("false", "0")):
                column = pc.replace_substring_regex(column, f"^(?i:{word})$", digit)
        if words is not None:
            column = pc.if_else(pa.array(valid(words)), None, column)
        return _from_text(column, table.names[name], faults, expected)
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise wrong_type(table, name, kind, "numbers")
    present = valid(column)
    values = np.asarray(column.cast(pa.float64(), safe=False).fill_null(np.nan))
    _refuse_nonfinite(present & ~np.isfinite(values), table.names[name], faults)
    _refuse_huge(values, table.names[name], faults)
    return values


def words(table: Table, name: str, faults: Faults) -> pa.Array:
    """Read the texts of a column that are no numbers, as strings; null for numbers, empty rows, and in other columns.

    Texts too long for a code, such as notes, are faults.
    """
    column = table.column(name)
    if not pa.types.is_string(column.type):
        return pa.nulls(len(column), pa.string())
    column = pc.utf8_trim_whitespace(utf8(column, faults))
    nothing = np.asarray(pc.is_in(column, pa.array(NOTHING))) | ~valid(column)
    number = matches(column, _NUMBER) | matches(column, _NONFINITE)
    texts = pc.if_else(pa.array(nothing | number), None, column)
    long = np.asarray(pc.fill_null(pc.greater(pc.utf8_length(texts), MOST_WORD), False))
    what = f'"{table.names[name]}" is a text of more than {MOST_WORD} characters, too long for a code'
    faults.add(long, "E_TYPE", what, "shorten it, or set words: skip on this item of data.events")
    return texts


def categories(table: Table, name: str, faults: Faults) -> pa.Array | None:
    """Read a column of words or truth values as strings, null for empty rows; None for a column of numbers."""
    column = table.column(name)
    if pa.types.is_boolean(column.type):
        return column.cast(pa.string())
    if not pa.types.is_string(column.type):
        return None
    column = utf8(column, faults)
    empty = np.asarray(pc.is_in(column, pa.array(NOTHING))) | ~valid(column)
    if (matches(column, _NUMBER) | empty).all():
        return None  # CSV has numbers as texts
    return pc.if_else(pa.array(empty), None, column)


# --------------------------------------------------------------------------- texts that mean numbers


def _from_text(column: pa.Array, shown: str, faults: Faults, expected: str) -> np.ndarray:
    """Parse the texts of a CSV column as numbers."""
    column = utf8(column, faults)
    empty = np.asarray(pc.is_in(column, pa.array(NOTHING))) | ~valid(column)
    _refuse_nonfinite(matches(column, _NONFINITE), shown, faults)
    good = matches(column, _NUMBER)

    def explain(index: int) -> tuple[str, str]:
        what, fix = _no_number(column[index].as_py(), expected)
        return f'"{shown}" {what}', fix

    faults.add(~(good | empty), "E_TYPE", explain)
    values = np.asarray(pc.if_else(pa.array(good), column, None).cast(pa.float64()).fill_null(np.nan))
    _refuse_huge(values, shown, faults)
    return values


def _no_number(text: str, expected: str) -> tuple[str, str]:
    """Describe why a text is not a number, and the fix; show only texts that cannot identify a patient."""
    if re.search(_ODD, text):
        return "is written with full-width digits or characters without width", "write it in plain digits"
    if text != text.strip():
        return "has white space around it", "remove the white space"
    if re.fullmatch(r"[<>≤≥=]{1,2}\s?[\d.,]{1,12}", text):
        return (
            f'is the limit "{text}"',
            "write a number, such as half the limit, or give such results a code of their own",
        )
    if expected == "a number" and re.fullmatch(RESULTS, text):
        fix = "set words: code on this item of data.events, which makes the word a part of the code, or write a number"
        return f'is the word "{text}", expected {expected}', fix
    if re.fullmatch(r"-?\d{1,9},\d{1,9}", text):
        return f'has a decimal comma: "{text}"', "write a point"
    return f"is a text of {len(text)} characters, expected {expected}", f"write {expected}, or leave it empty"


def _refuse_nonfinite(wrong: np.ndarray, shown: str, faults: Faults) -> None:
    faults.add(wrong, "E_NONFINITE", f'"{shown}" is not finite', "leave it empty where there is no number")


def _refuse_huge(values: np.ndarray, shown: str, faults: Faults) -> None:
    faults.add(
        np.abs(np.nan_to_num(values, posinf=0, neginf=0)) > MOST,
        "E_RANGE",
        f'"{shown}" is beyond {MOST:g}',
        "leave it empty, or give it in another unit",
    )


# --------------------------------------------------------------------------- arrays


def valid(column: pa.Array) -> np.ndarray:
    return np.asarray(pc.is_valid(column))


def _equal(column: pa.Array, other: object) -> np.ndarray:
    return np.asarray(pc.fill_null(pc.equal(column, other), False))


def matches(column: pa.Array, pattern: str) -> np.ndarray:
    return np.asarray(pc.fill_null(pc.match_substring_regex(column, pattern), False))


def utf8(column: pa.Array, faults: Faults) -> pa.Array:
    """Replace texts that are not UTF-8, which parquet does not check, by null."""
    if is_utf8(column):
        return column
    texts = column.cast(pa.binary()).to_pylist()
    broken = np.array([text is not None and not _decodes(text) for text in texts], np.bool_)
    faults.add(broken, "E_UTF8", "a text is not UTF-8", "save it as UTF-8")
    good = [None if wrong else text for wrong, text in zip(broken.tolist(), texts, strict=True)]
    return pa.array(good, pa.binary()).cast(pa.string())


def is_utf8(column: pa.Array) -> bool:
    """Check that all texts of a column are UTF-8."""
    try:
        column.validate(full=True)
        return True
    except pa.ArrowInvalid:
        return False


def _decodes(text: bytes) -> bool:
    try:
        return bool(text.decode()) or True
    except UnicodeDecodeError:
        return False


def wrong_type(table: Table, name: str, kind: pa.DataType, expected: str) -> SourceError:
    what = f'E_TYPE the column "{table.names[name]}" holds {kind}, expected {expected}'
    return SourceError(what, where=table.files[0].shown, fix="name another column, or write it again")
