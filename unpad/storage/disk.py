"""Steps of durable writing: create, write, flush, rename, delete, under temporary names.

Every step that changes names first calls `_change`, which checks that this process still has the folder that it locked;
every step that changes the disk calls `operation`.
"""

import errno
import hashlib
import itertools
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from unpad.errors import DiskError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# Flags of `os.open`, 0 where a system lacks them. Without BINARY, Windows writes every line feed as two characters.
BINARY, FOLDER = getattr(os, "O_BINARY", 0), getattr(os, "O_DIRECTORY", 0)
NO_FOLLOW, NO_WAIT = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | BINARY
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# Names from earlier versions do not identify the machine of their process.
_TEMPORARY = re.compile(r"\.tmp-(?:([0-9a-f]{8})-([0-9a-f]{8})-)?(\d{1,9})-([0-9a-f]{8})-\d+")
DAY_S = 86_400.0
PROCESS = secrets.token_hex(4)  # distinguishes processes, since pids are reused, in a container at every start
_numbers = itertools.count()
_LOCKED_BYTE = 1 << 30


def operation(name: str, path: Path) -> None:
    """Hook before every write, truncate, fsync, rename, mkdir, unlink and rmdir; tests count and kill here."""


# --------------------------------------------------------------------------- folders that this process has locked

_held: dict[int, str] = {}  # paths of the open lock files, by descriptor


def take_lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file until it is closed, at once or not at all, unless it may wait.

    Raises:
        BlockingIOError: another process has it; OSError: the file system has no locks.
    """
    if fcntl is not None:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        return
    msvcrt, place = import_module("msvcrt"), os.lseek(descriptor, 0, os.SEEK_CUR)
    # One byte beyond the contents: Windows lets nobody else read what is locked.
    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
    except PermissionError as error:
        raise BlockingIOError(error.errno, "another process has it") from None
    finally:
        os.lseek(descriptor, place, os.SEEK_SET)


def hold(descriptor: int, lock: Path) -> None:
    """Register a lock file that this process holds, which permits writing in its folder."""
    _held[descriptor] = os.path.abspath(lock)


def release(descriptor: int) -> None:
    """Forget a lock file, before it is closed."""
    _held.pop(descriptor, None)


def check_held(path: Path) -> None:
    """Check that a path in a locked folder still leads into the folder that this process has locked.

    A renamed folder takes its lock along, and writes by path would go into another folder. The check runs right before
    every call that changes a name; a rename within these microseconds is detected before the next one.

    Raises:
        DiskError: the lock file at that path is gone or was replaced.
    """
    for descriptor, lock in tuple(_held.items()):
        folder = os.path.dirname(lock)
        if not os.path.join(os.path.abspath(path), "").startswith(os.path.join(folder, "")):
            continue
        try:
            status = os.stat(lock, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            _lost(folder, "it is gone from there")
        except OSError as error:
            _lost(folder, f"it cannot be seen there: {error.strerror}")
        else:
            if not os.path.samestat(status, os.fstat(descriptor)):
                _lost(folder, "another one is there")


def _lost(folder: str, seen: str) -> None:
    name = os.path.basename(folder)
    what = f"the folder was renamed, replaced or deleted while it was written: its lock file is held here, and {seen}"
    fix = f"rename it back to {name}, or name its new place with --out, and continue with --resume"
    raise DiskError(what, where=folder, fix=fix) from None


def _change(name: str, path: Path) -> None:
    check_held(path)
    operation(name, path)


# --------------------------------------------------------------------------- errors and space


def free_bytes(path: Path) -> int:
    """Free bytes for an ordinary user at `path`, which need not exist."""
    for place in (path, *path.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return 0


def check_space(path: Path, needed_bytes: int) -> None:
    """Check the free space before writing.

    Raises:
        DiskError: fewer than `needed_bytes` are free at `path`, which need not exist.
    """
    free = free_bytes(path)
    if free < needed_bytes:
        what = f"the disk has too little space: needs {needed_bytes:,} bytes, {free:,} are free"
        raise DiskError(what, where=str(path), fix="free some space, lower checkpoint.keep, or choose another --out")


@contextmanager
def disk_errors(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Convert an OSError from writing `path` to a DiskError."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in _FULL:
            what = reason + _space(needed_bytes, free_bytes(path))
            fix = "free some space (or raise your quota or file size limit), or choose another --out"
        elif error.errno in _NO_LOCKS:
            what = f"the file system has no locks ({reason}), without which two processes could write one run"
            fix = "choose an --out on another disk, or have the network file system mounted with locks"
        else:
            what, fix = f"cannot write: {reason}", "check that the folder exists and is yours, or choose another --out"
        raise DiskError(what, where=str(path), fix=fix) from error


def _space(needed: int, free: int) -> str:
    """Bytes that a full disk lacks, as the end of a sentence; free bytes may be unusable for files."""
    if not needed:
        return f"; {free:,} bytes are free"
    short = f": needs {needed:,} bytes"
    if free < needed:
        return f"{short}, {free:,} are free"
    return f"{short}; {free:,} are free, but a quota, a limit of the size of files or whole blocks leave it less"


# --------------------------------------------------------------------------- steps


def is_private(folder: Path) -> bool:
    """True if only the owner may enter a folder."""
    return stat.S_IMODE(os.stat(folder).st_mode) & 0o077 == 0


def file_mode(path: Path, private: bool = False) -> int:
    """Mode of a new file, before the umask."""
    return 0o600 if private or is_private(path.parent) else 0o666


def new_folder(path: Path, private: bool) -> None:
    """Create a folder, only for its owner if `private` or if its parent is private."""
    _change("mkdir", path)
    os.mkdir(path, 0o700 if private or is_private(path.parent) else 0o777)


def write_file(path: Path, data: bytes, private: bool = False) -> None:
    """Create a file with the given bytes and flush it to the device."""
    check_held(path)
    descriptor = os.open(path, NEW, file_mode(path, private))
    try:
        write_all(descriptor, path, data)
        flush(descriptor, path)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, path: Path, data: bytes) -> None:
    rest = memoryview(data)
    while rest:  # a nearly full disk first accepts a part, and fails at the next call
        operation("write", path)
        rest = rest[os.write(descriptor, rest) :]


def truncate(descriptor: int, path: Path, size: int) -> None:
    """Cut an open file to `size` bytes."""
    operation("truncate", path)
    os.ftruncate(descriptor, size)


def flush(descriptor: int, path: Path) -> None:
    """Flush an open file to the device."""
    operation("fsync", path)
    os.fsync(descriptor)


def rename(source: Path, target: Path) -> None:
    _change("rename", target)
    is_file = sys.platform == "win32" and source.is_file()  # where a rename replaces nothing
    (os.replace if is_file else os.rename)(source, target)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder; Windows opens no folder, and flushes them by itself."""
    if not FOLDER:
        return
    descriptor = os.open(path, os.O_RDONLY | FOLDER)
    try:
        operation("fsync", path)
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network and FUSE file systems cannot flush names
            raise
    finally:
        os.close(descriptor)


def delete(path: Path) -> None:
    """Delete a file, a link, or a folder with its contents; never follow a link."""
    if stat.S_ISDIR(os.lstat(path).st_mode):
        for name in sorted(os.listdir(path)):
            delete(path / name)
        _change("rmdir", path)
        os.rmdir(path)
    else:
        _change("unlink", path)
        os.unlink(path)


def discard(path: Path) -> None:
    with suppress(OSError, DiskError):
        delete(path)


# --------------------------------------------------------------------------- temporary names


@cache
def _place() -> tuple[str, str]:
    """Short hashes of this machine, and of its processes visible to this one: a boot and a container."""
    machine = [socket.gethostname(), text_of("/etc/machine-id")]
    seen = [*machine, text_of("/proc/sys/kernel/random/boot_id")]
    with suppress(OSError):
        seen.append(os.readlink("/proc/self/ns/pid"))
    one, other = (hashlib.sha256("\n".join(told).encode()).hexdigest()[:8] for told in (machine, seen))
    return one, other


def text_of(path: str) -> str:
    """Text of a file of the system; empty where it cannot be read."""
    with suppress(OSError):
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    return ""


def temporary_name(parent: Path) -> Path:
    """A new temporary name; it identifies the writer: machine, boot and container, process, number."""
    machine, seen = _place()
    return parent / f".tmp-{machine}-{seen}-{os.getpid()}-{PROCESS}-{next(_numbers)}"


def is_leftover(path: Path, alone: bool = False) -> bool:
    """True for a temporary file or folder without a live writer.

    For a process visible to this one, the kernel decides. Files from another host or container count if they have not
    changed for a day, and files from this machine if they have not changed since it was started.

    Args:
        alone: whether only this process may write in its folder, because it holds the folder's lock.
    """
    match = _TEMPORARY.fullmatch(path.name)
    if match is None:
        return False
    machine, seen, pid, process = match[1], match[2], int(match[3]), match[4]
    is_seen = seen == _place()[1]
    if is_seen and pid == os.getpid():
        return process != PROCESS
    if alone:
        return True
    if is_seen and sys.platform != "win32":  # where `os.kill` ends the process
        return not _runs(pid)
    limit = min(DAY_S, _since_start_s()) if machine == _place()[0] else DAY_S
    return _unchanged_s(path) > limit


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's process has the pid
    return True


def _since_start_s() -> float:
    """Seconds since this machine was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


def _unchanged_s(path: Path) -> float:
    """Seconds since a file or folder changed, by the clock of its file system, which may be another machine's; 0 if
    unknown."""
    probe = temporary_name(path.parent)
    try:
        check_held(probe)
        os.close(os.open(probe, NEW, 0o600))
        try:
            now = os.lstat(probe).st_mtime
        finally:
            os.unlink(probe)
        inside = [Path(folder) / name for folder, folders, files in os.walk(path) for name in (*folders, *files)]
        return now - max(os.lstat(one).st_mtime for one in (path, *inside))
    except OSError:
        return 0.0
