"""Files and folders survive a kill and a full disk."""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.faults import at_operation, fail_full, kill, names_in, operations
from tests.helpers.processes import in_child
from unpad import storage
from unpad.errors import DiskError
from unpad.storage import LineLog, RunLock, disk

FILES = {"a.bin": b"alpha" * 50, "b.json": b"{}\n", "empty": b""}


def test_a_killed_write_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "recipe.yaml"
    count = len(operations(lambda: storage.write_atomic(path, "old"), monkeypatch))
    assert count == 4  # write, fsync, rename, fsync of the folder
    found = set()
    for number in range(count):
        storage.write_atomic(path, "old")

        def killed(number: int = number) -> None:
            disk.operation = at_operation(number, kill)
            storage.write_atomic(path, "新" * 1000)

        assert in_child(killed) == -signal.SIGKILL
        found.add(path.read_text())
        storage.clean_leftovers(tmp_path)
        assert names_in(tmp_path) == ["recipe.yaml"]
    assert found == {"old", "新" * 1000}


def test_a_failed_write_names_path_and_bytes_and_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "file"
    storage.write_atomic(path, b"old")
    for number in range(3):
        monkeypatch.setattr(disk, "operation", at_operation(number, fail_full))
        with pytest.raises(DiskError) as caught:
            storage.write_atomic(path, b"x" * 1234)
        assert str(path) in str(caught.value)
        assert "1,234 bytes" in str(caught.value)
        assert "are free" in str(caught.value)
        assert caught.value.exit_code == 6
        assert names_in(tmp_path) == ["file"]
        assert path.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path / "missing" / "file", "No such file or directory"),
        (lambda path: path / ("x" * 300), "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_named(tmp_path, make, reason):
    with pytest.raises(DiskError, match=reason) as caught:
        storage.write_atomic(make(tmp_path), b"x")
    assert caught.value.where == str(make(tmp_path))
    assert names_in(tmp_path) == []


def test_any_name_the_system_allows_can_be_written(tmp_path):
    for name in ("x" * 255, "有 空格", "emoji 🙂", "line\nbreak"):
        storage.write_atomic(tmp_path / name, name)
        assert (tmp_path / name).read_text() == name


def test_folders_are_made_with_their_parents(tmp_path):
    storage.make_folder(tmp_path / "a/b/c")
    storage.make_folder(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").is_dir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DiskError, match="Not a directory"):
            storage.make_folder(path)


def test_the_name_of_a_new_folder_is_flushed(tmp_path, monkeypatch):
    flushed, flush = [], os.fsync

    def fsync(descriptor: int) -> None:
        flush(descriptor)
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", fsync)
    storage.make_folder(tmp_path / "a/b")
    assert flushed == [str(folder) for folder in (tmp_path.parent, tmp_path, tmp_path / "a")]
    flushed.clear()
    storage.make_folder(tmp_path / "a/b")  # whoever made it may have been killed before the flush
    assert flushed == [str(tmp_path / "a")]


def flushed_by(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what `work` really flushes and renames, in order; temporary names are all `temporary`."""
    done, flush, rename = list[str](), os.fsync, os.rename

    def name_of(path: str | Path) -> str:
        return "temporary" if Path(path).name.startswith(".tmp-") else Path(path).name

    def fsync(descriptor: int) -> None:
        flush(descriptor)
        done.append(f"flush {name_of(os.readlink(f'/proc/self/fd/{descriptor}'))}")

    def renamed(source: Path, target: Path) -> None:
        rename(source, target)
        done.append(f"rename {name_of(source)} to {name_of(target)}")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "rename", renamed)
        work()
    return done


def test_contents_are_on_the_device_before_the_name_and_the_name_before_the_call_returns(tmp_path, monkeypatch):
    parent, path = f"flush {tmp_path.name}", tmp_path / "best"
    file = ["flush temporary", "rename temporary to file", parent]
    assert flushed_by(lambda: storage.write_atomic(tmp_path / "file", b"x"), monkeypatch) == file
    contents = [f"flush {name}" for name in (*FILES, "MANIFEST.json", "temporary")]
    written = [*contents, "rename temporary to best", parent]
    assert flushed_by(lambda: storage.write_folder(path, FILES), monkeypatch) == written
    aside, gone = "rename best to .old-best", ["rename .old-best to temporary", parent, parent]
    replaced = [*contents, aside, "rename temporary to best", parent, *gone]
    assert flushed_by(lambda: storage.replace_folder(path, FILES), monkeypatch) == replaced
    removed = ["rename best to temporary", parent, parent]
    assert flushed_by(lambda: storage.remove_folder(path), monkeypatch) == removed
    log = LineLog(tmp_path / "log.jsonl")
    assert flushed_by(log.sync, monkeypatch) == ["flush log.jsonl"]
    log.close()


def test_a_private_folder_and_what_is_in_it_are_for_the_owner(tmp_path):
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        storage.make_folder(tmp_path / "open")
        storage.write_atomic(tmp_path / "open/file", "x")
        storage.write_atomic(tmp_path / "open/secret", "x", private=True)
        storage.make_folder(tmp_path / "closed/below", private=True)
        storage.write_atomic(tmp_path / "closed/below/file", "x")
        storage.write_folder(tmp_path / "closed/folder", FILES)
        storage.make_folder(tmp_path / "closed/later")
        LineLog(tmp_path / "closed/log.jsonl").close()
        with RunLock(tmp_path / "closed"):
            pass
        modes = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    finally:
        os.umask(before)
    assert [modes.pop(name) for name in ("open", "open/file", "open/secret")] == [0o755, 0o644, 0o600]
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}
    storage.make_private(tmp_path / "open")
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700


def test_space_is_checked_before_writing(tmp_path):
    storage.check_space(tmp_path / "not/yet/made", 1)
    with pytest.raises(DiskError, match=r"needs 1,000,000,000,000,000,000 bytes, [\d,]+ are free"):
        storage.check_space(tmp_path / "not/yet/made", 10**18)


@pytest.mark.promise("input.shared")
def test_cleaning_touches_only_what_dead_processes_of_ours_left(tmp_path):
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    place = ".tmp-" + "-".join(disk._place())
    ours = [f"{place}-{dead}-0123abcd-0", f"{place}-{os.getpid()}-00000000-7"]  # a pid that came round again
    others = [
        f"{place}-{os.getppid()}-0123abcd-0", f"{place}-{os.getpid()}-{disk.PROCESS}-0", ".tmp-notes", f".tmp-{dead}",
        f"{place}-{dead}-0123abcd-0.txt", ".old-best", "step-00000001",
    ]  # fmt: skip
    for name in (*ours, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    storage.clean_leftovers(tmp_path)
    assert names_in(tmp_path) == sorted(others)


@pytest.mark.promise("input.shared")
def test_what_another_host_writes_is_left_until_it_has_not_changed_for_a_day(tmp_path, monkeypatch):
    machine, _ = disk._place()
    monkeypatch.setattr(disk, "_since_start_s", lambda: 3600.0)
    clock = time.time()
    names = {
        ".tmp-11111111-22222222-900000000-0123abcd-0": 86_300,  # seconds since the change, of another host
        ".tmp-11111111-22222222-900000000-0123abcd-1": 86_500,
        f".tmp-11111111-22222222-{os.getpid()}-{disk.PROCESS}-2": 86_300,  # whose pid is this one's
        f".tmp-{machine}-22222222-900000000-0123abcd-3": 3500,  # of another container of this machine
        f".tmp-{machine}-22222222-900000000-0123abcd-4": 3700,  # of before it was started
        ".tmp-900000000-0123abcd-5": 86_300,  # of an earlier version, which may have run anywhere
        ".tmp-900000000-0123abcd-6": 86_500,
    }
    for name, age in names.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard").write_text("x")
        os.utime(tmp_path / name, (clock - 10**6, clock - 10**6))
        os.utime(tmp_path / name / "shard", (clock - age, clock - age))  # what changes is inside
    monkeypatch.setattr(time, "time", lambda: clock + 10**7)  # the clock of this host is not that of the disk
    storage.clean_leftovers(tmp_path)
    assert names_in(tmp_path) == sorted([name for name in names if name[-1] not in "146"])
    mine = disk.temporary_name(tmp_path)
    mine.touch()
    storage.clean_leftovers(tmp_path, alone=True)  # who holds the lock of a folder knows that nobody writes there
    assert names_in(tmp_path) == [mine.name]


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.delenv("UNPAD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert storage.cache_folder() == Path("/home/someone/.cache/unpad")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/tmp/x")
    assert storage.cache_folder() == Path("/var/tmp/x/unpad")
    monkeypatch.setenv("UNPAD_CACHE", "/fast/cache")
    assert storage.cache_folder() == Path("/fast/cache")


@pytest.mark.promise("input.disk")
def test_a_full_disk_says_what_is_lacking_and_never_that_there_is_enough(tmp_path, monkeypatch):
    def fill(name, path):
        if name == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "operation", fill)
    for free, what in ((10, "needs 300 bytes, 10 are free"), (9999, "needs 300 bytes; 9,999 are free, but a quota")):
        monkeypatch.setattr(disk, "free_bytes", lambda path, free=free: free)
        with pytest.raises(DiskError, match=what):
            storage.write_atomic(tmp_path / "a", b"a" * 300)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_a_quota_and_a_limit_of_sizes_are_told_as_a_lack_of_space(tmp_path, number):
    with pytest.raises(DiskError, match="needs 10 bytes") as caught, disk.disk_errors(tmp_path, 10):
        raise OSError(number, os.strerror(number))
    assert os.strerror(number) in caught.value.what
    assert "free some space (or raise your quota" in caught.value.fix
    with pytest.raises(DiskError, match="cannot write") as caught, disk.disk_errors(tmp_path, 10):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert "free some space" not in caught.value.fix


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_folder_whose_parent_nobody_may_write_is_used_and_another_fault_is_said(tmp_path, monkeypatch, code):
    def refused(path: Path, code: int = code) -> None:
        if path == tmp_path.parent:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr("unpad.storage.disk.sync_folder", refused)
    storage.make_folder(tmp_path)
    monkeypatch.setattr("unpad.storage.disk.sync_folder", lambda path: refused(path, errno.EIO))
    with pytest.raises(DiskError):
        storage.make_folder(tmp_path)
