"""Columns of times in days: counted from a time of their own, or timestamps since 1970."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unpad.data.histories.columns import NOTHING, Faults, matches, numbers, utf8, valid
from unpad.data.histories.tables import Table
from unpad.data.sources.fields import is_date_like, layout_advice, parse
from unpad.errors import SourceError

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
