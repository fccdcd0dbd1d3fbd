"""One process per run directory."""

import json
import os
import shlex
import socket
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from unpad.errors import RunInUseError
from unpad.storage import disk
from unpad.storage.disk import check_held, disk_errors, file_mode, hold, release, truncate, write_all
from unpad.storage.strict_json import json_object

LOCK = "run.lock"


class RunLock:
    """Exclusive lock on a run directory, as a context; the kernel releases it however the process ends.

    While it is held, `disk.check_held` refuses to write by a path that now leads into another folder.

    The file run.lock is never removed: a process with the old file open and one that creates a new file could both
    acquire the lock.

    Raises:
        RunInUseError: another process has the lock; names its pid, host and start.
        DiskError: run.lock cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / LOCK
        self._descriptor: int | None = None

    def __enter__(self) -> "RunLock":
        check_held(self.path)
        with disk_errors(self.path):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | disk.NO_FOLLOW | disk.BINARY, file_mode(self.path))
            try:
                disk.take_lock(descriptor)
                truncate(descriptor, self.path, 0)
                write_all(descriptor, self.path, json.dumps(_this_process(), ensure_ascii=False).encode())
            except BlockingIOError:
                os.close(descriptor)
                raise self._in_use() from None
            except BaseException:
                os.close(descriptor)
                raise
        self._descriptor = descriptor
        hold(descriptor, self.path)
        # A forked worker shares the lock and would hold it after this process is killed.
        if hasattr(os, "register_at_fork"):
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
            release(descriptor)
            os.close(descriptor)

    def _in_use(self) -> RunInUseError:
        holder: dict[str, Any] = {}
        for _ in range(50):  # the holder may not have written its name yet
            with suppress(OSError):
                holder = json_object(self.path.read_bytes()) or {}
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
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot_id": disk.text_of("/proc/sys/kernel/random/boot_id"),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
    }
