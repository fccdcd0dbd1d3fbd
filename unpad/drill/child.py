"""Processes of a drill that train: started one after the other from a process that has all modules, and killed.

They end with the drill, however that ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path

from unpad import errors
from unpad.errors import UnpadError
from unpad.processes import forking

MODULES = ["unpad.drill.train", "unpad.drill.probe", "unpad.run.board"]
LAST_LINES = 3  # of the output of a child that failed


@dataclass(frozen=True)
class Child:
    """A process of a drill, with its output in the file `output` and a user's error in the file `error`."""

    process: BaseProcess
    output: Path
    error: Path

    def wait(self, seconds: float) -> int | None:
        """Exit code, or minus the signal that ended it; None if it has not ended in so many seconds."""
        self.process.join(max(seconds, 0))
        return self.process.exitcode

    def signal(self, number: int) -> None:
        """Send a signal to the process alone; none if it has ended."""
        if self.process.exitcode is None and self.process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> int | None:
        """End it as SIGKILL does, and all that it has started."""
        if self.process.pid is None:  # it did not begin
            return None
        self.signal(signal.SIGKILL)
        self.process.join()
        with suppress(ProcessLookupError, PermissionError):  # it leads a group of its own
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.exitcode

    def user_error(self) -> UnpadError | None:
        """The error of a user that it ended with."""
        try:
            name, what, where, fix = json.loads(self.error.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        error: UnpadError = getattr(errors, name, UnpadError)(what, where=where, fix=fix)
        return error

    def last_words(self) -> str:
        """Its last lines of output, or its error, in one line."""
        if (error := self.user_error()) is not None:
            return f"{type(error).__name__}: {error.what}"
        with suppress(OSError):
            lines = [line.strip() for line in self.output.read_text("utf-8", "replace").splitlines() if line.strip()]
            return " ".join(lines[-LAST_LINES:])[-300:]
        return ""


@contextmanager
def started(folder: Path, action: Callable[..., object], *arguments: object) -> Iterator[Child]:
    """Run `action` in a process of its own, which is killed at the end.

    Args:
        folder: where its output goes.
        action: function of a module; arguments: picklable.
    """
    name = f"{time.monotonic_ns()}"
    output, error = folder / f"{name}.out", folder / f"{name}.error"
    child = Child(forking.prepare(MODULES, _inside, action, arguments, output, error), output, error)
    try:
        forking.start(child.process)
        yield child
    finally:
        child.kill()
        for path in (output, error):
            path.unlink(missing_ok=True)


def _inside(action: Callable[..., object], arguments: tuple[object, ...], output: Path, error: Path) -> None:
    """Do the action apart from the terminal."""
    with suppress(OSError):
        os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        action(*arguments)
    except UnpadError as told:
        error.write_text(json.dumps([type(told).__name__, told.what, told.where, told.fix]), "utf-8")
        sys.exit(told.exit_code)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        with suppress(OSError):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)
