"""Folders with a manifest: MANIFEST.json holds size and sha256 of each file, is written last and checked on every read.

Reading never follows a link, never waits for a pipe, and opens no file that the manifest does not name.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from unpad.errors import CheckpointError, DiskError
from unpad.storage import disk
from unpad.storage.disk import delete, discard, disk_errors, new_folder, rename, sync_folder, temporary_name, write_file
from unpad.storage.files import sha256
from unpad.storage.strict_json import OTHER_COPY, parse_json

MANIFEST = "MANIFEST.json"
MANIFEST_FORMAT = 1
MAX_MANIFEST_BYTES = 16 << 20

_READ_FLAGS = disk.NO_FOLLOW | disk.NO_WAIT  # never follow a planted link, never wait for a named pipe
Entry = dict[str, Any]  # of a file in the manifest: its size in bytes and its sha256
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def write_folder(path: Path, files: dict[str, bytes]) -> None:
    """Write a folder of files and its manifest atomically: it is absent or complete.

    Two processes may write the same contents at once; existing folders are never replaced.

    Raises:
        DiskError: it cannot be written, or the folder exists with other contents; nothing temporary remains.
    """
    with disk_errors(path, sum(map(len, files.values()))):
        temporary = _write_temporary_folder(path.parent, files)
        try:
            rename(temporary, path)
        except BaseException as error:
            discard(temporary)
            if not isinstance(error, OSError) or error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if not _is_same_folder(path, files):
                fix = "move it away, or choose another name"
                raise DiskError("the folder exists with other contents", where=str(path), fix=fix) from None
            return
        sync_folder(path.parent)


def replace_folder(path: Path, files: dict[str, bytes]) -> None:
    """Write a folder, replacing an existing one.

    At every instant a complete folder is at `path` or, between two renames, at `replaced(path)`.

    Raises:
        DiskError: it cannot be written; a complete folder is still at one of the two names.
    """
    with disk_errors(path, sum(map(len, files.values()))):
        _put_in_place(_write_temporary_folder(path.parent, files), path)


def _put_in_place(temporary: Path, path: Path) -> None:
    """Rename a complete folder to `path`, replacing the one there."""
    old = replaced(path)
    try:
        if os.path.lexists(path):
            if os.path.lexists(old):
                _remove(old)
            rename(path, old)
        rename(temporary, path)
    except BaseException:
        if not os.path.lexists(path) and os.path.lexists(old):
            with suppress(OSError, DiskError):
                rename(old, path)
        discard(temporary)
        raise
    sync_folder(path.parent)
    if os.path.lexists(old):
        _remove(old)


# --------------------------------------------------------------------------- written by several processes


def begin_folder(path: Path) -> Path:
    """Create the temporary folder of a folder written by several processes; one of them begins and ends it.

    Returns:
        Folder for the files of the processes, see `write_part`.

    Raises:
        DiskError: it cannot be made.
    """
    with disk_errors(path):
        temporary = temporary_name(path.parent)
        new_folder(temporary, private=False)
        return temporary


def write_part(temporary: Path, name: str, data: bytes) -> Entry:
    """Write one file of a folder that several processes write, and return its entry of the manifest.

    Raises:
        DiskError: it cannot be written.
    """
    assert _FILE_NAME.fullmatch(name), name
    with disk_errors(temporary, len(data)):
        write_file(temporary / name, data)
    return _entry(data)


def end_folder(temporary: Path, path: Path, entries: dict[str, Entry]) -> None:
    """Move the folder of `begin_folder` to its final name, as `replace_folder` does.

    Args:
        entries: entries of all its files, as `write_part` returned them.

    Raises:
        DiskError: it cannot be written; the old folder is still at `path` or at `replaced(path)`.
    """
    with disk_errors(path):
        _complete(temporary, entries)
        _put_in_place(temporary, path)


# --------------------------------------------------------------------------- read


def replaced(path: Path) -> Path:
    """Name of the old folder during `replace_folder`; readers open it when `path` is missing."""
    return path.with_name(f".old-{path.name}")


def read_folder(path: Path, names: Iterable[str] | None = None) -> dict[str, bytes]:
    """Read and verify the files of a folder, or only those in `names`, which may be patterns with `*` (fnmatch).

    Raises:
        CheckpointError: one of them is missing, has another size or sha256, is a link, or has an invalid name.
    """
    return dict(each_file(path, names))


def each_file(path: Path, names: Iterable[str] | None = None) -> Generator[tuple[str, bytes], None, None]:
    """Read and verify files as `read_folder` does, one by one in the order of `names`; all come from the folder that
    was opened first."""
    with _open_folder(path) as (folder, entries):
        for name in entries if names is None else _chosen(path, entries, names):
            with _open_entry(path, folder, name, entries[name]["size"]) as file:
                content = file.read()
            if sha256(content) != entries[name]["sha256"]:
                raise _damaged(path, f"{name} sha256 mismatch")
            yield name, content


def _chosen(path: Path, entries: Iterable[str], names: Iterable[str]) -> Iterator[str]:
    for name in names:
        found = [entry for entry in entries if fnmatchcase(entry, name)]
        if not found:
            raise CheckpointError(f"{MANIFEST} does not name {name}", where=str(path), fix="use another copy")
        yield from found


def remove_folder(path: Path) -> None:
    """Delete a folder atomically: it is never visible in part.

    Raises:
        DiskError: it cannot be renamed or deleted.
    """
    with disk_errors(path):
        _remove(path)


def _entry(data: bytes) -> Entry:
    return {"size": len(data), "sha256": sha256(data)}


def _manifest(entries: dict[str, Entry]) -> bytes:
    # No final newline: a file without its last byte must not parse.
    return json.dumps({"files": dict(sorted(entries.items())), "format": MANIFEST_FORMAT}, indent=1).encode()


def _complete(temporary: Path, entries: dict[str, Entry]) -> None:
    """Write the manifest, and flush the folder."""
    write_file(temporary / MANIFEST, _manifest(entries))
    sync_folder(temporary)


def _write_temporary_folder(parent: Path, files: dict[str, bytes]) -> Path:
    assert all(_FILE_NAME.fullmatch(name) and name != MANIFEST for name in files), sorted(files)
    temporary = temporary_name(parent)
    try:
        new_folder(temporary, private=False)
        for name, data in files.items():
            write_file(temporary / name, data)
        _complete(temporary, {name: _entry(data) for name, data in files.items()})
    except BaseException:
        discard(temporary)
        raise
    return temporary


def _is_same_folder(path: Path, files: dict[str, bytes]) -> bool:
    with suppress(CheckpointError):
        return read_folder(path) == files
    return False


def _remove(path: Path) -> None:
    temporary = temporary_name(path.parent)
    rename(path, temporary)
    try:
        sync_folder(path.parent)
        delete(temporary)
        sync_folder(path.parent)  # a folder that nobody resumes is not tidied up either
    except BaseException:
        discard(temporary)
        raise


@contextmanager
def _open_folder(path: Path) -> Iterator[tuple[int | None, dict[str, dict[str, Any]]]]:
    """Open a folder and its manifest: (descriptor, {name: {"size", "sha256"}}).

    Files are opened relative to the descriptor, so a folder that is replaced meanwhile is read consistently; on
    Windows, which opens no folder, the descriptor is None, and files are opened by their paths.
    """
    if not disk.FOLDER:
        yield None, _read_manifest(path, None)
        return
    try:
        folder = os.open(path, os.O_RDONLY | disk.FOLDER)
    except OSError as error:
        raise CheckpointError(
            f"cannot open the folder: {error.strerror}", where=str(path), fix="check the path"
        ) from None
    try:
        yield folder, _read_manifest(path, folder)
    finally:
        os.close(folder)


def _read_manifest(path: Path, folder: int | None) -> dict[str, dict[str, Any]]:
    with _open_entry(path, folder, MANIFEST, None) as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise _damaged(path, f"{MANIFEST} is larger than {MAX_MANIFEST_BYTES:,} bytes")
    manifest = parse_json(data, path / MANIFEST)
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise _damaged(path, f"{MANIFEST} does not list files")
    if manifest["format"] != MANIFEST_FORMAT:
        what = f"{MANIFEST} has format {str(manifest['format'])[:20]}, this version reads {MANIFEST_FORMAT}"
        raise CheckpointError(what, where=str(path), fix="install the version of unpad that wrote it, or a newer one")
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
def _open_entry(path: Path, folder: int | None, name: str, size: int | None) -> Iterator[Any]:
    """Open a plain file of an open folder, and check its `size` unless None; failed reads name the file."""
    try:
        place = path / name if folder is None else name
        with open(place, "rb", opener=lambda name, flags: os.open(name, flags | _READ_FLAGS, dir_fd=folder)) as file:
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


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(path), fix=OTHER_COPY)
