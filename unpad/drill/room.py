"""Disk space for a run: bytes, files and open files that it will need, against free and allowed ones."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unpad.drill.findings import attempt, finding
from unpad.drill.mounts import is_in_memory
from unpad.machine.files import limit_of
from unpad.storage import disk
from unpad.terminal.finding import Finding

BYTES_PER_STEP = 3_000  # of metrics, timing, log and TensorBoard
OTHER_BYTES = 16 << 20  # the page, vocabularies, samples
OTHER_FILES = 100
FILES_PER_CHECKPOINT = 5
MARGIN = 64  # open files beyond those during a step
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Needs:
    """Needs of a run on its disk.

    Args:
        checkpoint_bytes: of weights and optimizer, as saved.
        weights_bytes: size of the weights alone, as in `best`.
        largest_file: bytes of the larger of a checkpoint's two files.
        keep: checkpoints kept; bests: folders of best weights, one per stage.
        steps: of the whole run.
        open_files: of the process while it trains.
    """

    checkpoint_bytes: int
    weights_bytes: int
    largest_file: int
    keep: int
    bests: int
    steps: int
    open_files: int

    @property
    def disk_bytes(self) -> int:
        """Largest size of the run's folder: during replacement it holds one more checkpoint and one more best than are
        kept."""
        checkpoints = (self.keep + 1) * self.checkpoint_bytes + (self.bests + 1) * self.weights_bytes
        return checkpoints + self.steps * BYTES_PER_STEP + OTHER_BYTES

    @property
    def files(self) -> int:
        return (self.keep + self.bests + 2) * FILES_PER_CHECKPOINT + OTHER_FILES


def size_text(num_bytes: int) -> str:
    """A size in words: MiB below 10 GiB."""
    return f"{num_bytes / MIB:,.0f} MiB" if num_bytes < 10 * GIB else f"{num_bytes / GIB:,.1f} GiB"


def folder_bytes(folder: Path) -> int:
    """Bytes that the files of a folder take; 0 if there is none."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # a run that trains removes its own
            total += path.lstat().st_size
    return total


def check_room(folder: Path, needs: Needs, used_bytes: int) -> Iterator[Finding]:
    """Check space, files and open files.

    Args:
        folder: on the disk in question.
        used_bytes: already used by the run.
    """
    meaning = "it cannot be told how much room there is"
    yield attempt("space", lambda: check_space(folder, needs, used_bytes), meaning)
    yield attempt("files", lambda: check_inodes(folder, needs), meaning)
    yield check_open_files(needs)


def check_space(folder: Path, needs: Needs, used_bytes: int = 0) -> Finding:
    """Compare the bytes that a run needs with the free and allowed ones, and reserve them for an instant."""
    missing = max(needs.disk_bytes - used_bytes, needs.checkpoint_bytes)
    free = disk.free_bytes(folder)
    measured = f"{size_text(missing)} needed, {size_text(free)} free"
    limit = limit_of("FSIZE")
    fix = "free some, lower checkpoint.keep, or choose another disk by --out"
    if missing > free:
        return finding("space", "fault", measured, f"the disk fills during the run: {fix}")
    if limit is not None and limit < needs.largest_file:
        told = f"a file of {size_text(needs.largest_file)} needed, {size_text(limit)} allowed"
        return finding("space", "fault", told, "checkpoints cannot be written: raise `ulimit -f`")
    if missing <= free // 2 and not is_in_memory(folder) and not reserve(folder / "reserved", missing):
        told = f"{size_text(missing)} needed, and refused"
        return finding("space", "fault", told, "your quota is smaller than what is free: see `quota -s`")
    if missing > free // 2:
        return finding("space", "warning", measured, "enough, if nothing else is written meanwhile")
    return finding(
        "space", "ok", measured, f"{needs.keep} checkpoints of {size_text(needs.checkpoint_bytes)} and the best"
    )


def reserve(path: Path, num_bytes: int) -> bool:
    """Reserve bytes for a new file, and give them back; False if the file system or a quota refuses them.

    True for a file system that cannot reserve bytes: nothing is written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        code = _fallocate(descriptor, num_bytes)
    finally:
        os.close(descriptor)
        os.unlink(path)
    return code not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _fallocate(descriptor: int, num_bytes: int) -> int:
    """Linux's fallocate, returning its errno: `os.posix_fallocate` would write the bytes where it cannot reserve
    them."""
    if sys.platform != "linux":
        return errno.ENOTSUP
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is None:
        return errno.ENOTSUP
    done = call(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes))
    return ctypes.get_errno() if done else 0


def check_inodes(folder: Path, needs: Needs) -> Finding:
    """Compare the number of files that a run makes with what the file system has left."""
    status = os.statvfs(folder)
    if status.f_files == 0:
        return finding("files", "ok", "as many as there is space for", "no limit of their own")
    measured = f"{needs.files} needed, {status.f_favail:,} free"
    if status.f_favail < needs.files:
        return finding("files", "fault", measured, "no inode is left: remove small files, or choose another disk")
    return finding("files", "ok", measured, "inodes of the disk")


def check_open_files(needs: Needs) -> Finding:
    """Compare the open files of a training with the limit of a process."""
    limit = limit_of("NOFILE")
    allowed = "no limit" if limit is None else f"{limit:,} allowed"
    measured = f"{needs.open_files} in a step, {allowed}"
    if limit is not None and limit < needs.open_files + MARGIN:
        return finding("open files", "fault", measured, "too few: raise `ulimit -n` to 1024")
    return finding("open files", "ok", measured, "files and pipes of the process")
