"""Lines of the certificate."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from unpad.errors import OutOfMemoryError, is_memory_error
from unpad.terminal.table import columns, wrapped

NAME_CELLS, INDENT = 50, 8
TORCH = Path(torch.__file__).parent
MOST_NOTE = 400  # characters of an exception's message
T = TypeVar("T")


@dataclass(frozen=True)
class Line:
    """One claim of the certificate.

    Args:
        kernel: names of the attention kernels that ran.
        passed: None for a kernel that no line exercised: NOT PROVEN.
        note: the exception that ended the check.
    """

    name: str
    kernel: str
    measured: float | None
    bound: float | None
    passed: bool | None
    note: str = ""


@dataclass(frozen=True)
class Certificate:
    lines: tuple[Line, ...]

    @property
    def passed(self) -> bool:
        return all(line.passed is not False for line in self.lines)

    def text(self) -> list[str]:
        """The certificate as lines for a terminal."""
        words = {True: "PASS", False: "FAIL", None: "NOT PROVEN"}
        names = [f"{words[line.passed]:<5} {line.name}" for line in self.lines]
        width = max((len(name) for name in names if len(name) <= NAME_CELLS), default=0)
        room = max(len(_against(line)) for line in self.lines)
        lines: list[str] = []
        for name, line in zip(names, self.lines, strict=True):
            against = _against(line)
            beside = f"{against:<{room}}  {line.kernel}" if len(name) <= width else f"{against}  {line.kernel}".strip()
            one = f"{name:<{width}}  {beside}".rstrip()
            # What does not fit beside a claim stands below it.
            below = [" " * INDENT + part for part in wrapped(f"{against}  {line.kernel}", columns() - INDENT)]
            lines += [one] if len(one) <= columns() else [name, *below]
            lines += [" " * INDENT + part for part in wrapped(line.note, columns() - INDENT) if line.note]
        failed = sum(line.passed is False for line in self.lines)
        missing = sum(line.passed is None for line in self.lines)
        verdict = (
            f"{failed} of {len(self.lines)} lines FAILED" if failed else f"all {len(self.lines) - missing} lines hold"
        )
        return [*lines, verdict + (f"; {missing} NOT PROVEN" if missing else "")]

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, "lines": [asdict(line) for line in self.lines]}


class Lines:
    """Lines of a certificate in the making. A check that ends in an exception becomes a line that fails.

    Lack of memory says nothing about a model, and is raised.
    """

    def __init__(self, done: Iterable[Line] = ()) -> None:
        self.done = list(done)

    def add(self, name: str, check: Callable[[], Line | Sequence[Line]]) -> list[Line]:
        """Append the lines of a check, which is called `name` if it raises, and return them."""
        made = self.value(name, check)
        lines = [made] if isinstance(made, Line) else list(made or [])
        self.done += lines
        return lines

    def certificate(self) -> Certificate:
        return Certificate(tuple(self.done))

    def value(self, name: str, make: Callable[[], T]) -> T | None:
        """The result of a computation that later checks need; None if it raises."""
        try:
            return make()
        except Exception as error:
            if isinstance(error, OutOfMemoryError) or is_memory_error(error):
                raise
            self.done.append(Line(name, "", None, None, False, _describe(error)))
            return None


def _describe(error: Exception) -> str:
    """An exception's type, message and place on one line; the place is the last one outside of torch."""
    kind, message = type(error).__name__, " ".join(str(error).split())[:MOST_NOTE]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if TORCH not in Path(frame.filename).parents]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return (message if message.startswith(kind) else f"{kind}: {message}".rstrip(": ")) + place


def _against(line: Line) -> str:
    if line.measured is None or line.bound is None:
        return ""
    if line.bound == 0:
        return "exact" if line.measured == 0 else f"{line.measured:.3g}, not exact"
    return f"{line.measured:.2g} {'<=' if line.passed else '>'} {line.bound:.2g}"
