"""Handling of Ctrl-C, SIGTERM and SIGHUP during a run."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from unpad.errors import SIGNALS
from unpad.processes.group import ALONE, Group
from unpad.terminal.commands import resume_run


class Signals:
    """Requests to stop: a first Ctrl-C, SIGTERM or SIGHUP stops the run after the step, a second of its kind at once.

    A second SIGHUP does nothing: a terminal that closes sends one, and its shell another.
    """

    def __init__(self, group: Group = ALONE) -> None:
        self.received: int | None = None  # by this process
        self._group = group
        self._agreed: int | None = None

    @property
    def stops(self) -> int | None:
        """Signal that stops the run after the step; with several processes, one that all have agreed on."""
        return self.received if self._group.size == 1 else self._agreed

    def agree(self, received: Sequence[int | None]) -> None:
        """Record the signals that all processes have received."""
        self._agreed = next((number for number in received if number is not None), self._agreed)

    @contextmanager
    def listen(self) -> Iterator[None]:
        def handle(number: int, frame: FrameType | None) -> None:
            self.received = self.received or number
            if number != signal.SIGHUP:
                signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)

        # nohup has SIGHUP ignored.
        numbers = [
            signum for signum in SIGNALS if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN
        ]
        try:
            before = {number: signal.signal(number, handle) for number in numbers}
        except ValueError:  # not the main thread: the caller owns the signals
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def raise_if_received(self, folder: Path) -> None:
        if self.stops is None:
            return
        kind = SIGNALS[self.stops]
        what = f"stopped by {kind.name}; everything up to here is saved"
        error = kind(what, where=str(folder), fix=f"continue with {resume_run(folder)}")
        error.is_agreed = True
        raise error
