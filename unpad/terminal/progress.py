"""Progress of long work: one line on the terminal, on standard error; nothing where that is no terminal.

Any layer may report. Work inside of other work is shown after it, as in "trial 3/20 · evaluating 12/40".
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import TypeVar

from unpad.terminal.printing import escaped

REFRESH_SECONDS = 0.1
LEFT_AFTER_SECONDS = 2.0  # an estimate from less would jump
ERASE = b"\r\x1b[K"

T = TypeVar("T")
_shown: list[Bar] = []
_held = 0
_drawn_at = 0.0


class Bar:
    """A piece of work: `total` units, or an unknown number."""

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done, self._began = 0, perf_counter()

    def advance(self, num: int = 1) -> None:
        """Count `num` more units as done, and draw if it is time to."""
        self.done += num
        if _shown and perf_counter() - _drawn_at >= REFRESH_SECONDS:
            _draw()

    def text(self) -> str:
        """The work in words: its name, units done, and the time left where the total is known."""
        if not self.done and self.total is None:
            return self.what
        count = f"{self.done:,}" + ("" if self.total is None else f"/{self.total:,}")
        return f"{self.what} {count}{' ' + self.unit if self.unit else ''}{self._left()}"

    def _left(self) -> str:
        busy = perf_counter() - self._began
        if not self.total or not self.done or busy < LEFT_AFTER_SECONDS:
            return ""
        seconds = round(busy / self.done * max(self.total - self.done, 0))
        return f", left {seconds // 60}m{seconds % 60:02d}s" if seconds >= 60 else f", left {seconds}s"


@contextmanager
def progress(what: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
    """Show work on the terminal while it goes on, and erase the line at its end, however it ends.

    Args:
        what: such as "reading chat.jsonl".
        total: number of units; None if unknown.
        unit: name of a unit, plural.
    """
    bar = Bar(what, total, unit)
    if _held or not _is_terminal():
        yield bar
        return
    _shown.append(bar)
    try:
        _draw()
        yield bar
    finally:
        _shown.remove(bar)
        _write(ERASE)
        if _shown:
            _draw()


def counted(items: Iterable[T], what: str, total: int | None = None, unit: str = "") -> Iterator[T]:
    """Yield items and show how many have been taken."""
    with progress(what, total, unit) as bar:
        for item in items:
            yield item
            bar.advance()


@contextmanager
def held() -> Iterator[None]:
    """Show nothing inside, where something else draws on the terminal."""
    global _held
    _held += 1
    try:
        yield
    finally:
        _held -= 1


def erase() -> None:
    """Erase the line, if one is shown, before the process ends without leaving the work."""
    if _shown:
        _write(ERASE)


def _is_terminal() -> bool:
    try:
        plain = bool(os.environ.get("NO_COLOR"))  # also no control sequence, without which no line can be erased
        return not plain and sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    except ValueError:  # closed
        return False


def _draw() -> None:
    global _drawn_at
    _drawn_at = perf_counter()
    width = max(shutil.get_terminal_size().columns - 1, 10)
    line = " · ".join(bar.text() for bar in _shown)
    _write(ERASE + _cut(escaped(line), width).encode())


def _cut(line: str, width: int) -> str:
    """The beginning of a line that fits a terminal; a letter beyond Latin may take two columns."""
    used = 0
    for index, letter in enumerate(line):
        used += 2 if ord(letter) > 0x2E7F else 1
        if used > width:
            return line[:index]
    return line


def _write(data: bytes) -> None:
    """Write past Python's buffers, whose locks a forked process would inherit; a closed terminal is no error."""
    with suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), data)
