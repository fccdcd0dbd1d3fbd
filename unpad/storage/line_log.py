"""Append-only logs of JSON lines."""

import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from unpad.errors import CheckpointError, DiskError
from unpad.storage.disk import BINARY, check_held, disk_errors, file_mode, flush, sync_folder, truncate, write_all
from unpad.storage.files import write_atomic
from unpad.storage.strict_json import finite, json_object


class LineLog:
    """Append-only file of JSON objects, one per line, which a resumed run truncates to its checkpoint.

    Opening drops the remains of a kill or a power cut at the end: an unfinished line, and lines with zeros in place of
    unflushed data. So the next record starts on its own line.

    Raises:
        DiskError: the file cannot be opened or later written, or its locked folder was replaced; a failed record leaves
            no partial line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    def append(self, record: dict[str, Any]) -> None:
        """Append one record in one write. Keys keep their order; a non-finite float becomes the text "nan" or "inf"."""
        check_held(self.path)
        line = (json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n").encode()
        status = os.fstat(self._descriptor)
        if status.st_nlink == 0:
            what = f"{self.path.name} was deleted while it was being written"
            fix = f"put {self.path.parent} back from a copy and continue there, or begin again"
            raise DiskError(what, where=str(self.path), fix=fix)
        with disk_errors(self.path, len(line)):
            try:
                write_all(self._descriptor, self.path, line)
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, status.st_size)
                raise

    def sync(self) -> None:
        """Flush to the device; call it before saving a checkpoint that relies on these records."""
        with disk_errors(self.path):
            flush(self._descriptor, self.path)

    def truncate(self, keep: Callable[[dict[str, Any]], bool | None], *, mend: bool = False) -> list[int]:
        """Keep the records for which `keep` is true, byte for byte, and drop lines cut short by a crash.

        Args:
            keep: returns None for an object that is not a record of this log.
            mend: whether to drop invalid lines before a kept record too.

        Returns:
            Numbers of such lines.

        Raises:
            CheckpointError: an invalid line precedes a kept record, unless `mend`.
            DiskError: the file cannot be rewritten; it is unchanged.
        """
        with disk_errors(self.path):
            data = self.path.read_bytes()
        kept: list[bytes] = []
        damaged, dropped = list[int](), 0
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            record = json_object(line)
            kept_here = None if record is None else keep(record)
            if kept_here is None:
                damaged.append(number)
            elif kept_here:
                dropped = len(damaged)
                if damaged and not mend:
                    what = "the line is not a JSON object, or lacks fields of this file"
                    raise CheckpointError(what, where=f"{self.path}:{damaged[0]}", fix="remove or correct the line")
                kept.append(line + b"\n")
        if b"".join(kept) != data:
            os.close(self._descriptor)  # Windows replaces no open file
            try:
                write_atomic(self.path, b"".join(kept))
            finally:
                self._open()
        return damaged[:dropped]

    def is_in_place(self) -> bool:
        """True if the file at the path is the one being written."""
        with suppress(OSError):
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        return False

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> None:
        check_held(self.path)
        with disk_errors(self.path):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | BINARY, file_mode(self.path))
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                os.close(self._descriptor)
                what = "a log is to be written here, and this is no regular file"
                raise DiskError(what, where=str(self.path), fix="remove it, or choose another --out")
            if status.st_size == 0:
                sync_folder(self.path.parent)
            elif (whole := _size_of_whole_lines(self.path.read_bytes())) != status.st_size:
                truncate(self._descriptor, self.path, whole)


def _size_of_whole_lines(data: bytes) -> int:
    end = data.rfind(b"\n") + 1
    while end and b"\0" in data[(start := data.rfind(b"\n", 0, end - 1) + 1) : end]:
        end = start
    return end
