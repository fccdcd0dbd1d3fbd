"""Demands of a run on its disk: locks, flushes, renames, new files, appended lines.

The checks go through `unpad/storage/`, as a run does.
"""

from __future__ import annotations

import errno
import hashlib
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unpad import storage
from unpad.drill.findings import attempt, finding
from unpad.drill.mounts import is_in_memory
from unpad.errors import RunInUseError
from unpad.storage import disk
from unpad.terminal.finding import Finding

FREED_WITHIN = 5.0  # seconds after a SIGKILL
BLOCK = 8 << 20  # bytes of the file that is written and read back
SMALL_FILES = 12
SLOW_FLUSH = 0.5  # seconds of a small file
TOO_FAST = 20  # times as fast as a write that ends at the device
RENAMES = 300
PAGE = 4096
CREATORS, CREATED = 4, 25  # threads that create the same files, and how many


def check_files(folder: Path) -> Iterator[Finding]:
    """Make each check in a folder of its own."""
    unsafe = "a run cannot be trained safely here: choose another disk by --out"
    checks: dict[str, Callable[[Path], Finding]] = {
        "lock": check_lock,
        "flush": check_flush,
        "rename a file": check_rename_file,
        "rename folders": check_rename_folder,
        "new files": check_exclusive,
        "append, cut": check_append,
    }
    for number, (name, check) in enumerate(checks.items()):
        place = folder / f"files-{number}"
        place.mkdir()
        yield attempt(name, lambda check=check, place=place: check(place), unsafe)  # type: ignore[misc]


# --------------------------------------------------------------------------- locks


def check_lock(folder: Path) -> Finding:
    """A lock held by another process is refused, and free once that process is killed."""
    told, holder = _start_holder(folder)
    try:
        if told != "held":
            return _lock_fault(f"none is given: {told or 'the process ended'}", "no run can be started here")
        try:
            with storage.RunLock(folder):
                return _lock_fault("given to a second process", "two trainings may write into one run")
        except RunInUseError:
            pass
    finally:
        holder.kill()
        holder.communicate()
    killed = time.perf_counter()
    while True:
        with suppress(RunInUseError), storage.RunLock(folder):
            break
        if time.perf_counter() - killed > FREED_WITHIN:
            return _lock_fault("held by a process that was killed", "a killed run cannot be resumed: remount the disk")
    freed = (time.perf_counter() - killed) * 1000
    return finding("lock", "ok", f"held, refused, freed {freed:.0f} ms after a kill", "one training at a time in a run")


def _start_holder(folder: Path) -> tuple[str, subprocess.Popen[str]]:
    """Start the process that takes the lock; also returns its answer, "" without one."""
    holder = subprocess.Popen(
        [sys.executable, "-m", "unpad.drill.hold", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # a Ctrl-C is for the drill
    )
    assert holder.stdout is not None
    try:
        return holder.stdout.readline().strip(), holder
    except BaseException:
        holder.kill()
        raise


def _lock_fault(measured: str, meaning: str) -> Finding:
    return finding("lock", "fault", measured, meaning)


# --------------------------------------------------------------------------- flushes


def check_flush(folder: Path) -> Finding:
    """Flushes of files and names are accepted, none faster than a device allows, and written data is read back."""
    try:
        return _flush(folder)
    finally:
        (folder / "block").unlink(missing_ok=True)  # it may fill the disk, and later checks write as well


def _flush(folder: Path) -> Finding:
    data = os.urandom(BLOCK)
    began = time.perf_counter()
    disk.write_file(folder / "block", data)
    rate = BLOCK / 1e6 / (time.perf_counter() - began)
    times = []
    for number in range(SMALL_FILES):
        began = time.perf_counter()
        disk.write_file(folder / str(number), b"x" * PAGE)
        times.append(time.perf_counter() - began)
    median = statistics.median(times)
    measured = f"{rate:.0f} MB/s; {median * 1000:.1f} ms for a small file"
    if not _read_back(folder / "block", data):
        return finding("flush", "fault", "what was read is not what was written", "the disk or its driver is broken")
    began = time.perf_counter()
    if not _flush_names(folder):
        meaning = "names cannot be flushed: a power cut may take the newest checkpoints; a kill takes none"
        return finding("flush", "warning", measured, meaning)
    measured += f", {(time.perf_counter() - began) * 1000:.1f} ms for names"
    if median > SLOW_FLUSH:
        return finding("flush", "warning", measured, "slow: save seldom, as by checkpoint.every_seconds=600")
    if is_in_memory(folder):
        return finding("flush", "ok", measured, "there is no device to flush to")
    flush, through, name = _flush_times(folder)
    if flush * TOO_FAST < max(through, name):
        slow, what = (through, "a write through (O_SYNC)") if through >= name else (name, "one of names")
        told = f"a flush takes {flush * 1000:.3f} ms, {what} {slow * 1000:.1f} ms"
        meaning = "flushes seem to be dropped: a power cut may take a run; look for eatmydata, or another disk"
        return finding("flush", "warning", told, meaning)
    return finding("flush", "ok", measured, "flushes are accepted; only a power cut shows if they are kept")


def _flush_times(folder: Path) -> tuple[float, float, float]:
    """Upper bound of most small writes with a flush, and lower bounds of most O_SYNC writes and flushes of a name, in
    seconds.

    All three wait for the device where flushes are not dropped on the way to it.
    """
    times: tuple[list[float], ...] = ([], [], [])
    flushed = os.open(folder / "flushed", os.O_WRONLY | os.O_CREAT, 0o600)
    through = os.open(folder / "through", os.O_WRONLY | os.O_CREAT | os.O_SYNC, 0o600)

    def timed(number: int, action: Callable[[], object]) -> None:
        began = time.perf_counter()
        action()
        times[number].append(time.perf_counter() - began)

    try:
        for number in range(1 + SMALL_FILES):
            data = os.urandom(PAGE)
            os.pwrite(flushed, data, 0)
            timed(0, lambda: os.fsync(flushed))
            timed(1, lambda data=data: os.pwrite(through, data, 0))  # type: ignore[misc]
            (folder / f"name-{number}").touch()
            timed(2, lambda: _flush_names(folder))
    finally:
        os.close(flushed)
        os.close(through)
    # The first write also allocates the file; and a busy disk is uneven, so medians may differ by chance.
    flush, written, name = (statistics.quantiles(one[1:], n=4) for one in times)
    return flush[2], written[0], name[0]


def _read_back(path: Path, data: bytes) -> bool:
    """Read a file from the device, if the system drops its cached copy."""
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").digest() == hashlib.sha256(data).digest()


def _flush_names(folder: Path) -> bool:
    """Flush the names in a folder; False if the file system cannot, which `storage` tolerates."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return False
    finally:
        os.close(descriptor)
    return True


# --------------------------------------------------------------------------- renames


@contextmanager
def _watched(look: Callable[[], str]) -> Iterator[list[str]]:
    """Call `look` repeatedly in another thread; yields its reports."""
    seen: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if told := look():
                seen.append(told)
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def check_rename_file(folder: Path) -> Finding:
    """A file that is replaced repeatedly exists and is complete at every instant."""
    target = folder / "target"

    def look() -> str:
        try:
            data = target.read_bytes()
        except OSError as error:
            return f"while it was replaced, the file was gone: {error.strerror}"
        return "" if len(data) == PAGE and len(set(data)) == 1 else "while it was replaced, the file was a mixture"

    target.write_bytes(b"\0" * PAGE)
    with _watched(look) as seen:
        for number in range(RENAMES):
            (folder / "new").write_bytes(bytes([number % 256]) * PAGE)
            disk.rename(folder / "new", target)
    if seen:
        return finding("rename a file", "fault", seen[0], "a kill may leave a run without its files")
    return finding("rename a file", "ok", f"{RENAMES} times, never gone nor mixed", "a file is the old or the new one")


def check_rename_folder(folder: Path) -> Finding:
    """A renamed folder has all its files or does not exist; renaming onto a non-empty folder is refused."""
    names = ("a", "b", "c")
    current = folder / "0"

    def look() -> str:
        here = current
        try:
            whole = not here.is_dir() or all((here / name).stat().st_size == PAGE for name in names)
        except OSError as error:
            return f"a renamed folder lacked a file: {error.strerror}"
        return "" if whole else "a file of a renamed folder was cut short"

    with _watched(look) as seen:
        for number in range(1, RENAMES // 10):
            current = folder / str(number)
            _fill(folder / "new", names)
            disk.rename(folder / "new", current)
    _fill(folder / "new", names)
    told = seen[0] if seen else _rename_onto(folder / "new", current, names)
    if told:
        return finding("rename folders", "fault", told, "a kill may leave half a checkpoint under its name")
    return finding("rename folders", "ok", "whole or absent; none onto a full one", "a checkpoint is whole or absent")


def _fill(folder: Path, names: tuple[str, ...]) -> None:
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"x" * PAGE)


def _rename_onto(source: Path, target: Path, names: tuple[str, ...]) -> str:
    """Rename a folder onto one with files, which must be refused; return what went wrong."""
    try:
        disk.rename(source, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            return f"onto a full folder: {error.strerror}"
    else:
        return "a full folder was replaced"
    return "" if all((folder / name).exists() for folder in (source, target) for name in names) else "files were lost"


# --------------------------------------------------------------------------- new files, and lines at the end of one


def check_exclusive(folder: Path) -> Finding:
    """If several threads create a file of one name, exactly one succeeds."""
    made: list[int] = []

    def create() -> None:
        for number in range(CREATED):
            with suppress(FileExistsError):
                os.close(os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
                made.append(number)

    threads = [threading.Thread(target=create) for _ in range(CREATORS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if sorted(made) != list(range(CREATED)):
        told = f"{len(made)} times made, of {CREATED} names"
        return finding("new files", "fault", told, "files of two processes may mix: choose another disk by --out")
    return finding("new files", "ok", f"{CREATED} names, each made once by {CREATORS} threads", "no file is made twice")


def check_append(folder: Path) -> Finding:
    """A log keeps its lines in order, and can be truncated to some of them."""
    path = folder / "log.jsonl"
    log = storage.LineLog(path)
    try:
        for number in range(20):
            log.append({"step": number})
        log.sync()
        log.truncate(lambda row: row["step"] < 10)
        log.append({"step": 10})
    finally:
        log.close()
    expected = "".join(f'{{"step": {number}}}\n' for number in range(11))
    if path.read_text(encoding="utf-8") != expected:
        return finding("append, cut", "fault", "lines were lost or mixed", "the metrics of a run cannot be kept here")
    return finding("append, cut", "ok", "every line in its place", "metrics are cut to the checkpoint on a resume")
