"""Streams read the same whatever the size of their buffer."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from unpad.data.sources import arrays, documents
from unpad.data.sources.example import BadRow

GOOD = ['"甲乙"', '{"text": "a\\u00e9", "n": 12345}', "null", "-1.5e3", "[1,[2]]", '"\\ud83d\\ude00"']
ODD = ["tru", " \n", "\r\n", ",", "]", "[", '"', "x", "{", "\\", "\t", "1234567890", "NaN", "1e999", "\u3000"]
PIECES = [
    b"a", b"\n", b"\n\n", b" ", b"\t", b"\r\n", b"\r", b"\n \t\n", b"<|endoftext|>", b"<|end", "甲".encode(), b"\xff",
    b"\0", b"---", b"-",
]  # fmt: skip


def told(items: Iterable[Any]) -> list[Any]:
    return [(item.where, item.code, item.what, item.num_rows) if isinstance(item, BadRow) else item for item in items]


def test_arrays_whole_and_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, path = random.Random(0), tmp_path / "a.json"
    for _ in range(400):
        text = "[" + ", ".join(rng.choice(GOOD) for _ in range(rng.randint(0, 12))) + "]"
        for _ in range(rng.choice([0, 0, 1, 2])):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(ODD) + text[at + rng.choice([0, 1]) :]
        content = text.encode()
        at = rng.randrange(len(content))
        path.write_bytes(content if rng.random() < 0.8 else content[:at] + b"\xff" + content[at:])
        monkeypatch.setattr(arrays, "READ_BYTES", 1 << 18)
        whole = told(arrays.read_array(path))
        for size in (1, 7, 20, 64):
            monkeypatch.setattr(arrays, "READ_BYTES", size)
            assert told(arrays.read_array(path)) == whole, (content, size)


@pytest.mark.parametrize("separator", ["auto", "\n", "\n---\n", "- "])
def test_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str) -> None:
    rng, path = random.Random(1), tmp_path / "a.txt"
    for _ in range(150):
        pieces = rng.sample(PIECES, rng.randint(2, 8))
        path.write_bytes(b"".join(rng.choice(pieces) for _ in range(rng.randint(0, 40))))
        monkeypatch.setattr(documents, "READ_BYTES", 1 << 18)
        whole = told(documents.read_documents(path, separator))
        for size in (1, 3, 11):
            monkeypatch.setattr(documents, "READ_BYTES", size)
            assert told(documents.read_documents(path, separator)) == whole, (path.read_bytes(), size)
