import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.data.sources.example import BadRow, place_of
from unpad.data.sources.faults import MAX_EXCERPT
from unpad.data.sources.json_rows import read_array, read_lines
from unpad.data.sources.row import Row

GOOD = b'{"text": "ok"}\n'

# (name, the second line of a file, code, line); every other line of the file is good
BAD_LINES: list[tuple[str, bytes, str, int]] = [
    ("invalid UTF-8", b'{"text": "a\xffb"}', "E_UTF8", 2),
    ("lone surrogate in a key", rb'{"text": "a", "\uDC00": 1}', "E_SURROGATE", 2),
    ("raw tab in a string", b'{"text": "a\tb"}', "E_CTRL", 2),
    ("truncated after a value", b'{"text": "a"', "E_JSON", 2),
    ("two objects with a space", b'{"text": "a"} {"text": "b"}', "E_EXTRA", 2),
    ("nested duplicate key", b'{"text": "a", "x": {"y": 1, "y": 1}}', "E_DUPKEY", 2),
    ("duplicate key by escape", rb'{"text": "a", "te\u0078t": "b"}', "E_DUPKEY", 2),
    ("5,000 digits", b'{"text": "a", "x": ' + b"1" * 5000 + b"}", "E_RANGE", 2),
    ("Python repr", b"{'text': 'a'}", "E_JSON", 2),
    ("None", b'{"text": None}', "E_JSON", 2),
    ("trailing comma", b'{"text": "a",}', "E_JSON", 2),
    ("comma after the object", b'{"text": "a"},', "E_JSON", 2),
    ("comment after the object", b'{"text": "a"} # why', "E_JSON", 2),
    ("byte order mark", b'\xef\xbb\xbf{"text": "a"}', "E_JSON", 2),
]
HINTS = {
    "Python repr": "Python notation",
    "None": "Python notation",
    "trailing comma": "trailing comma",
    "comma after the object": "trailing comma",
    "byte order mark": "byte order mark",
    "invalid UTF-8": "0xff at offset 26",
    "duplicate key by escape": '"text"',
}


def lines_of(tmp_path: Path, content: bytes) -> tuple[dict[int, Any], list[BadRow]]:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    return divided(read_lines(path))


def divided(items: Iterable[Row | BadRow]) -> tuple[dict[int, Any], list[BadRow]]:
    """Values of good rows by line or element, and the bad ones."""
    good, bad = dict[int, Any](), list[BadRow]()
    for item in items:
        if isinstance(item, BadRow):
            bad.append(item)
        else:
            good[int(place_of(item.where).item.strip(":[]"))] = item.value
    return good, bad


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""], ids=["LF", "CRLF", "end of file"])
@pytest.mark.parametrize(("name", "line", "code", "number"), BAD_LINES, ids=[row[0] for row in BAD_LINES])
def test_a_bad_line_is_named_and_its_neighbours_are_kept(tmp_path, name, line, code, number, end):
    good, bad = lines_of(tmp_path, GOOD + line + end + (GOOD if end else b""))
    assert [(row.where, row.code) for row in bad] == [(f"{tmp_path}/rows.jsonl:{number}", code)]
    assert sorted(good) == ([1, 3] if end else [1])
    assert HINTS.get(name, "") in bad[0].what
    assert bad[0].fix
    assert len(bad[0].excerpt) <= MAX_EXCERPT
    assert bad[0].excerpt.isprintable()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"text": "a\u2028b\u0085c\u2029"}'.encode(), "a\u2028b\u0085c\u2029"),
        (rb'{"text": "\ud83d\ude00"}', "😀"),
        (rb'{"text": "\\ud800"}', "\\ud800"),
        (b'{"text": "' + b"x" * 3_000_000 + b'"}', "x" * 3_000_000),
        (b'  {"text":"a"}\t', "a"),
        ('{"text": "a\u3000"}\u3000\u00a0\u2028\r'.encode(), "a\u3000"),
        (b'{"text": "' + b"[{" * 600 + b'"}', "[{" * 600),
        (b'{"text": "a", "id": 18446744073709551615, "x": 1.5e3}', "a"),
    ],
)
def test_what_is_legal_passes_unchanged(tmp_path: Path, line: bytes, text: str) -> None:
    good, bad = lines_of(tmp_path, GOOD + line + b"\n" + GOOD)
    assert not bad
    assert good[2]["text"] == text
    assert sorted(good) == [1, 2, 3]


def test_blank_lines_never_shift_line_numbers(tmp_path: Path) -> None:
    good, bad = lines_of(tmp_path, b"\n \t\n" + GOOD + b"\r\n" + b"null\n" + b"\n")
    assert list(good) == [3]
    assert bad[0].where.endswith(":5")


def test_carriage_returns_alone_end_lines_where_there_are_no_others(tmp_path: Path) -> None:
    good, bad = lines_of(tmp_path, b'{"text": "a"}\r{"text": "b"}\rnull\r{"text": "c"}')
    assert [row["text"] for row in good.values()] == ["a", "b", "c"]
    assert bad[0].where.endswith(":3")


def test_a_byte_order_mark_at_the_beginning_is_no_content(tmp_path: Path) -> None:
    good, bad = lines_of(tmp_path, b"\xef\xbb\xbf" + GOOD + b'{"text": "\xff"}')
    assert good == {1: {"text": "ok"}}
    assert "offset 28" in bad[0].what


@pytest.mark.parametrize(
    ("content", "guess"),
    [
        (gzip.compress(GOOD, mtime=0), "gzip"),
        ((GOOD * 3).decode().encode("utf-16"), "UTF-16"),
        ('{"text": "学习效率的提升依赖于专注"}\n'.encode("gb18030") * 3, "GB18030"),
        (b'["a", "b"]', "JSON array"),
        (b'[\n  {"text": "a"},\n  {"text": "b"}\n]\n', "JSON array"),
        (b'[{"text": "a"},\n{"text": "b"}]', "JSON array"),
        (b'[\n{"text": "a"}\n]\n', "JSON array"),
    ],
)
def test_a_file_of_another_kind_is_one_bad_row_that_says_so(tmp_path: Path, content: bytes, guess: str) -> None:
    good, bad = lines_of(tmp_path, content)
    assert not good
    assert [(row.code, row.where[-2:]) for row in bad] == [("E_ENCODING", ":1")]
    assert guess in bad[0].what


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 200), st.binary(min_size=0, max_size=3)), max_size=6))
def test_every_line_of_a_damaged_file_is_read_or_named(tmp_path_factory, edits):
    content = bytearray('{"text": "学习\\u00e9", "x": [1.5, null]}\n'.encode() * 5)
    for position, piece in edits:
        content[position : position + 1] = piece
    path = tmp_path_factory.getbasetemp() / "damaged.jsonl"
    path.write_bytes(bytes(content))
    items = list(read_lines(path))
    if [item.code for item in items if isinstance(item, BadRow)] == ["E_ENCODING"]:
        return
    numbers = [place_of(item.where).line for item in items]
    body = bytes(content).removeprefix(b"\xef\xbb\xbf")
    assert numbers == [n for n, line in enumerate(body.split(b"\n"), 1) if line.strip()]
    for line, value in divided(items)[0].items():
        assert value == json.loads(body.split(b"\n")[line - 1])


# --------------------------------------------------------------------------- arrays


def array_of(tmp_path: Path, content: bytes) -> tuple[dict[int, Any], list[tuple[str, str]]]:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    good, bad = divided(read_array(path))
    return good, [(row.where.removeprefix(str(path)), row.code) for row in bad]


def test_an_array_is_read_in_order(tmp_path: Path) -> None:
    assert array_of(tmp_path, '\ufeff [ "甲",\n {"text": "乙"} , null ]\n'.encode()) == (
        {0: "甲", 1: {"text": "乙"}, 2: None},
        [],
    )
    assert array_of(tmp_path, b"[]") == ({}, [])


@pytest.mark.promise("data.files")
@pytest.mark.parametrize(
    ("content", "used", "bad"),
    [
        (rb'["a", "\ud800", "b"]', [0, 2], [("[1]", "E_SURROGATE")]),
        (b'[{"x": 1, "x": 2}, "b"]', [1], [("[0]", "E_DUPKEY")]),
        (b'["a", NaN, [1e999], {"k": "v"}]', [0, 3], [("[1]", "E_NONFINITE"), ("[2]", "E_RANGE")]),
        (b'["a",\n"b",\n"c', [0, 1], [(":3", "E_JSON")]),
        (b'["a",\n"b",\n]', [0, 1], [(":3", "E_JSON")]),
        (b'["a"\n"b"]', [0], [(":2", "E_JSON")]),
        (b'["a",\n"b\nc"]', [0], [(":2", "E_CTRL")]),
        (b'["a"]\n["b"]', [0], [(":2", "E_EXTRA")]),
        (b'["a",\n"\xff", "b"]', [0, 2], [("[1]", "E_UTF8")]),
        ('["甲"\u3000,\u00a0"乙"\u2028]\u3000'.encode(), [0, 1], []),
        (b'["a", ' + b"[" * 3000 + b'"]"' + b"]" * 3000 + b', "b"]', [0, 2], [("[1]", "E_DEPTH")]),
        (b'{"text": "a"}\n{"text": "b"}', [], [(":1", "E_TYPE")]),
        (b"null", [], [(":1", "E_TYPE")]),
        (b"", [], [(":1", "E_EMPTY")]),
        (gzip.compress(b"[]", mtime=0), [], [(":1", "E_ENCODING")]),
        (b'["a", ' + b"[" * 100_000 + b"]", [0], [(":1", "E_DEPTH")]),
        (b'["a", ' + b"[" * 600 + b"]" * 600 + b"]", [0], [("[1]", "E_DEPTH")]),
    ],
)
def test_a_fault_in_an_array_names_element_or_line(tmp_path, content, used, bad):
    good, found = array_of(tmp_path, content)
    assert (list(good), found) == (used, bad)
