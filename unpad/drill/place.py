"""Folder of a drill: new, beside the run, and removed at the end, except after SIGKILL."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from unpad.errors import DiskError, HungUp, Terminated, UnpadError
from unpad.storage import RunLock

PREFIX = ".unpad-drill-"


@contextmanager
def working_folder(beside: Path) -> Iterator[Path]:
    """Create a folder beside a run, and remove it at the end with the parents created for it.

    Args:
        beside: the run directory, which need not exist and is not touched.

    Raises:
        DiskError: none can be created there.
        Terminated, HungUp: SIGTERM or SIGHUP ended the work.
    """
    parent = beside.absolute().parent
    missing = []
    for folder in (parent, *parent.parents):
        if folder.exists():
            break
        missing.append(folder)
    made: list[Path] = []
    with _signals():
        try:
            try:
                for folder in reversed(missing):
                    folder.mkdir()
                    made.append(folder)
                made.append(Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)))
            except OSError as error:
                what = f"no folder can be made there: {error.strerror}"
                raise DiskError(what, where=str(parent), fix="name a folder that is yours, with --out") from None
            with ExitStack() as stack:
                with suppress(UnpadError):  # locks of the disk have a check of their own
                    stack.enter_context(RunLock(made[-1]))
                yield made[-1]
        finally:
            _remove(made)


def left_behind(folder: Path) -> list[Path]:
    """Folders of killed drills beside `folder`: no process holds their lock."""
    found = []
    for path in sorted(folder.parent.glob(f"{PREFIX}*")):
        with suppress(UnpadError):
            if path != folder:
                with RunLock(path):
                    found.append(path)
    return found


def _remove(made: list[Path]) -> None:
    if made and made[-1].name.startswith(PREFIX):
        shutil.rmtree(made.pop(), ignore_errors=True)
    for folder in reversed(made):
        with suppress(OSError):  # it holds something else by now
            folder.rmdir()


@contextmanager
def _signals() -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into exceptions, so that the folder is removed. During imports Ctrl-C would
    otherwise end the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    for number in map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as a shell's background jobs do
            interrupts = number == signal.SIGINT
            before[number] = signal.signal(number, signal.default_int_handler if interrupts else _terminated)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    kind, name = (Terminated, "SIGTERM") if number == signal.SIGTERM else (HungUp, "SIGHUP")
    raise kind(f"stopped by {name}; the folder of the drill is removed", where=os.getcwd(), fix="drill again")
