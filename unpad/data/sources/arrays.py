"""JSON arrays, read element by element from a buffer that does not grow with the file."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from unpad.data.sources.example import BadRow
from unpad.data.sources.files import BOM, HEAD_BYTES
from unpad.data.sources.jsonlines import (
    BRACKETS,
    MAX_DEPTH,
    MAX_EXCERPT,
    SPACE,
    RowFault,
    bad_utf8,
    check_value,
    explain,
    strict_decoder,
    wrong_encoding,
)

READ_BYTES = 1 << 18
TOKEN = 16  # more characters than a number's or literal's beginning that a buffer's end may cut off
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # bytes, as "surrogateescape" decodes them


def read_array(path: Path, key: str = "") -> Iterator[tuple[int, Any] | BadRow]:
    """Read a JSON array, or the one that an object has under `key`; yield (index from 0, element) or the bad row.

    A fault inside an element names the element. Broken syntax names the line and ends the reading; how many elements
    follow is unknown.
    """
    with path.open("rb") as handle:
        head = handle.read(HEAD_BYTES)
        if wrong := wrong_encoding(head):
            yield wrong.at(f"{path}:1", head, num_rows=None)
            return
        handle.seek(len(BOM) if head.startswith(BOM) else 0)
        buffer = _Buffer(handle)
        try:
            yield from _member(path, buffer, key) if key else _whole(path, buffer)
        except json.JSONDecodeError as error:
            line, column = buffer.place(error.pos)
            text = buffer.text
            fault = explain(error, text.rfind("\n", 0, error.pos) + 1, column)
            yield fault.at(f"{path}:{line}", text[max(0, error.pos - 30) : error.pos + 50], num_rows=None)


class _Buffer:
    """The part of a file that is being read, as text; bytes that are not UTF-8 become half characters.

    Attributes:
        text: characters of the file from some place on.
        ended: whether `text` reaches the end of the file.
        escaped: whether some byte so far was not UTF-8.
    """

    def __init__(self, handle: BinaryIO) -> None:
        self.text = ""
        self.ended = self.escaped = False
        self._handle = handle
        self._strict = codecs.getincrementaldecoder("utf-8")()
        self._lenient = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._offset = handle.tell()  # of the first character, in bytes
        self._line, self._column = 1, 0  # of the first character

    def more(self) -> None:
        """Read on: as much as the buffer holds, so that a long element is decoded a few times only."""
        raw = self._handle.read(max(READ_BYTES, len(self.text)))
        self.ended = not raw
        if not self.escaped:
            before = self._strict.getstate()
            try:
                self.text += self._strict.decode(raw, self.ended)
                return
            except UnicodeDecodeError:
                self.escaped = True
                self._lenient.setstate(before)
        self.text += self._lenient.decode(raw, self.ended)

    def drop(self, position: int) -> None:
        """Forget the characters before `position`."""
        gone = self.text[:position]
        self._offset += len(gone.encode("utf-8", "surrogateescape"))
        lines = gone.count("\n")
        self._line += lines
        self._column = len(gone) - gone.rfind("\n") - 1 if lines else self._column + len(gone)
        self.text = self.text[position:]

    def place(self, position: int) -> tuple[int, int]:
        """Line and column of a character, from 1."""
        line_start = self.text.rfind("\n", 0, position) + 1
        column = position - line_start + 1 + (0 if line_start else self._column)
        return self._line + self.text.count("\n", 0, position), column

    def skip_space(self, position: int) -> int:
        """Return the place of the next character that is no white space, or the end of the file."""
        while True:
            match = SPACE.match(self.text, position)
            assert match is not None
            position = match.end()
            if position < len(self.text) or self.ended:
                return position
            self.more()

    def check(self, start: int, end: int) -> None:
        """Raise the fault of an element, text[start:end], with bytes that are not UTF-8."""
        match = _NOT_UTF8.search(self.text, start, end) if self.escaped else None
        if match:
            before = len(self.text[: match.start()].encode("utf-8", "surrogateescape"))
            near = self.text[max(start, match.start() - MAX_EXCERPT) : min(end, match.start() + MAX_EXCERPT)]
            place = f"at offset {self._offset + before} of the file"
            raise bad_utf8(ord(match[0]) - 0xDC00, place, near.encode("utf-8", "surrogateescape"))


def _whole(path: Path, buffer: _Buffer) -> Iterator[tuple[int, Any] | BadRow]:
    position = buffer.skip_space(0)
    if buffer.text[position : position + 1] != "[":
        empty = position == len(buffer.text)
        yield _not_array(buffer.text[position:]).at(f"{path}:1", buffer.text, num_rows=1 if empty else None)
        return
    end = yield from _elements(path, buffer, position)
    if end is not None:
        _refuse_more(buffer, end)


def _member(path: Path, buffer: _Buffer, key: str) -> Iterator[tuple[int, Any] | BadRow]:
    """Read the array of one key; other members are checked and left."""
    position = buffer.skip_space(0)
    wanted = f'name a file that holds {{"{key}": [...]}}'
    try:
        if buffer.text[position : position + 1] != "{":
            raise RowFault("E_TYPE", f'the file is no object with a list "{key}"', wanted)
        position = buffer.skip_space(position + 1)
        found = buffer.text[position : position + 1] != "}"
        if found:
            position, found = _to_key(buffer, position, key)
        if not found:
            raise RowFault("E_MISSING", f'the object has no list "{key}"', wanted)
        if buffer.text[position : position + 1] != "[":
            raise RowFault("E_TYPE", f'"{key}" is no list', wanted)
        end = yield from _elements(path, buffer, position)
        if end is None:
            return
        position = buffer.skip_space(end)
        if buffer.text[position : position + 1] == ",":
            position, again = _to_key(buffer, buffer.skip_space(position + 1), key)
            if again:
                raise RowFault("E_DUPKEY", f'"{key}" stands twice')
        else:
            position = _after(buffer, position, "}")
        _refuse_more(buffer, position)
    except RecursionError:
        fault = RowFault("E_DEPTH", f"nested deeper than {MAX_DEPTH} levels")
        yield fault.at(f"{path}:{buffer.place(position)[0]}", buffer.text[position:], num_rows=None)
    except RowFault as fault:
        yield fault.at(f"{path}:{buffer.place(position)[0]}", buffer.text[position:], num_rows=None)


def _to_key(buffer: _Buffer, position: int, key: str) -> tuple[int, bool]:
    """Pass over members of an object: the place of the value of `key` and True, or that behind the object and False.

    Raises:
        RowFault: a member is not strict JSON.
    """
    decoder, faults = strict_decoder()
    while True:
        name, end = _decode(buffer, position, decoder, faults)
        if type(name) is not str:
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", buffer.text, position)
        position = _after(buffer, buffer.skip_space(end), ":")
        if name == key:
            return position, True
        value, end = _decode(buffer, position, decoder, faults)
        buffer.check(position, end)
        check_value(buffer.text, position, end, value, faults)
        position = buffer.skip_space(end)
        if buffer.text[position : position + 1] != ",":
            return _after(buffer, position, "}"), False
        position = buffer.skip_space(position + 1)


def _after(buffer: _Buffer, position: int, mark: str) -> int:
    """Return the place behind a mark and white space.

    Raises:
        JSONDecodeError: another character stands there.
    """
    if buffer.text[position : position + 1] != mark:
        raise json.JSONDecodeError(f"Expecting '{mark}' delimiter", buffer.text, position)
    return buffer.skip_space(position + 1)


def _refuse_more(buffer: _Buffer, position: int) -> None:
    """Refuse anything but white space to the end of the file."""
    tail = buffer.skip_space(position)
    if tail != len(buffer.text):
        raise json.JSONDecodeError("Extra data", buffer.text, tail)


def _elements(path: Path, buffer: _Buffer, position: int) -> Generator[tuple[int, Any] | BadRow, None, int | None]:
    """Yield the elements of the array at a place; return the place behind it, or None where reading ends inside."""
    decoder, faults = strict_decoder()
    index, position = 0, buffer.skip_space(position + 1)
    more = buffer.text[position : position + 1] != "]"
    while more:
        if position >= READ_BYTES + TOKEN:  # faults are explained by what stands before them
            buffer.drop(position - TOKEN)
            position = TOKEN
        place = f"{path}[{index}]"
        try:
            value, end = _decode(buffer, position, decoder, faults)
            buffer.check(position, end)
            check_value(buffer.text, position, end, value, faults)
            yield index, value
        except RecursionError:
            fault = RowFault("E_DEPTH", f"nested deeper than {MAX_DEPTH} levels")
            closed = _end_of_brackets(buffer, position)
            if closed is None:
                yield fault.at(f"{path}:{buffer.place(position)[0]}", buffer.text[position:], num_rows=None)
                return None
            end = closed
            yield fault.at(place, buffer.text[position : position + MAX_EXCERPT + 1])
        except RowFault as fault:
            yield fault.at(place, buffer.text[position : min(end, position + MAX_EXCERPT + 1)])
        position = buffer.skip_space(end)
        more = buffer.text[position : position + 1] == ","
        if not more and buffer.text[position : position + 1] != "]":
            raise json.JSONDecodeError("Expecting ',' delimiter", buffer.text, position)
        if more:
            index, position = index + 1, buffer.skip_space(position + 1)
    return position + 1


def _decode(buffer: _Buffer, position: int, decoder: json.JSONDecoder, faults: list[RowFault]) -> tuple[object, int]:
    """Decode one element, and read on while the buffer's end may have cut it off.

    Raises:
        JSONDecodeError: the element is broken, wherever the file goes on.
        RecursionError: it is nested too deep for the decoder.
    """
    while True:
        faults.clear()
        try:
            value, end = decoder.raw_decode(buffer.text, position)
            if end + TOKEN < len(buffer.text) or buffer.ended:  # or it may be the beginning of a number
                return value, end
        except json.JSONDecodeError as error:
            cut_off = error.msg.startswith("Unterminated string") or error.pos + TOKEN > len(buffer.text)
            if buffer.ended or not cut_off:
                raise
        buffer.more()


def _end_of_brackets(buffer: _Buffer, position: int) -> int | None:
    """Find the end of an element that begins with a bracket, or None where the file ends before."""
    while True:
        depth = 0
        for match in BRACKETS.finditer(buffer.text, position):
            depth += 1 if match[0] in "[{" else -1 if match[0] in "]}" else 0
            if depth == 0:
                return match.end()
        if buffer.ended:
            return None
        buffer.more()


def _not_array(body: str) -> RowFault:
    if not body:
        return RowFault("E_EMPTY", "the file is empty", "remove the file")
    if body.startswith("{"):
        fix = "one object per line? set format: jsonl"
        if re.search(r'"questions"\s*:\s*\[', body):
            fix = "read it with its answers: 'data.vqa={path: QUESTIONS.json, annotations: FILE.json, images: FOLDER}'"
        return RowFault("E_TYPE", "the file holds objects, expected one array", fix)
    return RowFault("E_TYPE", "the file is not a JSON array", "write an array in brackets")
