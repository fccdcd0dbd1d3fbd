"""Texts, conversations and images in CSV and TSV files."""

import json
from pathlib import Path
from typing import Any

import pytest

from unpad.data.check import check
from unpad.data.sources.files import expand
from unpad.data.sources.reader import read_file
from unpad.recipes.data import DataSettings, Source


def rows_of(
    path: Path, content: str | bytes, kind: str = "text", field: str | None = None
) -> tuple[list[Any], list[Any]]:
    """[(line, texts of the turns), ...] of the used rows, [(line, code, rows), ...] of the others."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    (file,) = expand([Source(path=str(path), field=field)], Path)
    used, bad = read_file(kind, file, DataSettings())
    found = [(example.where.rpartition(":")[2], *(turn.content for turn in example.turns)) for example in used]
    return found, [(row.where.rpartition(":")[2], row.code, row.num_rows) for row in bad]


def test_rows_of_csv_declare_split_and_group_and_empty_cells_declare_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,split,group,note\na,holdout,7,\nb,,,x\nc,some,,\n")
    (file,) = expand([Source(path=str(path))], Path)
    used, bad = read_file("text", file, DataSettings())
    assert [(one.split, one.group) for one in used] == [("holdout", "7"), (None, "")]
    assert [row.code for row in bad] == ["E_SPLIT"]


@pytest.mark.parametrize(
    ("content", "bad"),
    [
        ("", [("1", "E_EMPTY", 1)]),
        ("body\na\nb\n", [("1", "E_MISSING", 2)]),
        ("text,text\na,b\n", [("1", "E_DUPKEY", 1)]),
        ('text,n\n"a,1\nb,2\nc,3\n', [("2", "E_CSV", 3)]),
        ('text,n\n"a" b,1\n', [("2", "E_CSV", 1)]),
        ("text\n" + "学习效率的提升依赖于专注力\n" * 3, [("1", "E_ENCODING", None)]),
    ],
    ids=["empty", "missing", "twice", "no end of a quote", "after a quote", "GBK"],
)
def test_faults_of_csv_count_the_rows_that_they_take_along(tmp_path: Path, content: str, bad: list[Any]) -> None:
    raw = content.encode("gb18030") if bad[0][1] == "E_ENCODING" else content.encode()
    assert rows_of(tmp_path / "a.csv", raw) == ([], bad)


@pytest.mark.promise("data.conversations")
def test_columns_of_csv_hold_conversations(tmp_path: Path) -> None:
    content = "prompt,completion,system\nhi,ho,\n你好,你好！,be kind\n,x,\n"
    used, bad = rows_of(tmp_path / "a.csv", content, "chat")
    assert used == [("2", "hi", "ho"), ("3", "be kind", "你好", "你好！")]
    assert bad == [("4", "E_EMPTY", 1)]
    assert [file.kind for file in check(tmp_path / "a.csv").files] == ["chat"]


def test_json_and_csv_of_the_same_rows_give_the_same_examples(tmp_path: Path) -> None:
    rows = [{"text": "a\n“b”, c", "group": "g"}, {"text": "d"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.csv").write_text('text,group\n"a\n“b”, c",g\nd,\n', encoding="utf-8")
    read = [read_file("text", file, DataSettings())[0] for file in expand([Source(path=str(tmp_path))], Path)]
    lines, cells = ([(example.turns, example.group) for example in one] for one in read)
    assert lines == cells
