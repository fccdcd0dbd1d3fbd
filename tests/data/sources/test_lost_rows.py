"""Rows that a fault takes along count as what they are, so that `data.max_bad` bounds what is lost."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unpad.data.sources.bad_rows import apply_policy
from unpad.data.sources.example import BadRow, Example, count_bad
from unpad.data.sources.files import expand
from unpad.data.sources.reader import read_file
from unpad.errors import SourceError
from unpad.recipes.data import DataSettings, Source

QUARANTINE = DataSettings(on_bad_row="quarantine", max_bad=0.01)


def read(path: Path, content: bytes | None = None, kind: str = "text") -> tuple[list[Example], list[BadRow]]:
    if content is not None:
        path.write_bytes(content)
    (file,) = expand([Source(path=str(path))], Path)
    return read_file(kind, file, DataSettings())


def judge(used: list[Any], bad: list[BadRow]) -> None:
    apply_policy(bad, len(used) + count_bad(bad), QUARANTINE)


def write_broken_page(path: Path, table: pa.Table, group: int) -> None:
    """Write row groups of 100, one of which has a page that cannot be read."""
    pq.write_table(table, path, row_group_size=100, compression="snappy", use_dictionary=False)
    offset = pq.read_metadata(path).row_group(group).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[offset : offset + 40] = b"\xff" * 40
    path.write_bytes(content)


@pytest.mark.promise("data.conversations")
def test_a_row_group_that_cannot_be_read_counts_with_its_rows_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_broken_page(path, pa.table({"text": [f"row {i} of the text" for i in range(1000)]}), group=2)
    used, bad = read(path)
    assert [example.where for example in used] == [f"{path}:{row}" for row in (*range(1, 201), *range(301, 1001))]
    assert [(row.where, row.code, row.num_rows) for row in bad] == [(f"{path}:201", "E_PARQUET", 100)]
    with pytest.raises(SourceError, match="100 of 1,000 rows"):
        judge(used, bad)


@pytest.mark.parametrize("missing", ["column", "twice"])
def test_a_parquet_file_without_the_column_counts_with_all_its_rows(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "a.parquet"
    column = pa.array(["a b"] * 50)
    names = ["body", "title"] if missing == "column" else ["text", "text"]
    pq.write_table(pa.Table.from_arrays([column, column], names=names), path)
    used, bad = read(path)
    assert not used
    assert [(row.code, row.num_rows) for row in bad] == [("E_MISSING" if missing == "column" else "E_DUPKEY", 50)]


ROWS = [json.dumps({"text": f"row {i}"}) for i in range(500)]
ARRAY = "[" + ", ".join(ROWS) + "]"


@pytest.mark.promise("data.conversations")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", ARRAY.replace('{"text": "row 300"}', 'x{"text": "row 300"}').encode()),
        ("a.json", ARRAY[: len(ARRAY) // 2].encode()),
        ("a.json", "\n".join(ROWS).encode()),
        ("a.jsonl", gzip.compress("\n".join(ROWS).encode(), mtime=0)),
        ("a.jsonl", ARRAY.encode()),
        ("a.jsonl", ("学习效率的提升依赖于专注力\n" * 3).encode("gb18030") + "\n".join(ROWS).encode()),
        ("a.json", ARRAY.encode("utf-16")),
        ("a.txt", gzip.compress("\n\n".join(ROWS).encode(), mtime=0)),
        ("a.csv", gzip.compress(b"text\n" + b"a\n" * 500, mtime=0)),
        ("a.parquet", b"PAR1" + b"x" * 100),
    ],
    ids=["typo", "cut", "objects", "gzip", "array as lines", "GBK", "UTF-16", "gzip of text", "gzip of CSV", "footer"],
)
def test_a_file_with_an_unknown_number_of_unread_rows_is_never_quarantined(
    tmp_path: Path, name: str, content: bytes
) -> None:
    path = tmp_path / name
    used, bad = read(path, content)
    assert [row.num_rows for row in bad] == [None]
    good = [Example(f"b:{i}", ()) for i in range(1000)]
    with pytest.raises(SourceError, match="never quarantined"):
        judge([*good, *used], bad)


def test_a_changed_bit_of_a_page_with_a_checksum_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"row {i:04d} of the text" for i in range(1000)]
    pq.write_table(pa.table({"text": texts}), path, compression="none", use_dictionary=False, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[content.index(b"row 0500") + 4] ^= 1
    path.write_bytes(content)
    used, bad = read(path)
    assert (len(used), [(row.code, row.num_rows) for row in bad]) == (0, [("E_PARQUET", 1000)])
