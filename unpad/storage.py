"""Durable files: the only module that writes files that must survive. Write, fsync, rename, verify, lock.

What is written into a folder that only its owner can enter is for its owner only (`make_folder`, `make_private`).
A visible name is always complete. Files and folders are written under a temporary name, flushed to the device and
renamed; then the parent folder is flushed too. A folder carries MANIFEST.json with the size and sha256 of each file,
written last and checked on every read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import shlex
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from unpad.errors import CheckpointError, DiskError, RunInUseError

MANIFEST = "MANIFEST.json"
MANIFEST_FORMAT = 1
MAX_MANIFEST_BYTES = 16 << 20
LOCK = "run.lock"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK  # never follow a planted link, never wait for a named pipe
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TEMPORARY = re.compile(r"\.tmp-(\d{1,9})-([0-9a-f]{8})-\d+")
_PROCESS = secrets.token_hex(4)  # tells processes apart, since pids are reused, in a container at every start
_numbers = itertools.count()


def _operation(name: str, path: Path) -> None:
    """Hook before every write, truncate, fsync, rename, mkdir, unlink and rmdir; tests count and kill here."""


# --------------------------------------------------------------------------- errors and space


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user may still write at `path`, which need not exist."""
    for place in (path, *path.absolute().parents):
        with suppress(OSError):
            status = os.statvfs(place)
            return status.f_bavail * status.f_frsize
    return 0


def check_space(path: Path, needed_bytes: int) -> None:
    """Check the free space before writing.

    Raises:
        DiskError: fewer than `needed_bytes` are free at `path`, which need not exist.
    """
    free = free_bytes(path)
    if free < needed_bytes:
        raise DiskError(
            f"the disk has too little space: needs {needed_bytes:,} bytes, {free:,} are free",
            where=str(path),
            fix="free some space, lower checkpoint.keep, or choose another --out",
        )


@contextmanager
def _disk_errors(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Convert an OSError from writing `path` to a DiskError."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in _FULL:
            what = f"{reason}: needs {needed_bytes:,} bytes, {free_bytes(path):,} are free"
            fix = "free some space (or raise your quota or file size limit), or choose another --out"
        else:
            what, fix = f"cannot write: {reason}", "check that the folder exists and is yours, or choose another --out"
        raise DiskError(what, where=str(path), fix=fix) from error


# --------------------------------------------------------------------------- one file


def sha256(data: bytes | str) -> str:
    """Hexadecimal sha256 of bytes, or of a text's UTF-8."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hexadecimal sha256 of a file, read in pieces. Raises OSError as `open` does."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """Folder for reproducible files: $UNPAD_CACHE, else unpad/ in $XDG_CACHE_HOME, else ~/.cache/unpad."""
    if named := os.environ.get("UNPAD_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unpad"


def make_folder(path: Path, *, private: bool = False) -> None:
    """Create a folder and its parents durably; an existing folder is left as it is.

    Args:
        private: whether only the owner may enter the new folders; so it is anyway inside of such a folder.

    Raises:
        DiskError: it cannot be created, or a file has its name.
    """
    with _disk_errors(path):
        missing = list(itertools.takewhile(lambda folder: not folder.is_dir(), (path, *path.parents)))
        for folder in reversed(missing):
            _operation("mkdir", folder)
            with suppress(FileExistsError):  # made by another process; a file of this name fails below
                os.mkdir(folder, 0o700 if private or _is_private(folder.parent) else 0o777)
            _sync_folder(folder.parent)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def make_private(folder: Path) -> None:
    """Let only the owner enter an existing folder; what is written into it later is private too.

    Raises:
        DiskError: the folder belongs to another user.
    """
    with _disk_errors(folder):
        if not _is_private(folder):
            os.chmod(folder, 0o700)


def _is_private(folder: Path) -> bool:
    """True if only the owner may enter a folder."""
    return stat.S_IMODE(os.stat(folder).st_mode) & 0o077 == 0


def _file_mode(path: Path, private: bool = False) -> int:
    """Permissions of a new file, of which the process's mask takes its part."""
    return 0o600 if private or _is_private(path.parent) else 0o666


def write_atomic(path: Path, data: bytes | str, *, private: bool = False) -> None:
    """Replace a file atomically: a reader sees the old file or the complete new one. Text is stored as UTF-8.

    Args:
        private: whether only the owner may read it; so it is anyway in a folder that only the owner may enter.

    Raises:
        DiskError: it cannot be written; the old file is untouched, and nothing temporary remains.
    """
    payload = data.encode() if isinstance(data, str) else data
    temporary = _temporary(path.parent)
    with _disk_errors(path, len(payload)):
        try:
            _write_file(temporary, payload, private)
            _rename(temporary, path)
        except BaseException:
            _discard(temporary)
            raise
        _sync_folder(path.parent)


def _temporary(parent: Path) -> Path:
    return parent / f".tmp-{os.getpid()}-{_PROCESS}-{next(_numbers)}"


def _write_file(path: Path, data: bytes, private: bool = False) -> None:
    """Create a file with the given bytes and flush it to the device."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _file_mode(path, private))
    try:
        _write_all(descriptor, path, data)
        _operation("fsync", path)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, path: Path, data: bytes) -> None:
    rest = memoryview(data)
    while rest:  # a nearly full disk accepts a part first, and fails at the next call
        _operation("write", path)
        rest = rest[os.write(descriptor, rest) :]


def _rename(source: Path, target: Path) -> None:
    _operation("rename", target)
    os.rename(source, target)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _operation("fsync", path)
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network and FUSE file systems cannot flush names
            raise
    finally:
        os.close(descriptor)


def _delete(path: Path) -> None:
    """Delete a file, a link, or a folder with its contents; never follow a link."""
    if stat.S_ISDIR(os.lstat(path).st_mode):
        for name in sorted(os.listdir(path)):
            _delete(path / name)
        _operation("rmdir", path)
        os.rmdir(path)
    else:
        _operation("unlink", path)
        os.unlink(path)


def _discard(path: Path) -> None:
    with suppress(OSError):
        _delete(path)


# --------------------------------------------------------------------------- a folder with a manifest


def write_folder(path: Path, files: dict[str, bytes]) -> None:
    """Write a folder of files and its manifest atomically: it is absent or complete.

    Two processes may write the same contents at once; existing folders are never replaced.

    Raises:
        DiskError: it cannot be written, or the folder exists with other contents; nothing temporary remains.
    """
    with _disk_errors(path, sum(map(len, files.values()))):
        temporary = _write_temporary_folder(path.parent, files)
        try:
            _rename(temporary, path)
        except BaseException as error:
            _discard(temporary)
            if not isinstance(error, OSError) or error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if not _is_same_folder(path, files):
                fix = "move it away, or choose another name"
                raise DiskError("the folder exists with other contents", where=str(path), fix=fix) from None
            return
        _sync_folder(path.parent)


def replace_folder(path: Path, files: dict[str, bytes]) -> None:
    """Write a folder, replacing an existing one.

    At every instant a complete folder is at `path` or, between two renames, at `replaced(path)`.

    Raises:
        DiskError: it cannot be written; a complete folder is still at one of the two names.
    """
    old = replaced(path)
    with _disk_errors(path, sum(map(len, files.values()))):
        temporary = _write_temporary_folder(path.parent, files)
        try:
            if os.path.lexists(path):
                if os.path.lexists(old):
                    _remove(old)
                _rename(path, old)
            _rename(temporary, path)
        except BaseException:
            if not os.path.lexists(path) and os.path.lexists(old):
                with suppress(OSError):
                    _rename(old, path)
            _discard(temporary)
            raise
        _sync_folder(path.parent)
        if os.path.lexists(old):
            _remove(old)


def replaced(path: Path) -> Path:
    """Name of the old folder during `replace_folder`; readers open it when `path` is missing."""
    return path.with_name(f".old-{path.name}")


def verify_folder(path: Path) -> None:
    """Verify the size and sha256 of every file in the manifest; other files are never opened.

    Raises:
        CheckpointError: a file is missing, has another size or sha256, is a link, or has an invalid name.
    """
    with _open_folder(path) as (folder, entries):
        for name, entry in entries.items():
            with _open_entry(path, folder, name, entry["size"]) as file:
                _check_sha256(path, name, hashlib.file_digest(file, "sha256").hexdigest(), entry["sha256"])


def read_folder(path: Path, names: Iterable[str] | None = None) -> dict[str, bytes]:
    """Read and verify the files of a folder, or only those in `names`.

    Raises:
        CheckpointError: as for `verify_folder`, for the files that are read.
    """
    contents = {}
    with _open_folder(path) as (folder, entries):
        for name in entries if names is None else names:
            if name not in entries:
                raise CheckpointError(f"{MANIFEST} does not name {name}", where=str(path), fix="use another copy")
            with _open_entry(path, folder, name, entries[name]["size"]) as file:
                contents[name] = file.read()
            _check_sha256(path, name, sha256(contents[name]), entries[name]["sha256"])
    return contents


def remove_folder(path: Path) -> None:
    """Delete a folder atomically: its name never shows a part of it.

    Raises:
        DiskError: it cannot be renamed or deleted.
    """
    with _disk_errors(path):
        _remove(path)


def clean_leftovers(parent: Path) -> None:
    """Delete the temporary files and folders that killed processes left in `parent`, and nothing else.

    Raises:
        DiskError: one cannot be deleted.
    """
    with _disk_errors(parent):
        for name in sorted(os.listdir(parent)):
            if _is_leftover(name):
                with suppress(FileNotFoundError):  # another process cleans too
                    _delete(parent / name)


def parse_json(data: bytes, where: Path) -> Any:
    """Parse strict JSON from an untrusted file.

    Raises:
        CheckpointError: it is not UTF-8, not JSON, nested too deeply, or has too large a number.
    """
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise CheckpointError(f"{where.name} is not usable JSON: {reason}", where=str(where), fix=_OTHER_COPY) from None


_OTHER_COPY = "use another copy, or remove this one"


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _manifest(files: dict[str, bytes]) -> bytes:
    entries = {name: {"size": len(data), "sha256": sha256(data)} for name, data in sorted(files.items())}
    # No final newline: a file without its last byte must not parse.
    return json.dumps({"files": entries, "format": MANIFEST_FORMAT}, indent=1).encode()


def _write_temporary_folder(parent: Path, files: dict[str, bytes]) -> Path:
    assert all(_FILE_NAME.fullmatch(name) and name != MANIFEST for name in files), sorted(files)
    temporary = _temporary(parent)
    try:
        _operation("mkdir", temporary)
        os.mkdir(temporary, 0o700 if _is_private(parent) else 0o777)
        for name, data in files.items():
            _write_file(temporary / name, data)
        _write_file(temporary / MANIFEST, _manifest(files))
        _sync_folder(temporary)
    except BaseException:
        _discard(temporary)
        raise
    return temporary


def _is_same_folder(path: Path, files: dict[str, bytes]) -> bool:
    try:
        return read_folder(path) == files
    except CheckpointError:
        return False


def _remove(path: Path) -> None:
    temporary = _temporary(path.parent)
    _rename(path, temporary)
    try:
        _sync_folder(path.parent)
        _delete(temporary)
    except BaseException:
        _discard(temporary)
        raise


def _is_leftover(name: str) -> bool:
    match = _TEMPORARY.fullmatch(name)
    if match is None:
        return False
    pid = int(match[1])
    if pid == os.getpid():
        return match[2] != _PROCESS
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # another user's process has the pid
    return False


@contextmanager
def _open_folder(path: Path) -> Iterator[tuple[int, dict[str, dict[str, Any]]]]:
    """Open a folder and its manifest: (descriptor, {name: {"size", "sha256"}}).

    Files are opened relative to the descriptor, so a folder that is replaced meanwhile is read consistently.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CheckpointError(
            f"cannot open the folder: {error.strerror}", where=str(path), fix="check the path"
        ) from None
    try:
        yield folder, _read_manifest(path, folder)
    finally:
        os.close(folder)


def _read_manifest(path: Path, folder: int) -> dict[str, dict[str, Any]]:
    with _open_entry(path, folder, MANIFEST, None) as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise _damaged(path, f"{MANIFEST} is larger than {MAX_MANIFEST_BYTES:,} bytes")
    manifest = parse_json(data, path / MANIFEST)
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise _damaged(path, f"{MANIFEST} does not list files")
    if manifest["format"] != MANIFEST_FORMAT:
        raise CheckpointError(
            f"{MANIFEST} has format {str(manifest['format'])[:20]}, this version reads {MANIFEST_FORMAT}",
            where=str(path),
            fix="install the version of unpad that wrote it, or a newer one",
        )
    if manifest.keys() != {"files", "format"} or not isinstance(manifest["files"], dict):
        raise _damaged(path, f"{MANIFEST} does not list files")
    for name, entry in manifest["files"].items():
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise _damaged(path, f"{MANIFEST} names {name[:80]!r}, which is not a plain file name")
        if (
            not isinstance(entry, dict)
            or entry.keys() != {"size", "sha256"}
            or type(entry["size"]) is not int
            or not 0 <= entry["size"] < 1 << 63
            or not isinstance(entry["sha256"], str)
            or not _SHA256.fullmatch(entry["sha256"])
        ):
            raise _damaged(path, f"{MANIFEST} has no valid size and sha256 of {name}")
    return manifest["files"]


@contextmanager
def _open_entry(path: Path, folder: int, name: str, size: int | None) -> Iterator[Any]:
    """Open a plain file of an open folder, and check its `size` unless None; failed reads name the file."""
    try:
        with open(name, "rb", opener=lambda name, flags: os.open(name, flags | _READ_FLAGS, dir_fd=folder)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _damaged(path, f"{name} is not a plain file")
            if size is not None and status.st_size != size:
                raise _damaged(path, f"{name} has size {status.st_size}, expected {size}")
            yield file
    except FileNotFoundError:
        raise _damaged(path, f"{name} is missing") from None
    except OSError as error:
        reason = "is a link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise _damaged(path, f"{name} {reason}") from None


def _check_sha256(path: Path, name: str, found: str, expected: str) -> None:
    if found != expected:
        raise _damaged(path, f"{name} sha256 mismatch")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(path), fix=_OTHER_COPY)


# --------------------------------------------------------------------------- a log of JSON lines


class LineLog:
    """Append-only file of JSON objects, one per line, which a resumed run truncates to its checkpoint.

    Opening drops an unfinished last line, so that the next record starts on its own line.

    Raises:
        DiskError: the file cannot be opened, or later written; a failed record leaves no partial line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    def append(self, record: dict[str, Any]) -> None:
        """Append one record in one write. Keys keep their order; a non-finite float becomes the text "nan" or "inf"."""
        line = (json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n").encode()
        size = os.fstat(self._descriptor).st_size
        with _disk_errors(self.path, len(line)):
            try:
                _write_all(self._descriptor, self.path, line)
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, size)
                raise

    def sync(self) -> None:
        """Flush to the device; call it before saving a checkpoint that relies on these records."""
        with _disk_errors(self.path):
            _operation("fsync", self.path)
            os.fsync(self._descriptor)

    def truncate(self, keep: Callable[[dict[str, Any]], bool | None]) -> None:
        """Keep the records for which `keep` is true, byte for byte, and drop lines cut short by a crash.

        Args:
            keep: returns None for an object that is no record of this log.

        Raises:
            CheckpointError: an invalid line precedes a kept record.
            DiskError: the file cannot be rewritten; it is unchanged.
        """
        with _disk_errors(self.path):
            data = self.path.read_bytes()
        kept: list[bytes] = []
        damaged = 0
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            record = _record(line)
            kept_here = None if record is None else keep(record)
            if kept_here is None:
                damaged = damaged or number
            elif kept_here:
                if damaged:
                    raise CheckpointError(
                        "the line is not a JSON object, or lacks fields of this file",
                        where=f"{self.path}:{damaged}",
                        fix="remove or correct the line",
                    )
                kept.append(line + b"\n")
        if b"".join(kept) != data:
            write_atomic(self.path, b"".join(kept))
            os.close(self._descriptor)
            self._open()

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> None:
        with _disk_errors(self.path):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _file_mode(self.path))
            size = os.fstat(self._descriptor).st_size
            if size == 0:
                _sync_folder(self.path.parent)
            elif os.pread(self._descriptor, 1, size - 1) != b"\n":
                _operation("truncate", self.path)
                os.ftruncate(self._descriptor, self.path.read_bytes().rfind(b"\n") + 1)


def finite(value: Any) -> Any:
    """Replace every non-finite float by its text, "inf", "-inf" or "nan", so that the value is strict JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


# --------------------------------------------------------------------------- one run per directory


class RunLock:
    """Exclusive lock on a run directory, as a context; the kernel releases it however the process ends.

    The file run.lock is never removed: a process with the old file open and one that creates a new file could both
    acquire the lock.

    Raises:
        RunInUseError: another process has the lock; names its pid, host and start.
        DiskError: run.lock cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / LOCK
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        with _disk_errors(self.path):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _file_mode(self.path))
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _operation("truncate", self.path)
                os.ftruncate(descriptor, 0)
                _write_all(descriptor, self.path, json.dumps(_this_process(), ensure_ascii=False).encode())
            except BlockingIOError:
                os.close(descriptor)
                raise self._in_use() from None
            except BaseException:
                os.close(descriptor)
                raise
        self._descriptor = descriptor
        # A forked worker shares the lock and would hold it after this process is killed.
        os.register_at_fork(after_in_child=self._close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _in_use(self) -> RunInUseError:
        holder: dict[str, Any] = {}
        for _ in range(50):  # the holder may not have written its name yet
            with suppress(OSError):
                holder = _record(self.path.read_bytes()) or {}
            if holder:
                break
            time.sleep(0.02)
        pid, host, started = (str(holder.get(key, "unknown"))[:200] for key in ("pid", "host", "started"))
        return RunInUseError(
            f"run {self.folder} is in use by pid {pid} on host {host} since {started}",
            where=str(self.path),
            fix="wait until it ends or stop it, or choose another --out",
        )


def _this_process() -> dict[str, Any]:
    boot_id = ""
    with suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot_id": boot_id,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
    }
