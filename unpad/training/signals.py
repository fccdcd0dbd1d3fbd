"""Handling of Ctrl-C and SIGTERM during a run."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from unpad.errors import Interrupted, Terminated
from unpad.processes.group import ALONE, Group


class Signals:
    """Requests to stop: a first Ctrl-C or SIGTERM stops the run after the step, a second one at once."""

    def __init__(self, group: Group = ALONE) -> None:
        self.received: int | None = None  # by this process
        self._group = group
        self._agreed: int | None = None

    @property
    def stops(self) -> int | None:
        """Signal that stops the run after the step; of several processes one that all of them know of."""
        return self.received if self._group.size == 1 else self._agreed

    def agree(self, received: Sequence[int | None]) -> None:
        """Take note of the signals that all processes have received."""
        self._agreed = next((number for number in received if number is not None), self._agreed)

    @contextmanager
    def listen(self) -> Iterator[None]:
        def handle(number: int, frame: FrameType | None) -> None:
            self.received = number
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)

        try:
            before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
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
        kind, name = (Interrupted, "Ctrl-C") if self.stops == signal.SIGINT else (Terminated, "SIGTERM")
        error = kind(
            f"stopped by {name}; everything up to here is saved", where=str(folder), fix="continue with --resume"
        )
        error.is_agreed = True
        raise error
