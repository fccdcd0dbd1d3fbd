"""Files and folders that replace what was there as a whole, checksums, and the cache folder."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
from contextlib import suppress
from pathlib import Path

from unpad.storage.disk import (
    delete,
    discard,
    disk_errors,
    is_leftover,
    is_private,
    new_folder,
    rename,
    sync_folder,
    temporary_name,
    write_file,
)


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
    with disk_errors(path):
        missing = list(itertools.takewhile(lambda folder: not folder.is_dir(), (path, *path.parents)))
        for folder in reversed(missing):
            with suppress(FileExistsError):  # made by another process; a file of this name fails below
                new_folder(folder, private)
            sync_folder(folder.parent)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def make_private(folder: Path) -> None:
    """Let only the owner enter an existing folder; what is written into it later is private too.

    Raises:
        DiskError: the folder belongs to another user.
    """
    with disk_errors(folder):
        if not is_private(folder):
            os.chmod(folder, 0o700)


def write_atomic(path: Path, data: bytes | str, *, private: bool = False) -> None:
    """Replace a file atomically: a reader sees the old file or the complete new one. Text is stored as UTF-8.

    Args:
        private: whether only the owner may read it; so it is anyway in a folder that only the owner may enter.

    Raises:
        DiskError: it cannot be written; the old file is untouched, and nothing temporary remains.
    """
    payload = data.encode() if isinstance(data, str) else data
    temporary = temporary_name(path.parent)
    with disk_errors(path, len(payload)):
        try:
            write_file(temporary, payload, private)
            rename(temporary, path)
        except BaseException:
            discard(temporary)
            raise
        sync_folder(path.parent)


def clean_leftovers(parent: Path) -> None:
    """Delete the temporary files and folders that killed processes left in `parent`, and nothing else.

    Raises:
        DiskError: one cannot be deleted.
    """
    with disk_errors(parent):
        for name in sorted(os.listdir(parent)):
            if is_leftover(name):
                with suppress(FileNotFoundError):  # another process cleans too
                    delete(parent / name)
