"""Strict JSON: an object on each line, or the elements of an array; every fault has a place and a code.

The standard decoder accepts duplicate keys, NaN, numbers out of range and lone surrogates. Here each of them is a bad
row, found by cheap hooks, or by a check of only the rows that contain suspicious characters.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from unpad.data.sources.example import BadRow
from unpad.data.sources.faults import MAX_DEPTH, MAX_EXCERPT, RowFault, bad_utf8, excerpt, type_name
from unpad.data.sources.fields import MESSAGES
from unpad.data.sources.row import Row
from unpad.data.sources.sniff import BOM, HEAD_BYTES, mistaken
from unpad.storage.strict_json import depth, nesting

# Between values, white space of any script: wide and non-breaking spaces are common in Chinese files.
SPACES = "\t\n\r \u0085\u00a0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_SPACE = re.compile(f"[{SPACES}]*")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # bytes, as "surrogateescape" decodes them
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"


class StrictDecoder:
    """The standard decoder, with a fault for each value that it accepts and JSON or 64 bits do not have."""

    def __init__(self) -> None:
        self._faults: list[RowFault] = []
        numbers: dict[str, Any] = {"parse_int": self._integer, "parse_float": self._real}
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_constant=self._constant, **numbers)

    def whole(self, text: str) -> Any:
        """The value that a text is.

        Raises:
            RowFault: the value has a fault.
            JSONDecodeError: it is no JSON.
        """
        value, end = self.part(text, _behind(text, 0))
        if isinstance(value, RowFault):
            raise value
        if (end := _behind(text, end)) < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
        return value

    def part(self, text: str, start: int) -> tuple[Any, int]:
        """The value that begins at a place, or its fault, and the place behind it.

        Raises:
            RowFault: where the value ends cannot be known.
            JSONDecodeError: it is no JSON.
        """
        self._faults.clear()
        try:
            value, end = self._decoder.raw_decode(text, start)
        except RecursionError:
            fault = RowFault("E_DEPTH", _TOO_DEEP)
            end = next((place for depth, place in nesting(text, start, len(text)) if depth == 0), -1)
            if end < 0:
                raise fault from None
            return fault, end
        return self._fault(text, start, end, value) or value, end

    def _fault(self, text: str, start: int, end: int, value: object) -> RowFault | None:
        """The first fault of a decoded value, text[start:end]."""
        if self._faults:
            return self._faults[0]
        if end - start > MAX_DEPTH and depth(text, start, end) > MAX_DEPTH:
            return RowFault("E_DEPTH", _TOO_DEEP)
        if _SURROGATE_ESCAPE.search(text, start, end):
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = ord(error.object[error.start])
                return RowFault("E_SURROGATE", f"\\u{half:04x} is half of a character")
        return None

    def _add(self, code: str, what: str) -> None:
        self._faults.append(RowFault(code, what))

    def _object(self, items: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(items)
        if len(row) != len(items):
            names = [name for name, _ in items]
            name = next(name for name in names if names.count(name) > 1)
            self._add("E_DUPKEY", f'the key "{excerpt(name)}" occurs twice')
        return row

    def _integer(self, digits: str) -> int:
        if len(digits) < 19 or (len(digits) < 21 and -(2**63) <= int(digits) < 2**64):
            return int(digits)
        self._add("E_RANGE", f"the number {excerpt(digits)} does not fit into 64 bits")
        return 0

    def _real(self, digits: str) -> float:
        value = float(digits)
        if value in (float("inf"), float("-inf")):
            self._add("E_RANGE", f"the number {excerpt(digits)} is too large")
        return value

    def _constant(self, name: str) -> None:
        self._add("E_NONFINITE", f"{name} is not a JSON number")


def explain(error: json.JSONDecodeError) -> RowFault:
    """Describe the fault of broken JSON."""
    text, position, place = error.doc, error.pos, f"column {error.colno}"
    start = text.rfind("\n", 0, position) + 1
    line, rest = text[start : start + MAX_EXCERPT].lstrip(" \t"), text[_behind(text, position) :][:MAX_EXCERPT]
    control = _CONTROL.search(text, start, position + 1)
    if control or error.msg.startswith("Invalid control character"):
        char = control[0] if control else text[position : position + 1]
        return RowFault("E_CTRL", f"raw control character {f'U+{ord(char):04X}' if char else 'at the end'} at {place}")
    extra = error.msg.startswith("Extra data")
    if extra and rest[:1] in tuple('{["'):
        return RowFault("E_EXTRA", f"a second JSON value begins at {place}")
    what, fix = f"{error.msg} at {place}", ""
    if line.startswith("\ufeff"):
        what, fix = "a byte order mark stands before the row", "remove U+FEFF; only a file may begin with it"
    elif line.startswith(("//", "#", "/*")) or rest.startswith(("//", "#", "/*")):
        what, fix = f"a comment at {place}; JSON has none", "remove the comment"
    elif (extra and rest[:1] == ",") or re.search(r",\s*[}\]]", text[max(start, position - 9) : position + 9]):
        what, fix = f"a trailing comma at {place}", "remove the comma"
    elif rest.startswith("'") or re.match(r"(None|True|False)\b", rest):
        what, fix = f"Python notation at {place}, not JSON", "write rows with json.dumps(row, ensure_ascii=False)"
    elif not rest or error.msg.startswith("Unterminated string"):
        what, fix = "the row ends before its value does", "complete it; write a line break inside a string as \\n"
    return RowFault("E_JSON", what, fix)


def _behind(text: str, position: int) -> int:
    """Return the place of the next character that is no white space, or the end of the text."""
    match = _SPACE.match(text, position)
    assert match is not None, "also no space matches"
    return match.end()


# --------------------------------------------------------------------------- lines


def read_lines(path: Path) -> Iterator[Row | BadRow]:
    r"""Read one JSON object per line; yield the row, or the bad row.

    Only \n ends a line (\r in a file without any \n), so U+2028 and U+0085 stay inside texts. Blank lines are skipped.
    """
    decode = StrictDecoder().whole
    with path.open("rb") as handle:
        head = handle.read(HEAD_BYTES)
        if wrong := mistaken(head, "jsonl"):
            yield RowFault("E_ENCODING", *wrong).at(f"{path}:1", head, num_rows=None)
            return
        handle.seek(0)
        offset = 0
        for number, raw in enumerate(_lines(handle, head), 1):
            if number == 1:
                offset = len(raw) - len(raw.removeprefix(BOM))
                raw = raw.removeprefix(BOM)
            if not _is_blank(raw):
                try:
                    value = decode(raw.decode().rstrip(SPACES))  # or a cut-off string would seem to hold a line break
                    if type(value) is not dict:
                        raise RowFault("E_NOT_OBJECT", f"the row is {type_name(value)}, expected an object")
                    yield Row(f"{path}:{number}", value)
                except UnicodeDecodeError as error:
                    fault = bad_utf8(raw[error.start], f"at offset {offset + error.start} of the file", path)
                    yield fault.at(f"{path}:{number}", raw)
                except json.JSONDecodeError as error:
                    yield explain(error).at(f"{path}:{number}", raw)
                except RowFault as fault:
                    yield fault.at(f"{path}:{number}", raw)
            offset += len(raw)


def _is_blank(raw: bytes) -> bool:
    return raw.isspace() or not raw or (raw.lstrip()[0] > 127 and not raw.decode("utf-8", "replace").strip())


def _lines(handle: Iterable[bytes], head: bytes) -> Iterable[bytes]:
    if b"\n" not in head and b"\r" in head.rstrip(b"\r"):
        return b"".join(handle).splitlines(keepends=True)
    return handle


# --------------------------------------------------------------------------- arrays


def read_array(path: Path, key: str = "") -> Iterator[Row | BadRow]:
    """Read a JSON array, or the one that an object has under `key`; yield each element or the bad row.

    The text is in memory as a whole, its elements one at a time. A fault inside an element names the element. Broken
    syntax names the line and ends the reading; how many elements follow is unknown.
    """
    content = path.read_bytes()
    if wrong := mistaken(content[:HEAD_BYTES], "json"):
        yield RowFault("E_ENCODING", *wrong).at(f"{path}:1", content[:HEAD_BYTES], num_rows=None)
        return
    cursor = _Cursor(path, content.removeprefix(BOM).decode("utf-8", "surrogateescape"), content.startswith(BOM))
    del content
    try:
        yield from _member(path, cursor, key) if key else _whole(path, cursor)
        return
    except json.JSONDecodeError as error:
        fault, cursor.place = explain(error), error.pos
    except RowFault as raised:
        fault = raised
    place = cursor.place
    where = f"{path}:{cursor.text.count(chr(10), 0, place) + 1}"
    yield fault.at(where, cursor.text[max(0, place - 30) : place + 50], num_rows=None)


class _Cursor:
    """A place in a text of JSON, in which bytes that are not UTF-8 are half characters."""

    def __init__(self, path: Path, text: str, has_mark: bool) -> None:
        self.path, self.text, self.place = path, text, 0
        self._decode = StrictDecoder().part
        self._begin = len(BOM) if has_mark else 0
        self._escaped = _NOT_UTF8.search(text) is not None

    def at(self, mark: str) -> bool:
        """Pass over white space, and over a mark if it stands there."""
        self.place = _behind(self.text, self.place)
        is_there = self.text.startswith(mark, self.place)
        self.place += len(mark) if is_there else 0
        return is_there

    def expect(self, mark: str, instead: str = "") -> None:
        """Pass over a mark.

        Raises:
            JSONDecodeError: another character stands there.
        """
        if not self.at(mark):
            raise json.JSONDecodeError(f"Expecting '{instead or mark}' delimiter", self.text, self.place)

    def end(self) -> None:
        """Refuse anything but white space to the end of the file."""
        self.at("")
        if self.place < len(self.text):
            raise json.JSONDecodeError("Extra data", self.text, self.place)

    def value(self) -> Any:
        """Pass over a value and return it, or its fault.

        Raises:
            RowFault: where the value ends cannot be known.
            JSONDecodeError: it is no JSON.
        """
        self.at("")
        start = self.place
        value, self.place = self._decode(self.text, start)
        match = _NOT_UTF8.search(self.text, start, self.place) if self._escaped else None
        if match is None:
            return value
        before = len(self.text[: match.start()].encode("utf-8", "surrogateescape"))
        return bad_utf8(ord(match[0]) - 0xDC00, f"at offset {self._begin + before} of the file", self.path)


def _whole(path: Path, cursor: _Cursor) -> Iterator[Row | BadRow]:
    if cursor.at("["):
        yield from _elements(path, cursor)
        cursor.end()
    elif cursor.place == len(cursor.text):
        yield RowFault("E_EMPTY", "the file is empty", "remove the file").at(f"{path}:1", cursor.text)
    elif cursor.text.startswith("{", cursor.place):
        start, value = cursor.place, cursor.value()
        are_several, cursor.place = cursor.at("{"), start
        if isinstance(value, RowFault):
            raise value
        what, fix = ("holds objects", "one object per line? set format: jsonl") if are_several else _within(value)
        raise RowFault("E_TYPE", f"the file {what}, expected one array", fix)
    else:
        raise RowFault("E_TYPE", "the file is not a JSON array", "write an array in brackets")


def _within(value: dict[str, Any]) -> tuple[str, str]:
    """Where the rows are in a file that is one object, and what to do."""
    lists = {name: part for name, part in value.items() if type(part) is list and part}
    tables = [name for name, part in lists.items() if type(part[0]) is dict and name not in MESSAGES]
    fix = "write one row a line, as JSON lines"
    if "questions" in tables:
        fix = "read it with its answers: 'data.vqa={path: QUESTIONS.json, annotations: FILE.json, images: FOLDER}'"
    elif len(tables) == 1:
        return f"has its rows in the list {json.dumps(tables[0], ensure_ascii=False)}", fix
    return "is one object", fix


def _elements(path: Path, cursor: _Cursor) -> Iterator[Row | BadRow]:
    """Yield the elements of an array behind its first bracket, and pass over its last."""
    index, more = 0, not cursor.at("]")
    while more:
        start = cursor.place
        value = cursor.value()
        if isinstance(value, RowFault):
            yield value.at(f"{path}[{index}]", cursor.text[start : min(cursor.place, start + 4 * MAX_EXCERPT)])
        else:
            yield Row(f"{path}[{index}]", value)
        index, more = index + 1, cursor.at(",")
        if not more:
            cursor.expect("]", ",")


def _member(path: Path, cursor: _Cursor, key: str) -> Iterator[Row | BadRow]:
    """Read the array of one key; other members are checked and left."""
    wanted = f'name a file that holds {{"{key}": [...]}}'
    if not cursor.at("{"):
        raise RowFault("E_TYPE", f'the file is no object with a list "{key}"', wanted)
    if cursor.at("}") or not _to_key(cursor, key):
        raise RowFault("E_MISSING", f'the object has no list "{key}"', wanted)
    if not cursor.at("["):
        raise RowFault("E_TYPE", f'"{key}" is no list', wanted)
    yield from _elements(path, cursor)
    if not cursor.at(","):
        cursor.expect("}")
    elif _to_key(cursor, key):
        raise RowFault("E_DUPKEY", f'"{key}" stands twice')
    cursor.end()


def _to_key(cursor: _Cursor, key: str) -> bool:
    """Pass over members of an object, to the value of `key`; False where the object ends before.

    Raises:
        RowFault: a member has a fault.
        JSONDecodeError: it is no JSON.
    """
    while True:
        cursor.at("")
        start, name = cursor.place, cursor.value()
        if type(name) is not str:
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", cursor.text, start)
        cursor.expect(":")
        if name == key:
            return True
        start, value = cursor.place, cursor.value()
        if isinstance(value, RowFault):
            cursor.place = start
            raise value
        if not cursor.at(","):
            cursor.expect("}")
            return False
