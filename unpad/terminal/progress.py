"""Progress of long work, on standard error: one line on a terminal or in a notebook, drawn repeatedly.

Elsewhere, such as in a pipe, work of 30 s or more gets a plain line every 30 s, the first one sooner if it asks for
that. UNPAD_PROGRESS=0 in the environment silences both. Any layer may report. Work inside of other work is shown after
it, as in "trial 3/20 · evaluating 12/40".
"""

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Literal, TypeVar

from unpad.terminal.printing import escaped

REFRESH_SECONDS = 0.1
NOTEBOOK_REFRESH_SECONDS = 1.0  # a notebook keeps everything that was ever drawn
LEFT_AFTER_SECONDS = 2.0  # an estimate from less would fluctuate
LINE_SECONDS = 30.0  # between lines where redrawing is impossible
PAUSE_SECONDS = 5.0  # without work, after which the next piece counts as new work

Kind = Literal["terminal", "notebook", "lines", "none"]
T = TypeVar("T")
_shown: "list[ProgressBar]" = []
_held = 0
_drawn_at = 0.0
_kind: Kind = "none"  # of the bars shown now
_began, _told, _ended = 0.0, 0.0, float("-inf")  # of all work: its start, its last line, its last end
_watcher: threading.Thread | None = None
_process = 0  # process that shows the work, not one forked from it


class ProgressBar:
    """A piece of work: `total` units, or an unknown number."""

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done, self._before, self._began = 0, 0, perf_counter()

    def begin_at(self, done: int) -> None:
        """Count units that were done before; they do not affect the estimate of the time left."""
        self.done = self._before = done

    def advance(self, num: int = 1) -> None:
        """Count `num` more units as done, and draw if it is time to."""
        self.done += num
        if _shown:
            _show(REFRESH_SECONDS if _kind == "terminal" else NOTEBOOK_REFRESH_SECONDS)

    def text(self) -> str:
        """The line: name, units done, and the time left if the total is known."""
        if not self.done and self.total is None:
            return self.what
        count = f"{self.done:,}" + ("" if self.total is None else f"/{self.total:,}")
        return f"{self.what} {count}{' ' + self.unit if self.unit else ''}{self._left()}"

    def _left(self) -> str:
        busy, made = perf_counter() - self._began, self.done - self._before
        if not self.total or not made or busy < LEFT_AFTER_SECONDS:
            return ""
        return f", left {_span(round(busy / made * max(self.total - self.done, 0)))}"


def _span(seconds: int) -> str:
    return f"{seconds // 60}m{seconds % 60:02d}s" if seconds >= 60 else f"{seconds}s"


@contextmanager
def progress(what: str, total: int | None = None, unit: str = "", sooner: float = 0.0) -> Iterator[ProgressBar]:
    """Show work in progress, and erase its line whenever it ends.

    Args:
        what: such as "reading chat.jsonl".
        total: number of units; None if unknown.
        unit: name of a unit, plural.
        sooner: seconds by which the first line of outermost work comes sooner, where lines are printed.
    """
    global _ended
    bar = ProgressBar(what, total, unit)
    kind = _output()
    if _held or kind == "none":
        yield bar
        return
    _shown.append(bar)  # before a thread begins, which ends where no work is shown
    try:
        if len(_shown) == 1:
            _begin(kind, sooner)
        _show()
        yield bar
    finally:
        _shown.remove(bar)
        _ended = perf_counter()
        _write(_blank())
        if _shown:
            _show()


def counted(items: Iterable[T], what: str, total: int | None = None, unit: str = "") -> Iterator[T]:
    """Yield items and show how many have been taken."""
    with progress(what, total, unit) as bar:
        for item in items:
            yield item
            bar.advance()


@contextmanager
def held() -> Iterator[None]:
    """Show nothing inside, while something else draws on the terminal."""
    global _held
    _held += 1
    try:
        yield
    finally:
        _held -= 1


def told() -> None:
    """Note that a line on the work was printed elsewhere, so that none is due for a while."""
    global _told
    _told = perf_counter()


def erase() -> None:
    """Erase the line, if one is shown, before the process ends without leaving the work."""
    if _shown:
        _write(_blank())


def _blank() -> bytes:
    """Bytes that erase the drawn line; none where lines are printed."""
    return {"terminal": b"\r\x1b[K", "notebook": b"\r" + b" " * _width() + b"\r"}.get(_kind, b"")


def _output() -> Kind:
    """Kind of output that standard error takes. NO_COLOR leaves a terminal no control sequence to erase a line with."""
    if os.environ.get("UNPAD_PROGRESS") == "0" or os.environ.get("RANK", "0") != "0":  # one of several processes shows
        return "none"
    if "ipykernel" in sys.modules:
        return "notebook"
    try:
        if not sys.stderr.isatty():
            return "lines"
    except (AttributeError, ValueError):  # there is none, or it is closed
        return "none"
    return "none" if os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in ("", "dumb") else "terminal"


def _begin(kind: Kind, sooner: float) -> None:
    """Begin outermost work; it continues work that ended just before."""
    global _kind, _began, _told, _watcher, _process
    _kind, _process = kind, os.getpid()
    if perf_counter() - _ended > PAUSE_SECONDS:
        _began = perf_counter()
        _told = _began - sooner
    if kind == "lines" and (_watcher is None or not _watcher.is_alive()):
        # Work without units, such as one long product, is reported by this thread only.
        _watcher = threading.Thread(target=_watch, args=(threading.Event().wait,), daemon=True)
        _watcher.start()


def _watch(wait: Callable[[float], object]) -> None:
    """Print a line when one is due, until no work is shown."""
    while _shown:
        wait(max(_told + LINE_SECONDS - perf_counter(), 0.0) + 0.01)
        _show()


def _show(every: float = 0.0) -> None:
    """Draw the work, if it was last drawn `every` seconds ago; or print it, if a line is due."""
    global _drawn_at, _told
    now = perf_counter()
    if _kind == "lines":
        work = list(_shown)
        if work and now - _told >= LINE_SECONDS and os.getpid() == _process:
            _told = now
            _write(f"after {_span(round(now - _began))}: {escaped(_text(work))}\n".encode())
    elif now - _drawn_at >= every:
        _drawn_at = now
        _write(_blank() + _cut(escaped(_text(_shown)), _width()).encode())


def _text(work: Iterable[ProgressBar]) -> str:
    return " · ".join(bar.text() for bar in work)


def _width() -> int:
    return max(shutil.get_terminal_size().columns - 1, 10)


def _cut(line: str, width: int) -> str:
    """The beginning of a line that fits a terminal; a letter beyond Latin may take two columns."""
    used = 0
    for index, letter in enumerate(line):
        used += 2 if ord(letter) > 0x2E7F else 1
        if used > width:
            return line[:index]
    return line


def _write(data: bytes) -> None:
    """Write without Python's buffers, because a forked process would inherit their locks; a closed terminal is no
    error.

    A notebook shows only what is written to its stream, which has no such buffer.
    """
    with suppress(OSError, ValueError):
        if not data:
            return
        if _kind == "notebook":
            sys.stderr.write(data.decode())
            sys.stderr.flush()
        else:
            os.write(sys.stderr.fileno(), data)
