"""The checks of a disk pass on a sound one, and find each planted fault."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unpad.drill import files, mounts
from unpad.drill.files import TOO_FAST, check_files
from unpad.drill.findings import finding
from unpad.drill.mounts import check_names, check_permissions, is_in_memory
from unpad.terminal.finding import Finding

Patch = pytest.MonkeyPatch


@pytest.fixture
def quick(monkeypatch: Patch) -> None:
    monkeypatch.setattr(files, "BLOCK", 1 << 16)
    monkeypatch.setattr(files, "RENAMES", 60)
    monkeypatch.setattr(files, "FREED_WITHIN", 0.2)
    monkeypatch.setattr(files, "TOO_FAST", float("inf"))  # tests drop flushes, to take less time


@pytest.fixture
def no_holder(monkeypatch: Patch) -> None:
    """The other process is not started: the test is of other checks."""
    monkeypatch.setattr(files, "check_lock", lambda folder: finding("lock", "ok", "", ""))


def verdicts(folder: Path) -> dict[str, Finding]:
    return {one.code: one for one in check_files(folder)}


@pytest.mark.promise("drill.file-systems")
def test_a_sound_disk_passes_every_check(tmp_path: Path, quick: None) -> None:
    found = verdicts(tmp_path)
    assert list(found) == ["lock", "flush", "rename a file", "rename folders", "new files", "append, cut"]
    assert {one.severity for one in found.values()} == {"ok"}, found
    assert check_names(tmp_path, ["a", "B"]).severity == "ok"
    assert check_permissions(tmp_path, private=True).severity == "ok"


# --------------------------------------------------------------------------- locks


def always(number: int | None) -> Callable[..., None]:
    """Stands for flock: it gives the lock to everybody, or to nobody."""

    def flock(*_: object) -> None:
        if number is not None:
            raise OSError(number, os.strerror(number))

    return flock


class Silent:
    """Stands for the process that holds the lock."""

    def __init__(self, told: str) -> None:
        self.told = told

    def start(self, folder: Path) -> tuple[str, Any]:
        return self.told, subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.promise("drill.file-systems")
@pytest.mark.parametrize(
    ("flock", "told", "says"),
    [
        (always(None), "held", "given to a second process"),
        (always(errno.EWOULDBLOCK), "held", "held by a process that was killed"),
        (always(errno.ENOLCK), "held", "No locks available"),
        (always(None), "refused", "none is given: refused"),
        (always(None), "cannot write: Function not implemented", "Function not implemented"),
    ],
)
def test_a_lock_that_lies_is_found(
    tmp_path: Path, quick: None, monkeypatch: Patch, flock: Callable[..., None], told: str, says: str
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(files, "_start_holder", Silent(told).start)
    found = files.attempt("lock", lambda: files.check_lock(tmp_path), "choose another disk")
    assert found.severity == "fault"
    assert says in found.values["measured"]


def test_the_process_that_holds_the_lock_says_so_and_ends_with_its_parent(tmp_path: Path) -> None:
    told, holder = files._start_holder(tmp_path)
    second, other = files._start_holder(tmp_path)
    missing, third = files._start_holder(tmp_path / "absent")
    try:
        assert (told, second) == ("held", "refused")
        assert missing == "cannot write: No such file or directory"
        assert holder.stdin is not None
        holder.stdin.close()
        assert holder.wait(timeout=30) == 0
    finally:
        for one in (holder, other, third):
            one.kill()
            one.wait()
            for stream in (one.stdin, one.stdout):
                assert stream is not None
                stream.close()


# --------------------------------------------------------------------------- flushes, renames, new files, logs


def fsync_of(folders: bool, number: int) -> Callable[[int], None]:
    """Stands for fsync: it fails for files, or for folders."""
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}") is folders:
            raise OSError(number, os.strerror(number))
        flush(descriptor)

    return fsync


def torn_rename(source: Any, target: Any) -> None:
    """Stands for rename: the target is gone for a moment."""
    if os.path.isfile(target):
        os.unlink(target)
        time.sleep(0.01)
    os.replace(source, target)


def copying_rename(source: Any, target: Any) -> None:
    """Stands for rename: a folder appears file by file, into one that is there already."""
    if not os.path.isdir(source):
        return os.replace(source, target)
    os.makedirs(target, exist_ok=True)
    for name in sorted(os.listdir(source)):
        time.sleep(0.005)
        os.replace(os.path.join(source, name), os.path.join(target, name))
    return os.rmdir(source)


def writing_rename(source: Any, target: Any) -> None:
    """Stands for rename: the target is written over in two parts."""
    if os.path.isdir(source):
        return os.replace(source, target)
    data = Path(source).read_bytes()
    with open(target, "r+b") as file:
        for half in (data[:2048], data[2048:]):
            file.write(half)
            file.flush()
            time.sleep(0.005)
    return os.unlink(source)


def replacing_rename(source: Any, target: Any) -> None:
    """Stands for rename: a full folder is replaced."""
    if os.path.isdir(target):
        for name in os.listdir(target):
            os.unlink(os.path.join(target, name))
    os.replace(source, target)


@pytest.mark.promise("drill.file-systems")
@pytest.mark.parametrize(
    ("name", "stand_in", "check", "verdict", "says"),
    [
        ("fsync", fsync_of(False, errno.EIO), "flush", "fault", "Input/output error"),
        ("fsync", fsync_of(True, errno.EIO), "flush", "fault", "Input/output error"),
        ("fsync", fsync_of(True, errno.EINVAL), "flush", "warning", "ms for a small file"),
        ("rename", torn_rename, "rename a file", "fault", "the file was gone"),
        ("rename", writing_rename, "rename a file", "fault", "the file was a mixture"),
        ("rename", copying_rename, "rename folders", "fault", "a renamed folder lacked a file"),
        ("rename", replacing_rename, "rename folders", "fault", "a full folder was replaced"),
        ("fsync", fsync_of(False, errno.EIO), "append, cut", "fault", "Input/output error"),
    ],
)
def test_a_disk_that_lies_is_found(
    tmp_path: Path, quick: None, no_holder: None, monkeypatch: Patch, name: str, stand_in: Any, check: str,
    verdict: str, says: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, name, stand_in)
    found = verdicts(tmp_path)[check]
    assert found.severity == verdict
    assert says in found.values["measured"]


def test_bytes_that_are_not_read_back_are_found(tmp_path: Path, quick: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(files, "_read_back", lambda path, data: path.read_bytes() == data[::-1])
    assert files.check_flush(tmp_path).values["measured"] == "what was read is not what was written"


def test_a_disk_that_is_full_is_left_with_the_room_it_had(tmp_path: Path, quick: None, monkeypatch: Patch) -> None:
    def refuse(path: Path, data: bytes) -> None:
        path.write_bytes(data[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.disk, "write_file", refuse)
    assert verdicts(tmp_path)["flush"].severity == "fault"
    assert not (tmp_path / "block").exists()


@pytest.mark.promise("drill.flushes")
def test_flushes_are_said_to_be_accepted_and_no_more(tmp_path: Path, quick: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(files, "TOO_FAST", TOO_FAST)
    monkeypatch.setattr(files, "is_in_memory", lambda folder: False)
    monkeypatch.setattr(files, "_flush_times", lambda folder: (2e-3, 4e-3, 9e-3))
    found = files.check_flush(tmp_path)
    assert (found.severity, found.values["meaning"]) == (
        "ok",
        "flushes are accepted; only a power cut shows if they are kept",
    )


@pytest.mark.promise("drill.flushes")
@pytest.mark.parametrize(
    ("times", "says"),
    [
        ((1e-5, 4e-3, 1e-6), "a flush takes 0.010 ms, a write through (O_SYNC) 4.0 ms"),
        ((1e-5, 2e-5, 6e-2), "a flush takes 0.010 ms, one of names 60.0 ms"),
    ],
)
def test_flushes_that_no_device_can_take_so_fast_are_a_warning(
    tmp_path: Path, quick: None, monkeypatch: Patch, times: tuple[float, float, float], says: str
) -> None:
    monkeypatch.setattr(files, "TOO_FAST", TOO_FAST)
    monkeypatch.setattr(files, "is_in_memory", lambda folder: False)
    monkeypatch.setattr(files, "_flush_times", lambda folder: times)
    found = files.check_flush(tmp_path)
    assert (found.severity, found.values["measured"]) == ("warning", says)
    assert "dropped" in found.values["meaning"]


@pytest.mark.promise("drill.flushes")
def test_a_layer_that_drops_flushes_is_seen_on_a_disk(tmp_path: Path) -> None:
    """As eatmydata: the library's fsync returns at once, and a write by O_SYNC still goes to the device."""
    compiler = shutil.which("cc")
    if compiler is None or is_in_memory(tmp_path) or sys.platform != "linux":
        pytest.skip("needs a compiler, and a disk for temporary files")
    library, source = tmp_path / "drop.so", tmp_path / "drop.c"
    source.write_text("int fsync(int file) { return 0; }\nint fdatasync(int file) { return 0; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    told = f"""
from pathlib import Path
from unpad.drill import files
files.BLOCK = 1 << 16
print(*files._flush_times(Path({str(tmp_path)!r})))
found = files.check_flush(Path({str(tmp_path)!r}))
print(found.severity, found.values["meaning"])
"""

    def run(**more: str) -> tuple[list[float], str]:
        for path in tmp_path.glob("[0-9]*"):
            path.unlink()
        shown = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, env=os.environ | more)
        assert shown.returncode == 0, shown.stderr
        times, verdict = shown.stdout.splitlines()
        return [float(one) for one in times.split()], verdict

    honest, verdict = run()
    if honest[1] < 1e-4:
        pytest.skip("a write through to this disk takes no time: its cache outlives a power cut, or drops flushes too")
    assert "dropped" not in verdict
    _, verdict = run(LD_PRELOAD=str(library))
    assert verdict.startswith("warning flushes seem to be dropped")


def test_slow_flushes_are_a_warning(tmp_path: Path, quick: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(files, "SLOW_FLUSH", 0.0)
    found = files.check_flush(tmp_path)
    assert found.severity == "warning"
    assert "checkpoint.every_seconds" in found.values["meaning"]


def test_a_file_that_several_create_is_found(tmp_path: Path, quick: None, monkeypatch: Patch) -> None:
    create = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *more: create(path, flags & ~os.O_EXCL, *more))
    assert files.check_exclusive(tmp_path).severity == "fault"


def test_lines_that_are_not_appended_are_found(tmp_path: Path, quick: None, monkeypatch: Patch) -> None:
    create = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *more: create(path, flags & ~os.O_APPEND, *more))
    assert files.check_append(tmp_path).values["measured"] == "lines were lost or mixed"


# --------------------------------------------------------------------------- names and permissions


@pytest.mark.promise("drill.file-systems")
def test_names_that_the_disk_changes_are_found(tmp_path: Path, monkeypatch: Patch) -> None:
    touch, listdir = Path.touch, os.listdir
    monkeypatch.setattr(Path, "touch", lambda path, *more: touch(path.with_name(path.name.lower())))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda path: os.path.exists(path.with_name(path.name.lower())))
        (tmp_path / "one").mkdir()
        found = check_names(tmp_path / "one", ["Tune", "tune", "pretrain"])
        assert found.severity == "fault"
        assert "Tune, tune" in found.values["meaning"]
        (tmp_path / "two").mkdir()
        assert check_names(tmp_path / "two", ["tune", "pretrain"]).severity == "ok"
    monkeypatch.setattr(
        os, "listdir", lambda path: [name.encode("ascii", "replace").decode() for name in listdir(path)]
    )
    (tmp_path / "three").mkdir()
    found = check_names(tmp_path / "three", ["tune"])
    assert (found.severity, "Chinese is changed" in found.values["measured"]) == ("warning", True)


@pytest.mark.parametrize(("longest", "verdict"), [(143, "ok"), (100, "ok"), (40, "fault")])
def test_names_that_are_too_short_are_found(tmp_path: Path, monkeypatch: Patch, longest: int, verdict: str) -> None:
    can_make = mounts._can_make
    monkeypatch.setattr(mounts, "_can_make", lambda path: len(path.name.encode()) <= longest and can_make(path))
    assert check_names(tmp_path, []).severity == verdict


@pytest.mark.promise("drill.file-systems")
@pytest.mark.parametrize(("private", "verdict"), [(True, "fault"), (False, "warning")])
def test_a_disk_without_permissions_is_a_fault_for_data_about_people(
    tmp_path: Path, monkeypatch: Patch, private: bool, verdict: str
) -> None:
    create = os.open
    mask = os.umask(0)
    try:
        monkeypatch.setattr(os, "open", lambda path, flags, mode=0o777: create(path, flags, 0o777))
        found = check_permissions(tmp_path, private=private)
    finally:
        os.umask(mask)
    assert found.severity == verdict
    assert "a private file 777" in found.values["measured"]


def test_the_lock_process_needs_no_heavy_module() -> None:
    told = "import sys, unpad.drill.hold; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
