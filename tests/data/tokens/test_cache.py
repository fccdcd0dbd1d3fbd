"""A shard comes back as it was written, or is refused before it is mapped."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.faults import at_operation, kill
from tests.helpers.processes import in_child
from unpad.data.sources.example import BadRow, Unread
from unpad.data.tokens import cache
from unpad.data.tokens.cache import Shard, make_key, open_shard, pack_details, pack_faults, shard_path, write_shard
from unpad.errors import SourceError
from unpad.storage import disk, sha256

KEY = make_key("test")
DETAILS = ([":1", ":2", ":3"], ["", "水", ""], [(), ("水", "火"), ()])


def make_shard(num_rows: int = 3, dtype: str = "<u2") -> Shard:
    rows = np.arange(num_rows)
    lengths = 2 + rows
    return Shard(
        tokens=np.arange(lengths.sum()).astype(dtype),
        loss_mask=np.arange(lengths.sum()) % 3 > 0,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        content_key=(rows.astype(np.uint64) + 1) * np.uint64(2**63 // 7),
        declared=np.full(num_rows, -1, np.int8),
        copy=np.zeros(num_rows, np.uint8),
        num_targets=lengths.astype(np.int32),
        target_chars=lengths.astype(np.int32),
        target_bytes=(3 * lengths).astype(np.int32),
        num_chars=lengths.astype(np.int32),
        lost_chars=(rows % 2).astype(np.int32),
        lost_target_chars=(rows % 2).astype(np.int32),
        lost_target_bytes=(rows % 2 * 3).astype(np.int32),
        num_system=rows.astype(np.int32),
        num_chosen=(rows % 2).astype(np.int32),
        details=pack_details(
            *(column[:num_rows] for column in DETAILS), Counter(rare=1, 水=3) if num_rows else Counter()
        ),
        faults=pack_faults([BadRow("a/文.jsonl:7", "E_UTF8", "bad bytes", "mend it", "…")], Unread(), "a/文.jsonl"),
    )


@pytest.fixture(params=["mapped", "in memory"])
def folder(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache, "MAP_FROM", 0 if request.param == "mapped" else 1 << 30)
    return tmp_path


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("num_rows", [0, 3])
def test_a_shard_comes_back_as_written(folder, dtype, num_rows):
    shard = make_shard(num_rows, dtype)
    assert open_shard(folder, KEY) == (None, "")
    write_shard(folder, KEY, shard)
    opened, damage = open_shard(folder, KEY)
    assert damage == ""
    for field in fields(Shard):
        array = getattr(opened, field.name)
        np.testing.assert_array_equal(array, getattr(shard, field.name))
        assert array.dtype == getattr(shard, field.name).dtype
        assert not array.flags.writeable
        assert array.ctypes.data % array.itemsize == 0


def test_every_flipped_byte_and_every_other_length_is_noticed(folder):
    write_shard(folder, KEY, make_shard())
    path = shard_path(folder, KEY)
    whole = path.read_bytes()
    flipped = (whole[:at] + bytes([byte ^ 1 << at % 8]) + whole[at + 1 :] for at, byte in enumerate(whole))
    shorter = (whole[:length] for length in range(len(whole)))
    for data in (*flipped, *shorter, whole + b"\0", bytes(len(whole))):
        path.write_bytes(data)
        shard, reason = open_shard(folder, KEY)
        assert shard is None, data
        assert reason, data


def test_the_key_of_the_code_covers_reading_splitting_and_encoding():
    assert cache.code_files() == sorted(cache.code_files()), "in any order of the folder"
    names = {f"{path.parent.name}/{path.name}" for path in cache.code_files()}
    assert {"sources/reader.py", "sources/chat.py", "sources/split.py", "tokens/encode.py", "tokens/words.py"} <= names


def test_the_key_of_the_code_changes_with_its_files_and_with_its_libraries(tmp_path, monkeypatch):
    file = tmp_path / "encode.py"
    monkeypatch.setattr(cache, "code_files", lambda: [file])
    keys = []
    for content, number in (("one", "1.0"), ("two", "1.0"), ("two", "1.1")):
        file.write_text(content)
        monkeypatch.setattr(cache, "version", lambda name, number=number: number if name == "tokenizers" else "0")
        cache.code_key.cache_clear()
        keys.append(cache.code_key())
    cache.code_key.cache_clear()
    assert len(set(keys)) == 3


def test_the_end_of_a_large_shard_is_checked_too(tmp_path):
    tokens = np.arange(3 << 19, dtype=np.uint32).astype("<u4")
    rows = {"offsets": np.array([0, 2, 5, tokens.size]), "loss_mask": np.ones(tokens.size, np.bool_)}
    large = replace(make_shard(), tokens=tokens, **rows)
    write_shard(tmp_path, KEY, large)
    path = shard_path(tmp_path, KEY)
    whole = path.read_bytes()
    assert len(whole) > 5 << 20, "several reads of the check"
    opened, damage = open_shard(tmp_path, KEY)
    assert damage == ""
    np.testing.assert_array_equal(opened.tokens, large.tokens)
    for position in (len(whole) - 1, len(whole) // 2):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert open_shard(tmp_path, KEY) == (None, "sha256 mismatch")


def test_a_shard_under_another_name_is_refused(folder):
    write_shard(folder, KEY, make_shard())
    other = make_key("other")
    shard_path(folder, other).parent.mkdir(parents=True, exist_ok=True)
    shard_path(folder, KEY).rename(shard_path(folder, other))
    assert open_shard(folder, other) == (None, "belongs to another key")


def test_a_kill_at_any_operation_leaves_no_half_shard(tmp_path):
    codes = []
    while 0 not in codes:
        folder, hook = tmp_path / str(len(codes)), at_operation(len(codes), kill)

        def build(folder: Path = folder, hook: Callable[[str, Path], None] = hook) -> None:
            disk.operation = hook
            write_shard(folder, KEY, make_shard())

        codes.append(in_child(build))
        shard, damage = open_shard(folder, KEY)
        assert damage == ""
        assert shard is not None or codes[-1] == -signal.SIGKILL
        write_shard(folder, KEY, make_shard())
        assert [path.name for path in folder.rglob("*") if path.is_file()] == [f"{KEY}.tokens"]
    assert len(codes) > 5
    assert {*codes} == {-signal.SIGKILL, 0}


def test_a_write_survives_the_clean_up_of_another_machine(tmp_path, monkeypatch):
    removed: list[str] = []

    def remove_once(name: str, path: Path) -> None:
        if name == "rename" and not removed:
            removed.extend(str(leftover) for leftover in path.parent.glob(".tmp-*"))
            Path(removed[0]).unlink()

    monkeypatch.setattr(disk, "operation", remove_once)
    write_shard(tmp_path, KEY, make_shard())
    assert removed
    assert open_shard(tmp_path, KEY)[0] is not None


def test_two_builders_at_once_leave_one_whole_shard(tmp_path):
    def build() -> None:
        for _ in range(50):
            write_shard(tmp_path, KEY, make_shard())

    child = os.fork()
    if child == 0:
        build()
        os._exit(0)
    build()
    assert os.waitpid(child, 0)[1] == 0
    write_shard(tmp_path / "alone", KEY, make_shard())
    assert shard_path(tmp_path, KEY).read_bytes() == shard_path(tmp_path / "alone", KEY).read_bytes()
    assert len(list(shard_path(tmp_path, KEY).parent.iterdir())) == 1


@pytest.mark.promise("input.tokens")
@pytest.mark.parametrize("wrong", [{"num_chars": np.zeros(2, np.int32)}, {"offsets": np.array([0, 9, 5, 9])}])
def test_columns_that_do_not_fit_each_other_are_made_again(tmp_path, wrong):
    write_shard(tmp_path, KEY, replace(make_shard(), **wrong))
    assert open_shard(tmp_path, KEY) == (None, "has columns that do not fit each other")


@pytest.mark.promise("input.tokens")
@pytest.mark.parametrize("details", [b"[", b"[]", b'{"where": []}', b'{"where": [1, 2, 3]}'])
def test_details_of_another_program_are_refused(tmp_path, details):
    write_shard(tmp_path, KEY, replace(make_shard(), details=np.frombuffer(details, np.uint8)))
    opened, _ = open_shard(tmp_path, KEY)
    with pytest.raises(SourceError, match="stored tokens hold no usable details"):
        opened.where(0)


@pytest.mark.skipif(os.name != "posix", reason="the time of the last change is the system's own there alone")
def test_a_large_file_is_hashed_again_only_once_it_was_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "NOTED_FROM", 5)
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    path, hashed = tmp_path / "large", list[str]()
    path.write_text("first")

    def noted() -> str:
        with path.open("rb") as file:
            return cache.noted_sha256(file)

    real = cache.hashlib.file_digest
    monkeypatch.setattr(cache.hashlib, "file_digest", lambda *given: (hashed.append(""), real(*given))[1])
    assert noted() == noted() == sha256("first")
    assert len(hashed) == 2  # it was written just now, and may be again within the same tick of the clock
    monkeypatch.setattr(cache, "SETTLED", -1.0)
    assert noted() == noted() == sha256("first")
    assert len(hashed) == 3
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_text("other")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # of equal size, and of equal time
    assert noted() == sha256("other")
