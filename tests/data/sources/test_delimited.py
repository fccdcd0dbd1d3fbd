"""Texts, conversations and images in CSV and TSV files."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from unpad.data.check import check
from unpad.data.sources.example import BadRow
from unpad.data.sources.files import expand
from unpad.data.sources.images import ImageExample, read_all
from unpad.data.sources.rows import read_file
from unpad.recipes.data import DataSettings, Source

BAD = [("4", "E_CSV", 1), ("5", "E_EMPTY", 1), ("7", "E_UTF8", 1)]


def rows_of(
    path: Path, content: str | bytes, kind: str = "text", field: str | None = None
) -> tuple[list[Any], list[Any]]:
    """[(line, texts of the turns), ...] of the used rows, [(line, code, rows), ...] of the others."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    (file,) = expand([Source(path=str(path), field=field)], Path)
    used, bad = read_file(kind, file, DataSettings())
    found = [(example.where.rpartition(":")[2], *(turn.content for turn in example.turns)) for example in used]
    return found, [(row.where.rpartition(":")[2], row.code, row.num_rows) for row in bad]


def test_a_column_of_csv_holds_texts(tmp_path: Path) -> None:
    content = 'id,text\n1,"a, b\nc ""d"""\n2,b,c\n3,\n\n4,x\xff\n5,e\n'.encode("latin-1")
    expected = [("2", 'a, b\nc "d"'), ("8", "e")]
    assert rows_of(tmp_path / "a.csv", content) == (expected, BAD)
    assert rows_of(tmp_path / "b.csv", b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n"))[1] == BAD
    assert rows_of(tmp_path / "c.csv", "body;n\nä, ö;1\n", field="body") == ([("2", "ä, ö")], [])
    assert rows_of(tmp_path / "d.tsv", "text\na, b; c\n") == ([("2", "a, b; c")], [])


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


def test_a_csv_file_may_be_the_manifest_of_images(tmp_path: Path) -> None:
    Image.new("RGB", (9, 8)).save(tmp_path / "a.png")
    (tmp_path / "a.csv").write_text("image,label,split,width\na.png,cat,val,9\ngone.png,dog,,\n")
    (file,) = expand([Source(path=str(tmp_path / "a.csv"))], Path)
    used, bad = read_all(file, DataSettings())
    assert [(image.label, image.split) for image in used] == [("cat", "holdout")]
    assert [row.code for row in bad] == ["E_MISSING"]
    assert isinstance(used[0], ImageExample)
    assert isinstance(bad[0], BadRow)


def test_json_and_csv_of_the_same_rows_give_the_same_examples(tmp_path: Path) -> None:
    rows = [{"text": "a\n“b”, c", "group": "g"}, {"text": "d"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.csv").write_text('text,group\n"a\n“b”, c",g\nd,\n', encoding="utf-8")
    read = [read_file("text", file, DataSettings())[0] for file in expand([Source(path=str(tmp_path))], Path)]
    lines, cells = ([(example.turns, example.group) for example in one] for one in read)
    assert lines == cells


def test_questions_about_images_may_be_in_csv(tmp_path: Path) -> None:
    Image.new("RGB", (9, 8)).save(tmp_path / "a.png")
    (tmp_path / "a.csv").write_text("image,question,answer,caption\na.png,what?,cat,\na.png,,,a cat\na.png,what?,,\n")
    report = check(tmp_path / "a.csv")
    assert [(file.kind, file.num_used) for file in report.files] == [("vqa", 2)]
    assert [row.code for row in report.bad] == ["E_NULL"]
