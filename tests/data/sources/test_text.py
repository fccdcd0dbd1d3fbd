from pathlib import Path
from typing import Any

import pytest

from unpad.data.sources.example import Example
from unpad.data.sources.files import expand
from unpad.data.sources.text import read
from unpad.recipes.data import DataSettings, Source


def documents(path: Path, content: bytes | None = None, field: str | None = None, **settings: Any) -> list:
    """(place, text) of each document, (place, code) of each bad row."""
    if content is not None:
        path.write_bytes(content)
    (file,) = expand([Source(path=str(path), field=field)], Path)
    found = []
    for item in read(file, DataSettings(**settings)):
        place = item.where.removeprefix(str(path))
        found.append((place, item.turns[0].content if isinstance(item, Example) else item.code))
    return found


@pytest.mark.parametrize(
    ("content", "separator", "expected"),
    [
        (b"a\nb\n\nc\n \t\n\n d \n", "auto", [(":1", "a\nb"), (":4", "c"), (":7", " d ")]),
        (b"\n\n\na", "auto", [(":4", "a")]),
        (b"a\n\nb<|endoftext|>\nc\n<|endoftext|>\n", "auto", [(":1", "a\n\nb"), (":4", "c")]),
        (b"a\n\nb\n---\nc", "\n---\n", [(":1", "a\n\nb"), (":5", "c")]),
        (b"a\r\nb\r\n\r\nc", "auto", [(":1", "a\nb"), (":4", "c")]),
        (b"a\rb\r\rc", "auto", [(":1", "a\nb"), (":4", "c")]),
        ("\ufeff甲\u2028乙\u0085".encode(), "auto", [(":1", "甲\u2028乙\u0085")]),
        (b"a\n\nb\n\xff\n\nc", "auto", [(":1", "a"), (":4", "E_UTF8"), (":6", "c")]),
        (b"a\n\nb\n\xff\nc\nd\n\ne", "auto", [(":1", "a"), (":4", "E_UTF8"), (":8", "e")]),
        (b"a\n\nb\n\0\n\nc", "auto", [(":1", "a"), (":4", "E_CTRL"), (":6", "c")]),
        ("学习效率的提升".encode("gb18030"), "auto", [(":1", "E_ENCODING")]),
        (b"a\n\nbcdef\n\n\ng\n\n\xff", {"join": 8}, [(":1", "a\n\nbcdef"), (":8", "E_UTF8")]),
        (b"a \nb\n\nc\n  d\ne", {"unwrap": True}, [(":1", "a b"), (":4", "c\n  d e")]),
        ("甲\n乙。\r\n丙 b\n丁".encode(), {"unwrap": True}, [(":1", "甲乙。丙 b 丁")]),
        (b"", "auto", []),
        (b" \n\n \n", "auto", []),
    ],
)
def test_plain_text_is_split_at_its_separator(tmp_path, content, separator, expected):
    settings = separator if isinstance(separator, dict) else {"separator": separator}
    assert documents(tmp_path / "a.txt", content, **settings) == expected


@pytest.mark.promise("data.files")
def test_strings_of_an_array_are_documents(tmp_path: Path) -> None:
    content = '["\\n甲 \\n\\n乙\\n", "", "\u3000", null, 3, ["x"], "\\u0000", {"text": "丙"}]'.encode()
    assert documents(tmp_path / "a.json", content) == [
        ("[0]", "甲 \n\n乙"),
        ("[1]", "E_EMPTY"),
        ("[2]", "E_EMPTY"),
        ("[3]", "E_NULL"),
        ("[4]", "E_TYPE"),
        ("[5]", "E_TYPE"),
        ("[6]", "E_NUL"),
        ("[7]", "丙"),
    ]


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (b'{"title": "a", "body": "b"}', "E_MISSING"),
        (b'{"text": 7}', "E_TYPE"),
        (b'{"text": ""}', "E_EMPTY"),
        (rb'{"text": " \n\u200b"}', "E_EMPTY"),
        (b'{"text": "a", "split": "houldout"}', "E_SPLIT"),
        (b'{"text": "a", "split": ["train"]}', "E_SPLIT"),
        (b'{"text": "a", "group": ["x"]}', "E_TYPE"),
        (b'{"text": "a", "keywords": [1]}', "E_TYPE"),
    ],
)
def test_a_row_that_is_no_document_is_named(tmp_path: Path, row: bytes, code: str) -> None:
    path = tmp_path / "a.jsonl"
    assert documents(path, b'{"text": "a"}\n' + row + b"\n") == [(":1", "a"), (":2", code)]
