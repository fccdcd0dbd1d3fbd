"""Faults of rows: their codes, the fix of each, and what messages show of a row."""

import codecs
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unpad.data.sources.example import BadRow
from unpad.data.sources.fields import SpellingError, looks_like_data, spelling
from unpad.data.sources.sniff import encoding_of

Names = Sequence[str] | Mapping[str, object]  # of fields, perhaps with their values
MAX_DEPTH = 500
MAX_EXCERPT = 80
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FIXES = {code: fix.format(depth=MAX_DEPTH) for code, fix in _TABLE.items()}


class RowFault(Exception):  # noqa: N818 - a finding on its way to become a BadRow, never seen by users
    """Fault of a row that cannot be used."""

    def __init__(self, code: str, what: str, fix: str = "") -> None:
        super().__init__(code, what)
        self.code, self.what, self.fix = code, what, fix or FIXES[code]
        self.encoding = "utf-8"  # of bytes in the excerpt

    def at(self, where: str, content: object = "", num_rows: int | None = 1) -> BadRow:
        """Return the bad row, with an excerpt of its content."""
        if isinstance(content, dict):  # the faulty cell first
            content = dict(sorted(content.items(), key=lambda cell: f'"{cell[0]}"' not in self.what))
        return BadRow(where, self.code, self.what, self.fix, excerpt(content, self.encoding), num_rows)


class FieldFault(RowFault):
    """Fields that change what a row means, and that are not read; `fields` are their names."""

    def __init__(self, doubts: Mapping[str, str]) -> None:
        """Args:
        doubts: what is wrong with each.
        """
        (_, what), *others = doubts.items()
        named = ", ".join(f'"{name}"' for name, _ in others)
        super().__init__("E_FIELD", f"{what}; nor {'are' if others[1:] else 'is'} {named}" if others else what)
        self.fields = tuple(doubts)


def excerpt(content: object, encoding: str = "utf-8") -> str:
    """Return at most 80 printable characters of a row; other characters, and bytes of another encoding, are escaped."""
    if isinstance(content, bytes):
        content = codecs.getincrementaldecoder(encoding)("backslashreplace").decode(content[: 4 * MAX_EXCERPT])
    elif not isinstance(content, str):
        content = repr(content)
    start = content[: 4 * MAX_EXCERPT].strip()[: MAX_EXCERPT + 1]
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in start)
    return text if len(text) <= MAX_EXCERPT else text[: MAX_EXCERPT - 1] + "…"


def bad_utf8(byte: int, place: str, path: Path) -> RowFault:
    """Return the fault of a byte, with a guess of the encoding of its file.

    Args:
        place: position of the byte, such as "at offset 7 of the file".
    """
    fault = RowFault("E_UTF8", f"byte 0x{byte:02x} {place} is not UTF-8")
    if guess := encoding_of(path):
        fault.fix = f"the file seems to be {guess}: iconv -f {guess} -t UTF-8 FILE > NEW"
        fault.encoding = guess
    return fault


def around(raw: bytes, place: int) -> bytes:
    """Cut out the part of a line that is near a byte."""
    begin = raw.rfind(b"\n", 0, place) + 1
    begin = begin if place - begin <= 4 * MAX_EXCERPT else place
    return raw[begin : place + 4 * MAX_EXCERPT]


def type_name(value: object) -> str:
    """JSON type of a value, with its article."""
    names = {str: "a string", list: "a list", dict: "an object", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def missing(fields: Sequence[str], present: Names, kind: str = "field", fix: str = "") -> RowFault:
    """Return the fault of a row without any of `fields`."""
    wanted = " or ".join(f'"{name}"' for name in fields)
    return RowFault("E_MISSING", f"no {kind} {wanted}; {there_is(present)}", fix)


def there_is(present: Names) -> str:
    """Name the fields that there are, with the types of values that are no texts; not what seems to be a row of data in
    the place of a header."""
    values = present if isinstance(present, Mapping) else {}
    if looks_like_data(list(present)):
        return "the first row looks like data, not like names of columns"
    types = {name: f" ({type_name(value)})" for name, value in values.items() if type(value) not in (str, type(None))}
    names = [f'"{excerpt(name[:40])}"{types.get(name, "")}' for name in list(present)[:20]]
    return f"there is {', '.join(names) or 'none'}"


def twice(error: SpellingError) -> RowFault:
    """Return the fault of two fields that could be the same known one."""
    one, other, meant = (excerpt(name[:40]) for name in error.args)
    what = f'"{one}" and "{other}" could both be "{meant}"'
    return RowFault("E_DUPKEY", what, f'call the one that is meant "{meant}", and the other something else')


def spelled(row: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """The row with the known names of fields that it spells in another way.

    Raises:
        RowFault: two fields could be the same known one.
    """
    try:
        near = spelling(tuple(row), known)
    except SpellingError as error:
        raise twice(error) from None
    return {near.get(name, name): value for name, value in row.items()} if near else row


def columns_of(names: Sequence[str], wanted: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, str]:
    """Columns of a table by their known names, or their own.

    Args:
        wanted: the table must have one of these columns; optional: others, also read under near spellings.

    Raises:
        RowFault: it has none of them, or two columns could be the same.
    """
    columns = spelled({name: name for name in names}, (*wanted, *optional))
    if columns.keys().isdisjoint(wanted):
        raise missing(wanted, names, "column")
    again = next((name for name in columns.values() if name and names.count(name) > 1), None)
    if again is not None:
        raise RowFault("E_DUPKEY", f'the column "{again}" occurs twice')
    return columns
