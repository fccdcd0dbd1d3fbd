"""Files and folders that replace what was there as a whole, checksums, and the cache folder."""

import errno
import hashlib
import itertools
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from unpad.storage import disk
from unpad.storage.paths import user_path

WRITERS = 16  # threads that wait for the device at once


def sha256(data: bytes | str) -> str:
    """Hexadecimal sha256 of bytes, or of text in UTF-8."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hexadecimal sha256 of a file, read in pieces. Raises OSError as `open` does."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """Folder for reproducible files: $UNPAD_CACHE, else unpad/ in $XDG_CACHE_HOME, else ~/.cache/unpad.

    Raises:
        RecipeError: the named folder is not a valid path on this machine.
    """
    if named := os.environ.get("UNPAD_CACHE"):
        return user_path(named)
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "unpad"


def make_folder(path: Path, *, private: bool = False) -> None:
    """Create a folder and its parents durably; an existing folder is unchanged, and its name is made durable.

    Args:
        private: whether only the owner may enter the new folders; always so inside a private folder.

    Raises:
        DiskError: it cannot be created, or a file has its name.
    """
    with disk.disk_errors(path):
        missing = list(itertools.takewhile(lambda folder: not folder.is_dir(), (path, *path.parents)))
        _flush_name(missing[-1].parent if missing else path)
        for folder in reversed(missing):
            with suppress(FileExistsError):  # created by another process; a file of this name fails below
                disk.new_folder(folder, private)
            disk.sync_folder(folder.parent)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def _flush_name(folder: Path) -> None:
    """Flush the name of a folder, in case its creator was killed before doing so: its contents depend on the name."""
    try:
        disk.sync_folder(folder.parent)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):  # nobody creates folders there
            raise


def make_private(folder: Path) -> None:
    """Restrict an existing folder to its owner; files written into it later are private too.

    Raises:
        DiskError: the folder belongs to another user.
    """
    with disk.disk_errors(folder):
        if not disk.is_private(folder):
            disk.check_held(folder)
            os.chmod(folder, 0o700)


def write_atomic(path: Path, data: bytes | str, *, private: bool = False) -> None:
    """Replace a file atomically: a reader sees the old file or the complete new one. Text is stored as UTF-8.

    Args:
        private: whether only the owner may read it; always so in a private folder.

    Raises:
        DiskError: it cannot be written; the old file is untouched, and no temporary file remains.
    """
    payload = data.encode() if isinstance(data, str) else data
    with disk.disk_errors(path, len(payload)):
        _replace(path, payload, private)
        disk.sync_folder(path.parent)


def _replace(path: Path, payload: bytes, private: bool = False) -> None:
    """Write a file under a temporary name, flushed, and give it its own."""
    temporary = disk.temporary_name(path.parent)
    try:
        disk.write_file(temporary, payload, private)
        disk.rename(temporary, path)
    except BaseException:
        disk.discard(temporary)
        raise


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace many small files of a folder, each atomically, and flush them together, which is faster than one by one.

    Raises:
        DiskError: one cannot be written; no temporary file remains.
    """
    with disk.disk_errors(folder, sum(map(len, files.values()))):
        with ThreadPoolExecutor(WRITERS) as pool:
            for _ in pool.map(lambda name: _replace(folder / name, files[name]), files):
                pass
        disk.sync_folder(folder)


def clean_leftovers(parent: Path, *, alone: bool = False) -> None:
    """Delete the temporary files and folders that killed processes left in `parent`, and nothing else.

    Args:
        alone: whether only this process may write there, because it holds the lock; see `disk.is_leftover`.

    Raises:
        DiskError: one cannot be deleted.
    """
    with disk.disk_errors(parent):
        for name in sorted(os.listdir(parent)):
            if disk.is_leftover(parent / name, alone):
                with suppress(FileNotFoundError):  # another process cleans too
                    disk.delete(parent / name)
