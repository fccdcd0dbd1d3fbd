"""Durable files: the only package that writes files that must survive. Write, fsync, rename, verify, lock.

What is written into a folder that only its owner can enter is for its owner only (`make_folder`, `make_private`).
A visible name is always complete. Files and folders are written under a temporary name, flushed to the device and
renamed; then the parent folder is flushed too. A folder carries MANIFEST.json with the size and sha256 of each file,
written last and checked on every read.
"""

from unpad.storage.disk import check_space, discard, disk_errors
from unpad.storage.files import (
    cache_folder,
    clean_leftovers,
    make_folder,
    make_private,
    sha256,
    sha256_file,
    write_atomic,
    write_files,
)
from unpad.storage.folders import (
    Entry,
    begin_folder,
    each_file,
    end_folder,
    read_folder,
    remove_folder,
    replace_folder,
    replaced,
    write_folder,
    write_part,
)
from unpad.storage.line_log import LineLog
from unpad.storage.lock import LOCK, RunLock
from unpad.storage.strict_json import finite, parse_json

__all__ = [
    "LOCK", "Entry", "LineLog", "RunLock", "begin_folder", "cache_folder", "check_space",
    "clean_leftovers", "discard", "disk_errors", "each_file", "end_folder", "finite", "make_folder", "make_private",
    "parse_json", "read_folder", "remove_folder", "replace_folder", "replaced", "sha256", "sha256_file",
    "write_atomic", "write_files", "write_folder", "write_part",
]  # fmt: skip
