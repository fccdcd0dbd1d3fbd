"""Columns of a table as ids, codes, words, numbers and times in days, with every row that cannot be read."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unpad.data.histories.tables import Table, alias
from unpad.data.sources.example import BadRow
from unpad.data.sources.fields import is_date_like, layout_advice, parse
from unpad.data.sources.split import WRITE_SPLIT, Split, split_number
from unpad.errors import SourceError
from unpad.recipes.data import Decimal, Limits

MOST = 1e30  # larger numbers measure nothing, and their squares would not fit
NOTHING = ("", "NA", "N/A", "null", "NULL", "None")  # CSV spellings of a missing number

# RE2, as pyarrow has it. Numbers by the setting `decimal`: the other sign is then between thousands.
_NUMBER, _POINT, _COMMA = (
    rf"[+-]?({whole}({point}\d*)?|{point}\d+)([eE][+-]?\d+)?"
    for whole, point in ((r"\d+", r"\."), (r"(\d{1,3}(,\d{3})+|\d+)", r"\."), (r"(\d{1,3}(\.\d{3})+|\d+)", ","))
)
_NUMBERS = {None: _NUMBER, ".": _POINT, ",": _COMMA}
_LIMIT = r"([<>≤≥]=?\s?)"
ANY_NUMBER = rf"^\s*{_LIMIT}?({_POINT}|{_COMMA})\s*$"  # whether or not the settings read it
_NONFINITE = r"^[+-]?(?i:nan|inf|infinity)$"
_ODD = "[\uff10-\uff19\uff0e\uff0d\u200b\u2060\ufeff]"  # full-width digits, point and minus; characters without width

# Results in words, which messages may show because they identify nobody.
RESULTS = (
    r"(?i:neg(ative)?|pos(itive)?|(ab)?normal|(not )?detected|(non[- ]?)?reactive|trace|present|absent|true|false|yes"
    r"|no|high|low|[+-]{1,4})"
)
WRITE_ZONES = "write the zone of every time, or of none"
MOST_WORD = 40  # characters of a word that becomes a part of a code

# Divisors rather than factors, so that 90 minutes and 1.5 hours are the same number of days.
PER_DAY = {"minutes": 1440.0, "hours": 24.0, "days": 1.0}
# By the name of a column.
UNITS = {"minute": "minutes", "hour": "hours", "day": "days", **{unit: unit for unit in PER_DAY}}
MOST_DAYS = 73_050  # 200 years: no history is longer, and seconds since 1970 taken for minutes are
MICROSECONDS = 86_400e6  # of a day
# RE2, as pyarrow has it.
_ZONE = r"(Z|[+-]\d{2}:?\d{2})$"
_DATE = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?([+-]\d{2}:?\d{2})?)?Z?$"
_PLAIN = r"^-?\d*\.?\d*$"
_CLOCK = r"^\d{1,2}:\d{2}(:\d{2})?$"
# Years outside are placeholders such as 9999-12-31; shifted dates of published hospital data are inside.
FIRST_YEAR, LAST_YEAR = 1800, 2299

_BESIDE = "beside the path of this table"  # in data.events or events.labels

Explain = Callable[[int], tuple[str, str]]  # row -> what is wrong, what to do


class Faults:
    """Rows of a table that cannot be used; only the first fault of a row is reported.

    Attributes:
        good: (num_rows,) bool, rows without a fault so far.
        ids: id of the patient of every row, once they are known.
        zones: column of timestamps that was read -> whether its times have a zone.
        notes: remarks with their remedy.
    """

    def __init__(self, table: Table, decimal: Decimal | None = None, limits: Limits = "error") -> None:
        """Args:
        decimal, limits: settings of the source, on its numbers in texts.
        """
        self.table = table
        self.decimal, self.limits = decimal, limits
        self.zones: dict[str, bool] = {}
        self.notes: list[str] = []
        self.good = np.ones(len(table), np.bool_)
        self.ids: pa.Array | None = None
        self._rows: list[tuple[int, BadRow]] = []

    def add(self, wrong: np.ndarray, code: str, what: str | Explain, fix: str = "") -> None:
        """Refuse rows.

        Args:
            wrong: (num_rows,) bool.
            what: fault of all of them, or a function from the row to the fault and the fix.
        """
        for index in np.flatnonzero(wrong & self.good).tolist():
            message, remedy = (what, fix) if isinstance(what, str) else what(index)
            message = f"patient {alias(self.ids[index].as_py())}: {message}" if self.ids is not None else message
            self._rows.append((index, BadRow(self.table.where(index), code, message, remedy)))
        self.good &= ~wrong

    def column(self, name: str) -> Column:
        """A column of the table, by its requested name."""
        return Column(self, name)

    def read_ids(self) -> tuple[pa.Array, bool]:
        """Read the patient's id of every row, which further faults then name: strings, never null, and whether all
        were whole numbers of a numeric column.

        Raises:
            SourceError: the column holds a value that cannot be an id.
        """
        if self.table.has("id"):
            ids, whole = self.column("id").ids()
        else:
            owners = pa.array([file.owner or "" for file in self.table.files], pa.string())
            ids, whole = owners.take(pa.array(self.table.file_of)), False
        self.ids = ids
        return ids, whole

    @property
    def bad(self) -> list[BadRow]:
        """All bad rows, in the order of the table."""
        return [*self.table.bad, *(row for _, row in sorted(self._rows, key=lambda entry: entry[0]))]

    def refuse_any(self) -> None:
        """Refuse a table with a bad row.

        Raises:
            SourceError: names the first.
        """
        for row in self.bad:
            raise SourceError(f"{row.code} {row.what}", where=row.where, fix=row.fix)


class Column:
    """A column of a table that is being read; what cannot be read of it are faults of its rows.

    Attributes:
        name: its name in the file.
        values: (num_rows,) its values; texts that are not UTF-8 are null, and faults.
        is_text: whether these are texts.
    """

    def __init__(self, faults: Faults, name: str) -> None:
        self.faults, self.name = faults, faults.table.names[name]
        self.values = faults.table.column(name)
        self.is_text = bool(pa.types.is_string(self.values.type))
        if self.is_text and not is_utf8(self.values):
            self._drop_bad_bytes()

    def _drop_bad_bytes(self) -> None:
        """Replace texts that are not UTF-8, which parquet does not check, by null."""
        texts = self.values.cast(pa.binary())
        wrong = [text is not None and text.decode(errors="ignore").encode() != text for text in texts.to_pylist()]
        self.faults.add(np.array(wrong, np.bool_), "E_UTF8", "a text is not UTF-8", "save it as UTF-8")
        self.values = pc.if_else(pa.array(wrong, pa.bool_()), None, texts).cast(pa.string())

    def matches(self, pattern: str) -> np.ndarray:
        """Texts that match a pattern of RE2, (num_rows,) bool."""
        return _matches(self.values, pattern)

    def equals(self, other: object) -> np.ndarray:
        """Values that equal another, or those of another array, (num_rows,) bool."""
        return np.asarray(pc.fill_null(pc.equal(self.values, other), False))

    @cached_property
    def valid(self) -> np.ndarray:
        """Values that are not null, (num_rows,) bool."""
        return np.asarray(pc.is_valid(self.values))

    @cached_property
    def empty(self) -> np.ndarray:
        """Texts that stand for no value, and null, (num_rows,) bool."""
        return np.asarray(np.asarray(pc.is_in(self.values, pa.array(NOTHING))) | ~self.valid)

    def texts(self) -> list[str]:
        """The different texts, as they come."""
        return [text for text in self.values.unique().to_pylist() if text is not None and text not in NOTHING]

    def refuse(self, wrong: np.ndarray, code: str, what: str | Explain, fix: str = "") -> None:
        """Refuse rows for their value; arguments as of `Faults.add`, and `what` goes on behind the column's name."""

        def explain(row: int) -> tuple[str, str]:
            message, remedy = (what, fix) if isinstance(what, str) else what(row)
            return f'"{self.name}" {message}', remedy

        self.faults.add(wrong, code, explain)

    def error(self, code: str, what: str, fix: str) -> SourceError:
        """Error of the column as a whole."""
        return SourceError(f'{code} the column "{self.name}" {what}', where=self.faults.table.files[0].shown, fix=fix)

    def wrong_type(self, expected: str) -> SourceError:
        """Error of a column that holds values of another type."""
        what = f"holds {self.values.type}, expected {expected}"
        return self.error("E_TYPE", what, "name another column, or write it again")

    # ----------------------------------------------------------------------- ids, codes, words

    def ids(self) -> tuple[pa.Array, bool]:
        """Read ids as of `Faults.read_ids`.

        Whole numbers are ids in their usual form, whatever their type: 7, 7.0 and "7" are one patient, "007" is
        another.
        """
        values, faults = self.values, self.faults
        faults.add(~self.valid, "E_NULL", "there is no id", "fill it in or remove the row")
        if pa.types.is_floating(values.type):
            numbers = np.asarray(values.fill_null(0).cast(pa.float64()))
            whole = np.isfinite(numbers) & (numbers == np.floor(numbers)) & (np.abs(numbers) < 2**53)
            faults.add(~whole, "E_ID", "the id is not a whole number", "write ids as whole numbers or as texts")
            return pa.array(np.where(whole, numbers, 0).astype(np.int64)).cast(pa.string()), True
        if pa.types.is_integer(values.type):
            return values.fill_null(0).cast(pa.string()), True
        if not self.is_text:
            raise self.wrong_type("whole numbers or texts")
        faults.add(self.equals(""), "E_NULL", "there is no id", "fill it in or remove the row")
        spaced = (self.valid & ~self.equals(pc.utf8_trim_whitespace(values))) | self.matches(_ODD)
        fix = "write the id as in the other tables, in plain digits or letters"
        faults.add(spaced, "E_ID", "the id has white space or full-width digits", fix)
        return pc.replace_substring_regex(values.fill_null(""), r"^(-?\d+)\.0$", r"\1"), False

    def codes(self) -> pa.Array:
        """Read the code of every event, as strings, never null.

        Raises:
            SourceError: the column holds neither texts nor whole numbers.
        """
        values = self.values
        if pa.types.is_floating(values.type):  # whole numbers in a column with empty rows
            numbers = np.asarray(values.cast(pa.float64(), safe=False).fill_null(0))
            if np.array_equal(numbers, np.floor(numbers)) and np.abs(numbers).max(initial=0) < 2**53:
                values = values.cast(pa.int64())
        if pa.types.is_integer(values.type):
            values = values.cast(pa.string())
        if not pa.types.is_string(values.type):
            raise self.wrong_type("texts or whole numbers")
        fix = "fill in the code or remove the row"
        self.faults.add(~self.valid, "E_NULL", "the code is null", fix)
        values = values.fill_null("")
        blank = np.asarray(pc.equal(pc.utf8_trim_whitespace(values), ""))
        self.faults.add(blank, "E_EMPTY", "the code is blank", fix)
        return values

    def words(self) -> pa.Array:
        """Read the texts that are no numbers, as strings; null for numbers, empty rows, and in other columns.

        Texts too long for a code, such as notes, are faults.
        """
        if not self.is_text:
            return pa.nulls(len(self.values), pa.string())
        trimmed = pc.utf8_trim_whitespace(self.values)
        nothing = np.asarray(pc.is_in(trimmed, pa.array(NOTHING))) | ~self.valid
        number = self.matches(ANY_NUMBER) | _matches(trimmed, _NONFINITE)
        if self.faults.limits == "error":
            number &= ~_matches(trimmed, f"^{_LIMIT}")
        texts = pc.if_else(pa.array(nothing | number), None, trimmed)
        long = np.asarray(pc.fill_null(pc.greater(pc.utf8_length(texts), MOST_WORD), False))
        what = f"is a text of more than {MOST_WORD} characters, too long for a code"
        self.refuse(long, "E_TYPE", what, "shorten it, or set words: skip on this item of data.events")
        return texts

    def categories(self) -> pa.Array | None:
        """Read words or truth values as strings, null for empty rows; None for a column of numbers."""
        if pa.types.is_boolean(self.values.type):
            return self.values.cast(pa.string())
        if not self.is_text or (self.matches(ANY_NUMBER) | self.empty).all():  # CSV has numbers as texts
            return None
        return pc.if_else(pa.array(self.empty), None, self.values)

    def sides(self) -> np.ndarray:
        """Read names of parts of a split, (num_rows,) int8 of `Split`, UNDECLARED where they are empty.

        Raises:
            SourceError: the column does not hold words.
        """
        if pa.types.is_null(self.values.type):
            return np.full(len(self.values), Split.UNDECLARED, np.int8)
        if not self.is_text:
            raise self.error("E_SPLIT", f"holds {self.values.type}, expected words", WRITE_SPLIT)
        sides = _each(self.values, split_number, Split.UNDECLARED).astype(np.int8)
        said = np.asarray(pc.not_equal(pc.utf8_trim_whitespace(self.values), "").fill_null(False))
        self.faults.add((sides == Split.UNDECLARED) & said, "E_SPLIT", "the split has no such part", WRITE_SPLIT)
        return sides

    # ----------------------------------------------------------------------- numbers

    def numbers(self, expected: str = "a number", truths: bool = False, words: pa.Array | None = None) -> np.ndarray:
        """Read numbers, (num_rows,) float64; nan for empty rows.

        Args:
            expected: what messages ask for in place of a text that cannot be read as a number.
            truths: whether the texts True and False, in any case, are 1 and 0.
            words: (num_rows,) strings, texts that are no numbers and are read elsewhere; nan here.

        Raises:
            SourceError: the column holds no numbers.
        """
        kind = self.values.type
        if self.is_text:
            numbers = self._numbers_in_texts(expected, truths, words)
        elif any(is_kind(kind) for is_kind in (pa.types.is_boolean, *_NUMERIC)):
            values = self.values.cast(pa.int8()) if pa.types.is_boolean(kind) else self.values
            numbers = np.asarray(values.cast(pa.float64(), safe=False).fill_null(np.nan))
            self._refuse_nonfinite(self.valid & ~np.isfinite(numbers))
        else:
            raise self.wrong_type("numbers")
        huge = np.abs(np.nan_to_num(numbers, posinf=0, neginf=0)) > MOST
        self.refuse(huge, "E_RANGE", f"is beyond {MOST:g}", "leave it empty, or give it in another unit")
        return numbers

    def _numbers_in_texts(self, expected: str, truths: bool, words: pa.Array | None) -> np.ndarray:
        texts = self.values
        for word, digit in (("true", "1"), ("false", "0")) if truths else ():
            texts = pc.replace_substring_regex(texts, f"^(?i:{word})$", digit)
        read = self.empty if words is None else self.empty | np.asarray(pc.is_valid(words))
        self._refuse_nonfinite(self.matches(_NONFINITE) & ~read)
        decimal, limits = self.faults.decimal, self.faults.limits
        limit = "" if limits == "error" else f"{_LIMIT}?"
        good = _matches(texts, f"^{limit}{_NUMBERS[decimal]}$")
        self.refuse(~(good | read), "E_TYPE", lambda row: _no_number(texts[row].as_py(), expected, decimal, limits))
        if decimal is None:
            self._note_thousands()
        plain = pc.replace_substring_regex(pc.if_else(pa.array(good), texts, None), f"^{_LIMIT}", "")
        for sign, other in {",": ((".", ""), (",", ".")), ".": ((",", ""),), None: ()}[decimal]:
            plain = pc.replace_substring(plain, sign, other)
        numbers = np.asarray(plain.cast(pa.float64()).fill_null(np.nan))
        return np.where(_matches(texts, "^[<≤]"), numbers / 2, numbers) if limits == "half" else numbers

    def _note_thousands(self) -> None:
        """Remark on points that may be between thousands: 1.250 beside 950, and no other decimals."""
        pointed, thousands = self.matches(r"^\d+\."), self.matches(r"^[1-9]\d{0,2}\.\d{3}$")
        if thousands.any() and not (pointed & ~thousands).any() and self.matches(r"^\d{3}$").any():
            text = self.values[int(thousands.argmax())]
            what = f'"{self.name}" has {text} beside whole numbers, and no other decimals'
            fix = f'if its point is between thousands, set decimal: "," {_BESIDE}'
            self.faults.notes.append(f"{what}; {fix}")

    def _refuse_nonfinite(self, wrong: np.ndarray) -> None:
        self.refuse(wrong, "E_NONFINITE", "is not finite", "leave it empty where there is no number")

    # ----------------------------------------------------------------------- times

    def unit(self, asked: str, layout: str | None = None) -> str:
        """Return the unit of times: the requested one, or else by the column's type or its name.

        Args:
            layout: of timestamps in texts, if the recipe says it.

        Raises:
            SourceError: the unit is unknown.
        """
        if asked != "auto" or layout is not None:
            return "timestamp" if layout is not None else asked
        texts = self.texts() if self.is_text else []
        if _is_calendar(self.values.type) or (texts and re.match(_DATE, texts[0])):
            return "timestamp"
        if self.name.lower() in UNITS:
            return UNITS[self.name.lower()]
        if advice := layout_advice(texts):
            first = next((_shown(text) for text in texts if is_date_like(text)), "")
            what, fix = f"holds dates that need a format{first}", f"set {advice} on this item of data.events"
            raise self.error("E_UNIT", what, fix)
        fix = (
            "say minutes, hours, days or timestamp on this item of data.events, as {path: a/events.csv, unit: hours}; "
            "`unpad data check RECIPE.yaml` reads it there"
        )
        raise self.error("E_UNIT", "does not say what it counts", fix)

    def times(self, unit: str, layout: str | None = None) -> np.ndarray:
        """Read times in days, of a clock of their own or since 1970 for timestamps, (num_rows,) float64; nan for null.

        Args:
            unit: minutes, hours, days or timestamp.
            layout: of timestamps in texts, in the letters of strptime; None for that of ISO 8601.

        Raises:
            SourceError: the column holds timestamps and the unit is another, or the other way round.
        """
        if pa.types.is_null(self.values.type):
            return np.full(len(self.values), np.nan)
        if unit == "timestamp":
            return self._timestamps(layout)
        if _is_calendar(self.values.type):
            raise self.error("E_UNIT", f"holds timestamps, expected {unit}", "set unit: timestamp for this table")
        if self.is_text:
            others = pc.if_else(pa.array(self.matches(_PLAIN)), None, self.values)
            dated = self.matches(_DATE) | self.matches(_CLOCK) | _each(others, is_date_like, False)
            advice = layout_advice(self.texts()) if dated.any() else ""
            fix = f"write the {unit} as a number, or set {advice or 'unit: timestamp'} where all are dates"
            self.refuse(dated, "E_UNIT", f"is a date or a time of day, expected {unit}", fix)
        days = self.numbers() / PER_DAY[unit]
        fix = "set the unit that the column has; seconds since 1970 are to be written as timestamps"
        far = np.abs(np.nan_to_num(days)) > MOST_DAYS
        self.refuse(far, "E_UNIT", f"is more than 200 years, counted in {unit}", fix)
        return days

    def _timestamps(self, layout: str | None) -> np.ndarray:
        moments = self.values
        if self.is_text:
            moments = self._in_iso() if layout is None else self._in_layout(layout)
        elif not _is_calendar(moments.type):
            fix = "set unit: minutes, hours or days for this table"
            raise self.error("E_UNIT", f"holds {moments.type}, expected timestamps", fix)
        if pa.types.is_timestamp(self.values.type):
            self.faults.zones[self.name] = self.values.type.tz is not None
        # Without a zone these are the same moments, in UTC.
        seconds = np.asarray(moments.cast(pa.timestamp("s"), safe=False).cast(pa.int64()).fill_null(0))
        first, end = (np.datetime64(f"{year}-01-01", "s").astype(np.int64) for year in (FIRST_YEAR, LAST_YEAR + 1))
        far = (seconds < first) | (seconds >= end)

        def explain(row: int) -> tuple[str, str]:
            value = _shown(self.values[row].as_py()) if self.is_text else ""
            what = f"is before the year {FIRST_YEAR} or after {LAST_YEAR}{value}"
            return what, "leave it empty where the time is unknown, or remove the row"

        self.refuse(far, "E_RANGE", explain)
        moments = pc.if_else(pa.array(far), None, moments)
        since = np.asarray(moments.cast(pa.timestamp("us"), safe=False).cast(pa.int64()).fill_null(0))
        return np.where(np.asarray(pc.is_valid(moments)), since / MICROSECONDS, np.nan)

    def _in_iso(self) -> pa.Array:
        """Read texts of ISO 8601 as timestamps, in UTC where they have zones; null for empty rows."""
        good = self.matches(_DATE)
        zoned = self.matches(_ZONE) & good
        has_zones = bool(zoned.any())
        if good.any():
            self.faults.zones[self.name] = has_zones
        if has_zones:
            self.refuse(good & ~zoned, "E_UNIT", "has no zone, unlike other rows", WRITE_ZONES)
            good = zoned
        texts = pc.if_else(pa.array(good), self.values, None)
        plain = pc.replace_substring_regex(texts, r"^([\d-]{10})Z$", r"\1T00:00Z")  # Arrow reads no zone of a day
        kind = pa.timestamp("us", "UTC" if has_zones else None)
        try:
            moments = plain.cast(kind)
        except pa.ArrowException:  # the thirtieth of February, or an hour of 25
            good = good & np.array([_is_real(text) for text in plain.to_pylist()], np.bool_)
            moments = pc.if_else(pa.array(good), plain, None).cast(kind)
        wrong = ~(good | self.empty)
        advice = layout_advice(self.texts()) if wrong.any() and not good.any() else ""
        fix = f"set {advice}" if advice else "write it as 2024-01-31 or 2024-01-31 12:30:00"
        self.refuse(wrong, "E_UNIT", lambda row: (f"is not a date{_shown(self.values[row].as_py())}", fix))
        return moments

    def _in_layout(self, layout: str) -> pa.Array:
        """Read texts in a layout of strptime as timestamps, in UTC where they have a zone; null for empty rows."""
        encoded = self.values.dictionary_encode()
        self.faults.zones[self.name] = "%z" in layout
        read = [None if text in NOTHING else parse(text, layout) for text in encoded.dictionary.to_pylist()]
        naive = [one.astimezone(UTC).replace(tzinfo=None) if one and one.tzinfo else one for one in read]
        times = pa.array(naive, pa.timestamp("us")).take(encoded.indices)

        wrong, what = ~(np.asarray(pc.is_valid(times)) | self.empty), f"is not in the format {layout}"
        fix = "write it so, or set the format that the column has"
        self.refuse(wrong, "E_UNIT", lambda row: (f"{what}{_shown(self.values[row].as_py())}", fix))
        return times


_NUMERIC = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_null)


def _each(texts: pa.Array, function: Callable[[str], Any], missing: object) -> np.ndarray:
    """A function of every text, (num_rows,), computed once for equal ones; `missing` for null."""
    encoded = texts.dictionary_encode()
    values = np.array([*map(function, encoded.dictionary.to_pylist()), missing])
    return np.asarray(values[np.asarray(encoded.indices.fill_null(-1))])


def _matches(texts: pa.Array, pattern: str) -> np.ndarray:
    """Texts that match a pattern of RE2, (num_rows,) bool."""
    return np.asarray(pc.fill_null(pc.match_substring_regex(texts, pattern), False))


def _no_number(text: str, expected: str, decimal: Decimal | None, limits: Limits) -> tuple[str, str]:
    """Describe why a text is not a number, and the fix; show only texts that cannot identify a patient."""
    if re.search(_ODD, text):
        return "is written with full-width digits or characters without width", "write it in plain digits"
    if text != text.strip():
        return "has white space around it", "remove the white space"
    if expected == "a number" and re.fullmatch(rf"{_LIMIT}[\d.,]{{1,12}}", text):
        if limits == "error":
            fix = f"set limits: half {_BESIDE}, which reads <5 as 2.5, or limits: bound, as 5; >5 is then 5 in both"
            return f'is the limit "{text}"', fix
        text = re.sub(_LIMIT, "", text)
    if expected == "a number" and re.fullmatch(RESULTS, text):
        fix = "set words: code on this item of data.events, which makes the word a part of the code, or write a number"
        return f'is the word "{text}", expected {expected}', fix
    if re.fullmatch(_POINT, text) and (decimal is None or not re.fullmatch(_COMMA, text)):
        thousands = float(text.replace(",", ""))
        if decimal == ",":
            return f'is "{text}", and decimal is ","', "write all numbers of the table in one way"
        if not re.fullmatch(_COMMA, text):
            return f'has commas between thousands: "{text}"', f'set decimal: "." {_BESIDE}'
        what = f'is "{text}", {thousands:.15g} or {float(text.replace(",", ".")):.15g}'
        return what, f'set decimal: "." {_BESIDE} for the first, or decimal: "," for the second'
    if re.fullmatch(_COMMA, text):
        kind = "a decimal comma" if "," in text else "points between thousands"
        fix = "write all numbers of the table in one way" if decimal else f'set decimal: "," {_BESIDE}'
        return f'has {kind}: "{text}"', fix
    return f"is a text of {len(text)} characters, expected {expected}", f"write {expected}, or leave it empty"


def are_whole(ids: pa.Array) -> bool:
    """Check that all ids, strings, are whole numbers in their usual form that fit int64; "007" is not."""
    with suppress(pa.ArrowInvalid):
        return bool(ids.cast(pa.int64()).cast(pa.string()).equals(ids))
    return False


def is_utf8(column: pa.Array) -> bool:
    """Check that all texts of a column are UTF-8."""
    with suppress(pa.ArrowInvalid):
        column.validate(full=True)
        return True
    return False


def _shown(text: str) -> str:
    """Show a faulty time in a message; only the length of a text unlike a date, as it may identify a patient."""
    return f': "{text}"' if is_date_like(text) else f", but a text of {len(text)} characters"


def _is_calendar(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _is_real(text: str | None) -> bool:
    with suppress(ValueError):
        return text is not None and bool(datetime.fromisoformat(text))
    return False
