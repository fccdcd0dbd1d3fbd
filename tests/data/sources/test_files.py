import os
from pathlib import Path

import pytest

from unpad.data.histories.assemble import read_vectors
from unpad.data.histories.event_files import Sides
from unpad.data.histories.tables import TableFile, column_names, open_table
from unpad.data.sources.files import expand, list_paths
from unpad.data.sources.sniff import guess_encoding
from unpad.data.tokens.augment import load_synonyms
from unpad.errors import SourceError
from unpad.recipes.data import Source


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x", encoding="utf-8")


def names(folder: Path, path: str) -> list[str]:
    return [file.path.relative_to(folder).as_posix() for file in expand([Source(path=path)], lambda p: folder / p)]


@pytest.mark.promise("data.files")
def test_numbers_in_names_are_ordered_as_numbers(tmp_path: Path) -> None:
    write(tmp_path, "p10.json", "p2.json", "p1.json", "b10/a.txt", "b9/a.txt", "P3.json")
    assert names(tmp_path, ".") == ["b9/a.txt", "b10/a.txt", "p1.json", "p2.json", "P3.json", "p10.json"]
    assert names(tmp_path, "p*.json") == ["p1.json", "p2.json", "p10.json"]


def test_a_folder_gives_its_data_files_only_and_each_its_format(tmp_path: Path) -> None:
    write(tmp_path, "a.json", "b.jsonl", "c.txt", "d.MD", "e.parquet", "f.png", ".hidden.json", ".git/x.txt")
    files = expand([Source(path=".")], lambda p: tmp_path / p)
    assert [file.format for file in files] == ["json", "jsonl", "text", "text", "parquet"]


@pytest.mark.parametrize("path", ["none.jsonl", "none/*.jsonl", "empty"])
def test_a_path_without_data_names_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError) as caught:
        expand([Source(path=path)], Path)
    assert str(tmp_path / path) in caught.value.where
    assert caught.value.fix


@pytest.mark.parametrize(
    ("head", "guess"),
    [
        (b"\x1f\x8b\x08\x00", "gzip"),
        ("你好".encode("utf-16"), "UTF-16"),
        ('{"text": "x"}'.encode("utf-16-le"), "UTF-16"),
        ('{"text": "x"}'.encode("utf-16-be"), "UTF-16"),
        ('{"text": "学习效率的提升"}'.encode("gb18030"), "GB18030"),
        ('{"text": "学习"}'.encode(), None),
        ("学习".encode()[:-1], None),
        ("学习效率".encode() + b"\xff", None),
        (b'{"text": "\xff\xfe"}', None),
        (b"a\0", None),
        (b"", None),
    ],
)
def test_other_encodings_are_recognised(head: bytes, guess: str | None) -> None:
    assert guess_encoding(head) == guess


def test_a_name_that_is_not_utf8_is_refused_before_a_run_begins(tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    (tmp_path / os.fsdecode("中.txt".encode("gb18030"))).write_text("b")
    with pytest.raises(SourceError, match="E_NAME") as caught:
        names(tmp_path, ".")
    assert r"\xd6\xd0.txt" in caught.value.where
    assert caught.value.exit_code == 3


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.promise("input.pipes")
@pytest.mark.parametrize(
    ("read", "make"),
    [
        (lambda path: column_names(path, str(path)), os.mkfifo),
        (lambda path: open_table([TableFile(path, str(path))], {"id": ("id",)}), os.mkfifo),
        (lambda path: open_table([TableFile(path, str(path))], {"id": ("id",)}), zeros),
        (Sides.of_table, os.mkfifo),
        (lambda path: read_vectors(path, ("a",)), os.mkfifo),
        (load_synonyms, os.mkfifo),
        (load_synonyms, zeros),
        (list_paths, os.mkfifo),
        (list_paths, zeros),
    ],
)  # fmt: skip
def test_pipes_and_devices_are_refused_and_not_read(read, make, tmp_path):
    make(tmp_path / "odd.csv")
    with pytest.raises(SourceError, match=r"pipe or a device|neither a file nor a folder") as caught:
        read(tmp_path / "odd.csv")
    assert "odd.csv" in caught.value.where
