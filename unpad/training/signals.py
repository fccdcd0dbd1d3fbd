"""Handling of Ctrl-C and SIGTERM during a run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from unpad.errors import Interrupted, Terminated


class Signals:
    """Requests to stop: a first Ctrl-C or SIGTERM stops the run after the step, a second one at once."""

    def __init__(self) -> None:
        self.received: int | None = None

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
        if self.received is None:
            return
        kind, name = (Interrupted, "Ctrl-C") if self.received == signal.SIGINT else (Terminated, "SIGTERM")
        raise kind(
            f"stopped by {name}; everything up to here is saved", where=str(folder), fix="continue with --resume"
        )
