"""Strict JSON, line by line, and the faults that `arrays.py` shares: every fault has a place and a code.

The standard decoder accepts duplicate keys, NaN, numbers out of range and lone surrogates. Here each of them is a bad
row, found by cheap hooks, or by a check of only the rows that contain suspicious characters.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from unpad.data.sources.example import BadRow
from unpad.data.sources.fields import COLUMNS, SpellingError, folded, looks_like_data
from unpad.data.sources.files import BOM, HEAD_BYTES, REMEDIES, encoding_of, guess_encoding

MAX_DEPTH = 500
MAX_EXCERPT = 80
MAX_SNIFFED = 20  # lines of a file that show what it is
FIXES = {
    "E_UTF8": "save the file as UTF-8",
    "E_ENCODING": "convert the file to UTF-8 text",
    "E_SURROGATE": "write the character whole, as UTF-8 or as a pair of escapes",
    "E_CTRL": "escape it, for example \\n, or remove it",
    "E_NUL": "remove the NUL character",
    "E_JSON": "write the row with a JSON library",
    "E_EXTRA": "write one JSON value per line",
    "E_NOT_OBJECT": "write an object in braces on each line",
    "E_DUPKEY": "keep one of the two",
    "E_NONFINITE": "leave out the field, or the value of a list; a field may be null",
    "E_RANGE": "write it as a string",
    "E_DEPTH": f"nest at most {MAX_DEPTH} levels",
    "E_TYPE": "correct the type",
    "E_MISSING": "add the field, or name yours with `field:` in the source",
    "E_NULL": "fill in the text or remove the row",
    "E_EMPTY": "fill in the text or remove the row",
    "E_ROLE": "system first if at all, then user and assistant in turns",
    "E_NO_TARGET": "add the assistant's reply or remove the row",
    "E_SPLIT": "write train, valid or test, or leave the field out",
    "E_PARQUET": "write the file again",
    "E_CSV": "quote cells that hold the delimiter, a quote (doubled) or a line break",
}

# Between values, white space of any script: wide and non-breaking spaces are common in Chinese files.
SPACES = "\t\n\r \u0085\u00a0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
SPACE = re.compile(f"[{SPACES}]*")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|$)|[\[{]|[\]}]')


class RowFault(Exception):  # noqa: N818 - a finding on its way to become a BadRow, never seen by users
    """Fault of a row that cannot be used."""

    def __init__(self, code: str, what: str, fix: str = "") -> None:
        super().__init__(code, what)
        self.code, self.what, self.fix = code, what, fix or FIXES[code]

    def at(self, where: str, content: object = "", num_rows: int | None = 1) -> BadRow:
        """Return the bad row, with an excerpt of its content."""
        return BadRow(where, self.code, self.what, self.fix, excerpt(content), num_rows)


def excerpt(content: object) -> str:
    """Return at most 80 printable characters of a row; other characters are escaped."""
    if isinstance(content, bytes):
        content = _decoded(content[: 4 * MAX_EXCERPT])
    elif not isinstance(content, str):
        content = repr(content)
    start = content[: 4 * MAX_EXCERPT].strip()[: MAX_EXCERPT + 1]
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in start)
    return text if len(text) <= MAX_EXCERPT else text[: MAX_EXCERPT - 1] + "…"


def _decoded(raw: bytes) -> str:
    """Text of the beginning of a row, in the encoding that it seems to have."""
    try:
        is_cut = len(raw) == 4 * MAX_EXCERPT
        return codecs.getincrementaldecoder("utf-8")().decode(raw, final=not is_cut)
    except UnicodeDecodeError:
        return raw.decode(encoding_of(raw) or "utf-8", "backslashreplace")


# --------------------------------------------------------------------------- lines


def around(raw: bytes, place: int) -> bytes:
    """Cut out the part of a line that is near a byte, for a guess of the encoding."""
    begin = raw.rfind(b"\n", 0, place) + 1
    begin = begin if place - begin <= 4 * MAX_EXCERPT else place
    return raw[begin : place + 4 * MAX_EXCERPT]


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]] | BadRow]:
    r"""Read one JSON object per line; yield (line number from 1, object) or the bad row.

    Only \n ends a line (\r in a file without any \n), so U+2028 and U+0085 stay inside texts. Blank lines are skipped.
    """
    decoder, faults = strict_decoder()
    with path.open("rb") as handle:
        head = handle.read(HEAD_BYTES)
        if wrong := _not_lines(head):
            yield wrong.at(f"{path}:1", head, num_rows=None)
            return
        handle.seek(0)
        offset = 0
        for number, raw in enumerate(_lines(handle, head), 1):
            if number == 1:
                offset = len(raw) - len(raw.removeprefix(BOM))
                raw = raw.removeprefix(BOM)
            if not _is_blank(raw):
                try:
                    yield number, _parse_line(raw, offset, decoder, faults)
                except RowFault as fault:
                    yield fault.at(f"{path}:{number}", raw)
            offset += len(raw)


def count_blank_lines(path: Path) -> int:
    """Count the lines of white space only."""
    with path.open("rb") as handle:
        head = handle.read(HEAD_BYTES)
        handle.seek(0)
        return sum(map(_is_blank, _lines(handle, head)))


def _is_blank(raw: bytes) -> bool:
    return raw.isspace() or not raw or (raw.lstrip()[0] > 127 and not raw.decode("utf-8", "replace").strip())


def _lines(handle: Iterable[bytes], head: bytes) -> Iterable[bytes]:
    if b"\n" not in head and b"\r" in head.rstrip(b"\r"):
        return b"".join(handle).splitlines(keepends=True)
    return handle


def _parse_line(raw: bytes, offset: int, decoder: json.JSONDecoder, faults: list[RowFault]) -> dict[str, Any]:
    faults.clear()
    try:
        text = raw.decode().rstrip(SPACES)  # or a cut-off string would seem to hold a raw line break
        value = decoder.decode(text)
    except UnicodeDecodeError as error:
        place = f"at offset {offset + error.start} of the file"
        raise bad_utf8(error.object[error.start], place, around(raw, error.start)) from None
    except json.JSONDecodeError as error:
        raise explain(error, 0) from None
    except RecursionError:
        raise RowFault("E_DEPTH", f"nested deeper than {MAX_DEPTH} levels") from None
    check_value(text, 0, len(text), value, faults)
    if type(value) is not dict:
        raise RowFault("E_NOT_OBJECT", f"the row is {type_name(value)}, expected an object")
    return value


def _not_lines(head: bytes) -> RowFault | None:
    """Return the fault of a file that is not JSON lines."""
    if wrong := wrong_encoding(head):
        return wrong
    seems = seems_to_be(head)
    if seems in ("CSV", "plain text"):
        fix = "name it .csv or set format: csv" if seems == "CSV" else "name it .txt or set format: text"
        return RowFault("E_ENCODING", f"the file seems to be {seems}, not JSON lines", fix)
    body = head.removeprefix(BOM).lstrip()
    if not body.startswith(b"["):
        return None
    first, *others = body.splitlines()
    others = [line for line in others if line.strip()]
    if others and (_parses(first) or (first.strip() != b"[" and _parses(others[0]))):
        return None  # the row begins like an array, not the file
    return RowFault(
        "E_ENCODING", "the file is one JSON array, not one object per line", "name it .json or set format: json"
    )


def seems_to_be(head: bytes) -> str:
    """Name the format of a file by its content: JSON lines, one JSON array, CSV, plain text, or "" for none of them.

    Args:
        head: the beginning of the file, in UTF-8.
    """
    body = head.removeprefix(BOM).lstrip()
    lines = [line.strip() for line in body.splitlines() if line.strip()]
    lines = lines[:-1] if len(head) >= HEAD_BYTES else lines  # the last one may be cut off
    lines = lines[:MAX_SNIFFED]
    if lines and all(line.startswith(b"{") for line in lines) and all(map(_parses, lines[:3])):
        return "JSON lines"
    if re.match(rb'\[\s*\{\s*"', body) or (body.startswith(b"[") and _parses(body)):
        return "one JSON array"
    if len(lines) > 1 and _is_delimited(lines):
        return "CSV"
    looks_like_json = any(re.match(rb"""[\[{"']|//|#|-?\d|(null|true|false|None|NaN)\b""", line) for line in lines)
    return "plain text" if len(lines) > 1 and not looks_like_json else ""


def _is_delimited(lines: list[bytes]) -> bool:
    """True if lines have as many commas, semicolons or tabs each as the first, which names a known field."""
    for delimiter in (b",", b";", b"\t"):
        names = {folded(name.decode("utf-8", "replace").strip('" ')) for name in lines[0].split(delimiter)}
        if (
            len(names) > 1
            and names & COLUMNS
            and all(line.count(delimiter) == lines[0].count(delimiter) for line in lines)
        ):
            return True
    return False


def _parses(line: bytes) -> bool:
    try:
        json.loads(line)
        return True
    except (ValueError, RecursionError):
        return False


def wrong_encoding(head: bytes) -> RowFault | None:
    """Return the fault of a file that is not UTF-8, with a guess of its encoding."""
    guess = guess_encoding(head)
    if guess is None:
        return None
    what = f"the file is not {'plain' if guess in REMEDIES else 'UTF-8'} text; it seems to be {guess}"
    return RowFault("E_ENCODING", what, REMEDIES.get(guess) or f"iconv -f {guess} -t UTF-8 FILE > NEW")


# --------------------------------------------------------------------------- faults


def strict_decoder() -> tuple[json.JSONDecoder, list[RowFault]]:
    """Return a decoder, and the list to which it adds the faults of values that it could decode."""
    faults: list[RowFault] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(items)
        if len(row) != len(items):
            names = [name for name, _ in items]
            name = next(name for name in names if names.count(name) > 1)
            faults.append(RowFault("E_DUPKEY", f'the key "{excerpt(name)}" occurs twice'))
        return row

    def integer(digits: str) -> int:
        if len(digits) < 19 or (len(digits) < 21 and -(2**63) <= int(digits) < 2**64):
            return int(digits)
        faults.append(RowFault("E_RANGE", f"the number {excerpt(digits)} does not fit into 64 bits"))
        return 0

    def real(digits: str) -> float:
        value = float(digits)
        if value in (float("inf"), float("-inf")):
            faults.append(RowFault("E_RANGE", f"the number {excerpt(digits)} is too large"))
        return value

    def constant(name: str) -> None:
        faults.append(RowFault("E_NONFINITE", f"{name} is not a JSON number"))

    hooks: dict[str, Any] = {"parse_int": integer, "parse_float": real, "parse_constant": constant}
    return json.JSONDecoder(object_pairs_hook=pairs, **hooks), faults


def check_value(text: str, start: int, end: int, value: object, faults: list[RowFault]) -> None:
    """Raise the first fault of a decoded value, text[start:end]."""
    if faults:
        raise faults[0]
    if end - start > MAX_DEPTH and _depth(text, start, end) > MAX_DEPTH:
        raise RowFault("E_DEPTH", f"nested deeper than {MAX_DEPTH} levels")
    if _SURROGATE_ESCAPE.search(text, start, end):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ord(error.object[error.start])
            raise RowFault("E_SURROGATE", f"\\u{half:04x} is half of a character") from None


def _depth(text: str, start: int, end: int) -> int:
    """Return the nesting depth, or an upper bound of it for few brackets."""
    brackets = text.count("[", start, end) + text.count("{", start, end)
    if brackets <= MAX_DEPTH:
        return brackets
    depth = deepest = 0
    for match in BRACKETS.finditer(text, start, end):
        if match[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif match[0] in "]}":
            depth -= 1
    return deepest


def bad_utf8(byte: int, place: str, raw: bytes) -> RowFault:
    """Return the fault of a byte, with a guess of the encoding of its row.

    Args:
        place: position of the byte, such as "at offset 7 of the file"; raw: the row, or what is near the byte.
    """
    guess = encoding_of(raw)
    fix = f"; the row seems to be {guess}: where all are, iconv -f {guess} -t UTF-8 FILE > NEW" if guess else ""
    return RowFault("E_UTF8", f"byte 0x{byte:02x} {place} is not UTF-8", FIXES["E_UTF8"] + fix)


def explain(error: json.JSONDecodeError, start: int, column: int | None = None) -> RowFault:
    """Describe the fault of broken JSON.

    Args:
        start: beginning of its line in `error.doc`; column: column of the fault, if the document does not have it.
    """
    text, position = error.doc, error.pos
    blanks = SPACE.match(text, position)
    assert blanks is not None
    line, rest = text[start : start + MAX_EXCERPT].lstrip(" \t"), text[blanks.end() : blanks.end() + MAX_EXCERPT]
    place = f"column {error.colno if column is None else column}"
    control = _CONTROL.search(text, start, position + 1)
    if control or error.msg.startswith("Invalid control character"):
        char = control[0] if control else text[position : position + 1]
        return RowFault("E_CTRL", f"raw control character {_char_name(char)} at {place}")
    extra = error.msg.startswith("Extra data")
    if extra and rest[:1] in tuple('{["'):
        return RowFault("E_EXTRA", f"a second JSON value begins at {place}")
    if line.startswith("\ufeff"):
        return RowFault(
            "E_JSON", "a byte order mark stands before the row", "remove U+FEFF; only a file may begin with it"
        )
    if line.startswith(("//", "#", "/*")) or rest.startswith(("//", "#", "/*")):
        return RowFault("E_JSON", f"a comment at {place}; JSON has none", "remove the comment")
    if (extra and rest[:1] == ",") or re.search(r",\s*[}\]]", text[max(start, position - 9) : position + 9]):
        return RowFault("E_JSON", f"a trailing comma at {place}", "remove the comma")
    if rest.startswith("'") or re.match(r"(None|True|False)\b", rest):
        return RowFault(
            "E_JSON", f"Python notation at {place}, not JSON", "write rows with json.dumps(row, ensure_ascii=False)"
        )
    if not rest or error.msg.startswith("Unterminated string"):
        return RowFault(
            "E_JSON", "the row ends before its value does", "complete it; write a line break inside a string as \\n"
        )
    return RowFault("E_JSON", f"{error.msg} at {place}")


def _char_name(char: str) -> str:
    return f"U+{ord(char):04X}" if char else "at the end"


def type_name(value: object) -> str:
    """JSON type of a value, with its article."""
    names = {str: "a string", list: "a list", dict: "an object", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def missing(fields: tuple[str, ...], present: list[str], kind: str = "field", fix: str = "") -> RowFault:
    """Return the fault of a row without any of `fields`."""
    wanted = " or ".join(f'"{name}"' for name in fields)
    return RowFault("E_MISSING", f"no {kind} {wanted}; {there_is(present)}", fix)


def there_is(present: Sequence[str]) -> str:
    """Name the fields that there are; not what seems to be a row of data in the place of a header."""
    if looks_like_data(present):
        return "the first row looks like data, not like names of columns"
    return "there is " + (", ".join(f'"{excerpt(name[:40])}"' for name in present[:20]) or "none")


def twice(error: SpellingError) -> RowFault:
    """Return the fault of two fields that could be the same known one."""
    one, other, meant = (excerpt(name[:40]) for name in error.names)
    what = f'"{one}" and "{other}" could both be "{meant}"'
    return RowFault("E_DUPKEY", what, f'call the one that is meant "{meant}", and the other something else')
