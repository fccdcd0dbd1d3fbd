"""Columns of a table as ids, codes, words, numbers and times in days, with every row that cannot be read."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unpad.data.histories.tables import Table, alias
from unpad.data.sources.example import BadRow
from unpad.data.sources.fields import is_date_like, layout_advice, parse
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


# Divisors rather than factors, so that 90 minutes and 1.5 hours are the same number of days.
PER_DAY = {"minutes": 1440.0, "hours": 24.0, "days": 1.0}
# By the name of a column.
UNITS = {"minute": "minutes", "hour": "hours", "day": "days", **{unit: unit for unit in PER_DAY}}
MOST_DAYS = 73_050  # 200 years: no history is longer, and seconds since 1970 taken for minutes are
MICROSECONDS = 86_400e6  # of a day
# RE2, as pyarrow has it.
_ZONE = r"[+-]\d{2}:?\d{2}$"
_DATE = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?([+-]\d{2}:?\d{2})?)?Z?$"
_PLAIN = r"^-?\d*\.?\d*$"
_CLOCK = r"^\d{1,2}:\d{2}(:\d{2})?$"
# Years outside are placeholders such as 9999-12-31; shifted dates of published hospital data are inside.
FIRST_YEAR, LAST_YEAR = 1800, 2299
_SECONDS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # units of a timestamp per second


def times(table: Table, name: str, unit: str, faults: Faults, layout: str | None = None) -> np.ndarray:
    """Read a column of times in days, of its own clock or since 1970 for timestamps, (num_rows,) float64; nan for null.

    Args:
        unit: minutes, hours, days or timestamp.
        layout: of timestamps in texts, in the letters of strptime; None for that of ISO 8601.

    Raises:
        SourceError: the column holds timestamps and the unit is another, or the other way round.
    """
    column = table.column(name)
    shown = table.names[name]
    if pa.types.is_null(column.type):
        return np.full(len(column), np.nan)
    if unit == "timestamp":
        return _timestamps(column, table, name, faults, layout)
    if _is_calendar(column.type):
        what = f'E_UNIT the column "{shown}" holds timestamps, expected {unit}'
        raise SourceError(what, where=table.files[0].shown, fix="set unit: timestamp for this table")
    if pa.types.is_string(column.type):
        dated = matches(column, _DATE) | matches(column, _CLOCK) | _are_date_like(column)
        advice = layout_advice(_texts(column)) if dated.any() else ""
        fix = f"write the {unit} as a number, or set {advice or 'unit: timestamp'} where all are dates"
        faults.add(dated, "E_UNIT", f'"{shown}" is a date or a time of day, expected {unit}', fix)
    days = numbers(table, name, faults) / PER_DAY[unit]
    far = np.abs(np.nan_to_num(days)) > MOST_DAYS
    what = f'"{shown}" is more than 200 years, counted in {unit}'
    faults.add(
        far, "E_UNIT", what, "set the unit that the column has; seconds since 1970 are to be written as timestamps"
    )
    return days


def unit_of(table: Table, name: str, asked: str, layout: str | None = None) -> str:
    """Return the unit of a column of times: the requested one, or else by its type or its name.

    Args:
        layout: of timestamps in texts, if the recipe says it.

    Raises:
        SourceError: the unit is unknown.
    """
    if asked != "auto" or layout is not None:
        return "timestamp" if layout is not None else asked
    column, shown = table.column(name), table.names[name]
    if _is_calendar(column.type):
        return "timestamp"
    if pa.types.is_string(column.type):
        said = column.filter(pc.fill_null(pc.not_equal(column, ""), False))
        if len(said) and matches(said.slice(0, 1), _DATE)[0]:
            return "timestamp"
    if shown.lower() in UNITS:
        return UNITS[shown.lower()]
    what = f'E_UNIT the column "{shown}" does not say what it counts'
    fix = (
        "say minutes, hours, days or timestamp on this item of data.events, as {path: a/events.csv, unit: hours}; "
        "`unpad data check RECIPE.yaml` reads it there"
    )
    if pa.types.is_string(column.type) and (advice := layout_advice(_texts(column))):
        what = f'E_UNIT the column "{shown}" holds dates that need a format{_example(column)}'
        fix = f"set {advice} on this item of data.events"
    raise SourceError(what, where=table.files[0].shown, fix=fix)


def _texts(column: pa.Array) -> list[str]:
    """The different texts of a column, as they come."""
    return [text for text in column.unique().to_pylist() if text is not None and text not in NOTHING]


def _example(column: pa.Array) -> str:
    """The first text of a column that is written like a date, for a message."""
    first = next((text for text in _texts(column) if is_date_like(text)), None)
    return "" if first is None else _shown(first)


def _are_date_like(column: pa.Array) -> np.ndarray:
    """Find texts that are written like dates, (num_rows,) bool."""
    encoded = pc.if_else(pa.array(matches(column, _PLAIN)), None, column).dictionary_encode()
    known = np.array([*(text is not None and is_date_like(text) for text in encoded.dictionary.to_pylist()), False])
    date_like: np.ndarray = known[np.asarray(encoded.indices.fill_null(-1))]
    return date_like


# --------------------------------------------------------------------------- timestamps


def _timestamps(column: pa.Array, table: Table, name: str, faults: Faults, layout: str | None) -> np.ndarray:
    shown = table.names[name]
    if layout is not None and pa.types.is_string(column.type):
        column = _in_layout(column, shown, layout, faults)
    ahead = np.zeros(len(column), np.int64)
    if pa.types.is_string(column.type):
        column = written = utf8(column, faults)
        empty = np.asarray(pc.is_in(column, pa.array(NOTHING))) | ~valid(column)
        good = matches(column, _DATE)
        zoned = matches(column, _ZONE) & good
        if zoned.any():
            what, fix = f'"{shown}" has no zone, unlike other rows', "write the zone of every time, or of none"
            faults.add(good & ~zoned & ~matches(column, "Z$"), "E_UNIT", what, fix)
        ahead = _minutes_ahead(column, zoned)
        plain = pc.replace_substring_regex(pc.if_else(pa.array(good), column, None), f"(Z|{_ZONE[:-1]})$", "")
        try:
            column = plain.cast(pa.timestamp("us"))
        except pa.ArrowException:  # the thirtieth of February, or an hour of 25
            real = np.array([_is_real(text) for text in plain.to_pylist()], np.bool_)
            good &= real
            column = pc.if_else(pa.array(real), plain, None).cast(pa.timestamp("us"))
        _refuse_no_dates(written, shown, good, empty, faults)
    elif not _is_calendar(column.type):
        what = f'E_UNIT the column "{shown}" holds {column.type}, expected timestamps'
        raise SourceError(what, where=table.files[0].shown, fix="set unit: minutes, hours or days for this table")
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        column = column.cast(pa.timestamp(column.type.unit))  # the same moment, in UTC
    far = _out_of_range(column)

    texts = table.column(name) if pa.types.is_string(table.column(name).type) else None

    def explain(index: int) -> tuple[str, str]:
        value = "" if texts is None else _shown(texts[index].as_py())
        what = f'"{shown}" is before the year {FIRST_YEAR} or after {LAST_YEAR}{value}'
        return what, "leave it empty where the time is unknown, or remove the row"

    faults.add(far, "E_RANGE", explain)
    column = pc.if_else(pa.array(far), None, column)
    present = valid(column)
    since = np.asarray(column.cast(pa.timestamp("us"), safe=False).cast(pa.int64()).fill_null(0))
    return np.where(present, (since - ahead * 60_000_000) / MICROSECONDS, np.nan)


def _in_layout(column: pa.Array, shown: str, layout: str, faults: Faults) -> pa.Array:
    """Read texts in a layout of strptime as timestamps, in UTC where they have a zone; null for empty rows."""
    column = utf8(column, faults)
    encoded = column.dictionary_encode()
    read = [None if text in NOTHING else parse(text, layout) for text in encoded.dictionary.to_pylist()]
    naive = [
        None if moment is None else moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo else moment
        for moment in read
    ]
    times = pa.array(naive, pa.timestamp("us")).take(encoded.indices)
    empty = np.asarray(pc.is_in(column, pa.array(NOTHING))) | ~valid(column)

    def explain(index: int) -> tuple[str, str]:
        what = f'"{shown}" is not in the format {layout}{_shown(column[index].as_py())}'
        return what, "write it so, or set the format that the column has"

    faults.add(~(valid(times) | empty), "E_UNIT", explain)
    return times


def _refuse_no_dates(column: pa.Array, shown: str, good: np.ndarray, empty: np.ndarray, faults: Faults) -> None:
    """Refuse texts of a column that are no dates, with the format that they have where it is a common one."""
    wrong = ~(good | empty)
    advice = layout_advice(_texts(column.filter(pa.array(wrong)))) if wrong.any() and not good.any() else ""
    fix = f"set {advice}" if advice else "write it as 2024-01-31 or 2024-01-31 12:30:00"
    faults.add(wrong, "E_UNIT", lambda index: (f'"{shown}" is not a date{_shown(column[index].as_py())}', fix))


def _shown(text: str) -> str:
    """Show a faulty time in a message; only the length of a text unlike a date, as it may identify a patient."""
    return f': "{text}"' if is_date_like(text) else f", but a text of {len(text)} characters"


def _minutes_ahead(column: pa.Array, zoned: np.ndarray) -> np.ndarray:
    """Minutes by which the zone of a time, such as +08:00, is ahead of UTC, (num_rows,) int64; 0 without a zone."""
    digits = pc.replace_substring_regex(column, r"^.*([+-])(\d{2}):?(\d{2})$", r"\1\2\3")
    number = np.asarray(pc.if_else(pa.array(zoned), pc.replace_substring(digits, "+", ""), "0").cast(pa.int64()))
    minutes: np.ndarray = np.sign(number) * (np.abs(number) // 100 * 60 + np.abs(number) % 100)
    return minutes


def _out_of_range(column: pa.Array) -> np.ndarray:
    """Find dates outside of the years that are taken for real, (num_rows,) bool, in the column's own unit."""
    if pa.types.is_date32(column.type):
        seconds = np.asarray(column.cast(pa.int32()).fill_null(0)) * 86_400.0
    else:
        per_second = _SECONDS["ms"] if pa.types.is_date64(column.type) else _SECONDS[column.type.unit]
        seconds = np.asarray(column.cast(pa.int64()).fill_null(0)) / per_second
    first, last = (np.datetime64(f"{year}-01-01", "s").astype(np.int64) for year in (FIRST_YEAR, LAST_YEAR + 1))
    far: np.ndarray = (seconds < first) | (seconds >= last)
    return far


def _is_calendar(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _is_real(text: str | None) -> bool:
    try:
        return text is not None and bool(datetime.fromisoformat(text))
    except ValueError:
        return False
