"""A folder with a manifest is absent or complete, and damage in it is found."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.faults import at_operation, fail_full, kill, names_in, operations
from tests.helpers.processes import in_child
from unpad import storage
from unpad.errors import CheckpointError, DiskError
from unpad.storage import disk, folders

FILES = {"a.bin": b"alpha" * 50, "b.json": b"{}\n", "empty": b""}


def test_a_folder_reads_back_and_verifies(tmp_path):
    storage.write_folder(tmp_path / "cache", FILES)
    storage.read_folder(tmp_path / "cache")
    assert storage.read_folder(tmp_path / "cache") == FILES
    assert storage.read_folder(tmp_path / "cache", ["b.json"]) == {"b.json": b"{}\n"}
    assert storage.sha256_file(tmp_path / "cache/a.bin") == storage.sha256(FILES["a.bin"])
    assert names_in(tmp_path) == ["cache"]


def test_a_folder_is_written_once(tmp_path):
    storage.write_folder(tmp_path / "cache", FILES)
    storage.write_folder(tmp_path / "cache", FILES)
    with pytest.raises(DiskError, match="exists with other contents"):
        storage.write_folder(tmp_path / "cache", {**FILES, "empty": b"no"})
    assert storage.read_folder(tmp_path / "cache") == FILES
    assert names_in(tmp_path) == ["cache"]


@pytest.mark.parametrize("write", [storage.write_folder, storage.replace_folder])
def test_a_folder_killed_while_it_is_written_is_absent_or_complete(tmp_path, monkeypatch, write):
    count = len(operations(lambda: write(tmp_path / "count", FILES), monkeypatch))
    for number in range(count):
        parent = tmp_path / str(number)
        parent.mkdir()

        def killed(number: int = number, parent: Path = parent) -> None:
            disk.operation = at_operation(number, kill)
            write(parent / "cache", FILES)

        assert in_child(killed) == -signal.SIGKILL
        storage.clean_leftovers(parent)
        assert names_in(parent) in ([], ["cache"])
        if names_in(parent):
            assert storage.read_folder(parent / "cache") == FILES
        write(parent / "cache", FILES)
        assert storage.read_folder(parent / "cache") == FILES


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    count = len(operations(lambda: storage.write_folder(tmp_path / "count", FILES), monkeypatch))
    for number in range(count - 1):  # the last is the flush of a name that already stands
        with monkeypatch.context() as patch:
            patch.setattr(disk, "operation", at_operation(number, fail_full))
            with pytest.raises(DiskError):
                storage.write_folder(tmp_path / "cache", FILES)
        assert names_in(tmp_path) == ["count"]


def test_a_folder_whose_replacement_fails_is_put_back(tmp_path, monkeypatch):
    path = tmp_path / "best"
    storage.write_folder(path, FILES)
    fails = iter([True])

    def hook(name: str, place: Path) -> None:
        if name == "rename" and place == path and next(fails, False):
            fail_full()

    monkeypatch.setattr(disk, "operation", hook)
    with pytest.raises(DiskError):
        storage.replace_folder(path, {"a.bin": b"new"})
    assert names_in(tmp_path) == ["best"]
    assert storage.read_folder(path) == FILES


def to_link(path: Path, outside: Path) -> None:
    path.rename(outside)
    path.symlink_to(outside)


DAMAGES: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "flip": ("a.bin sha256 mismatch", lambda path, _: path.write_bytes(b"b" + FILES["a.bin"][1:])),
    "shorten": ("a.bin has size 249, expected 250", lambda path, _: path.write_bytes(FILES["a.bin"][:-1])),
    "grow": ("a.bin has size 251, expected 250", lambda path, _: path.write_bytes(FILES["a.bin"] + b"\0")),
    "delete": ("a.bin is missing", lambda path, _: path.unlink()),
    "link": ("a.bin is a link", to_link),
    "pipe": ("a.bin is not a plain file", lambda path, _: path.unlink() or os.mkfifo(path)),
    "folder": ("a.bin cannot be read: Is a directory", lambda path, _: path.unlink() or path.mkdir()),
    "no manifest": ("MANIFEST.json is missing", lambda path, _: path.with_name("MANIFEST.json").unlink()),
    "manifest link": (
        "MANIFEST.json is a link",
        lambda path, outside: to_link(path.with_name("MANIFEST.json"), outside),
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_found_and_named(tmp_path, what):
    message, spoil = DAMAGES[what]
    folder = tmp_path / "cache"
    storage.write_folder(folder, FILES)
    spoil(folder / "a.bin", tmp_path / "outside")
    with pytest.raises(CheckpointError, match=message) as caught:
        storage.read_folder(folder)
    assert caught.value.where == str(folder)


ENTRY = {"size": 0, "sha256": storage.sha256(b"")}


@pytest.mark.parametrize(
    "text",
    [
        *(
            json.dumps({"files": {name: ENTRY}, "format": 1})
            for name in (
                "../secret", "/etc/passwd", "..", ".", "", "a/b", ".hidden", "a\0b", "MANIFEST.json", "x" * 300,
            )
        ),
        *(
            json.dumps({"files": {"a": entry}, "format": 1})
            for entry in ({}, [], None, {**ENTRY, "size": -1}, {**ENTRY, "size": True}, {**ENTRY, "sha256": "0"})
        ),
        '{"files": {"a": {"size": ' + "9" * 5000 + ', "sha256": "' + "0" * 64 + '"}}, "format": 1}',
        '{"files": {"a": {"size": NaN, "sha256": "' + "0" * 64 + '"}}, "format": 1}',
        "[" * 200_000,
        '{"a":' * 200_000,
        "[]",
        "{}",
        '{"files": [], "format": 1}',
        '{"files": {}, "format": 2}',
        "",
        "\udcff",
    ],
    ids=range(26),
)  # fmt: skip
def test_a_hostile_manifest_is_refused(tmp_path, text):
    (tmp_path / "secret").write_bytes(b"")
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "MANIFEST.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError):
        storage.read_folder(folder)


def test_a_manifest_of_the_largest_size_is_read_and_a_larger_one_is_not(tmp_path, monkeypatch):
    storage.write_folder(tmp_path / "cache", FILES)
    size = (tmp_path / "cache/MANIFEST.json").stat().st_size
    monkeypatch.setattr(folders, "MAX_MANIFEST_BYTES", size)
    assert storage.read_folder(tmp_path / "cache") == FILES
    monkeypatch.setattr(folders, "MAX_MANIFEST_BYTES", size - 1)
    with pytest.raises(CheckpointError, match="is larger than"):
        storage.read_folder(tmp_path / "cache")


def test_files_outside_the_manifest_are_never_opened(tmp_path, monkeypatch):
    storage.write_folder(tmp_path / "cache", FILES)
    (tmp_path / "cache/planted.pt").write_bytes(b"x")
    opened: list[str] = []
    real = os.open

    def recorded(path: object, *rest: int, **more: int) -> int:
        opened.append(str(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", recorded)
    storage.read_folder(tmp_path / "cache")
    assert storage.read_folder(tmp_path / "cache") == FILES
    assert set(opened) == {str(tmp_path / "cache"), "MANIFEST.json", *FILES}


def test_removing_never_leaves_half_a_folder_under_its_name(tmp_path, monkeypatch):
    storage.write_folder(tmp_path / "count", FILES)
    count = len(operations(lambda: storage.remove_folder(tmp_path / "count"), monkeypatch))
    for number in range(count):
        storage.write_folder(tmp_path / "cache", FILES)

        def killed(number: int = number) -> None:
            disk.operation = at_operation(number, kill)
            storage.remove_folder(tmp_path / "cache")

        assert in_child(killed) == -signal.SIGKILL
        storage.clean_leftovers(tmp_path)
        assert names_in(tmp_path) in ([], ["cache"])
        if names_in(tmp_path):
            storage.read_folder(tmp_path / "cache")


def test_removing_never_follows_a_link(tmp_path):
    storage.write_folder(tmp_path / "kept", FILES)
    storage.write_folder(tmp_path / "cache", FILES)
    (tmp_path / "cache/link").symlink_to(tmp_path / "kept")
    (tmp_path / "alias").symlink_to(tmp_path / "kept")
    storage.remove_folder(tmp_path / "cache")
    storage.remove_folder(tmp_path / "alias")
    assert names_in(tmp_path) == ["kept"]
    storage.read_folder(tmp_path / "kept")
