"""Streams read the same whatever the size of their buffer."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from unpad.data.sources import documents
from unpad.data.sources.example import BadRow

PIECES = [
    b"a", b"\n", b"\n\n", b" ", b"\t", b"\r\n", b"\r", b"\n \t\n", b"<|endoftext|>", b"<|end", "甲".encode(), b"\xff",
    b"\0", b"---", b"-",
]  # fmt: skip


def told(items: Iterable[Any]) -> list[Any]:
    return [
        (item.where, item.code, item.what, item.num_rows) if isinstance(item, BadRow) else (item.where, item.value)
        for item in items
    ]


@pytest.mark.parametrize("separator", ["auto", "\n", "\n---\n", "- "])
def test_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str) -> None:
    rng, path = random.Random(1), tmp_path / "a.txt"
    for _ in range(150):
        pieces = rng.sample(PIECES, rng.randint(2, 8))
        path.write_bytes(b"".join(rng.choice(pieces) for _ in range(rng.randint(0, 40))))
        monkeypatch.setattr(documents, "READ_BYTES", 1 << 18)
        join = rng.choice([0, 7])
        whole = told(documents.read_documents(path, separator, join=join))
        for size in (1, 3, 11):
            monkeypatch.setattr(documents, "READ_BYTES", size)
            assert told(documents.read_documents(path, separator, join=join)) == whole, (path.read_bytes(), size)
