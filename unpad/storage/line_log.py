"""Append-only logs of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from unpad.errors import CheckpointError
from unpad.storage.disk import disk_errors, file_mode, flush, sync_folder, truncate, write_all
from unpad.storage.files import write_atomic
from unpad.storage.strict_json import finite, json_object


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
        with disk_errors(self.path, len(line)):
            try:
                write_all(self._descriptor, self.path, line)
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, size)
                raise

    def sync(self) -> None:
        """Flush to the device; call it before saving a checkpoint that relies on these records."""
        with disk_errors(self.path):
            flush(self._descriptor, self.path)

    def truncate(self, keep: Callable[[dict[str, Any]], bool | None]) -> None:
        """Keep the records for which `keep` is true, byte for byte, and drop lines cut short by a crash.

        Args:
            keep: returns None for an object that is no record of this log.

        Raises:
            CheckpointError: an invalid line precedes a kept record.
            DiskError: the file cannot be rewritten; it is unchanged.
        """
        with disk_errors(self.path):
            data = self.path.read_bytes()
        kept: list[bytes] = []
        damaged = 0
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            record = json_object(line)
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
        with disk_errors(self.path):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, file_mode(self.path))
            size = os.fstat(self._descriptor).st_size
            if size == 0:
                sync_folder(self.path.parent)
            elif os.pread(self._descriptor, 1, size - 1) != b"\n":
                truncate(self._descriptor, self.path, self.path.read_bytes().rfind(b"\n") + 1)
