"""Lines of the certificate."""

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from unpad.data.family import Claim
from unpad.data.tokens.tokenizer import Tokenizer
from unpad.errors import OutOfMemoryError, is_memory_error
from unpad.terminal.progress import progress
from unpad.terminal.table import columns, number_of, wrapped

NAME_CELLS, INDENT = 50, 8
SAME_IDS = "the same text has the same ids twice"
TORCH = Path(torch.__file__).parent
MOST_WRONG = 3  # of a claim that are named
MOST_NOTE = 400  # characters of an exception's message
T = TypeVar("T")


@dataclass(frozen=True)
class Line:
    """One claim of the certificate.

    Args:
        kernel: names of the attention kernels that ran.
        passed: None if the comparison could not have failed: NOT PROVEN.
        note: the exception that ended the check, or the reason why nothing was compared.
        applies: False for a claim that does not concern this model or run; `note` says why.
    """

    name: str
    kernel: str
    measured: float | None
    bound: float | None
    passed: bool | None
    note: str = ""
    applies: bool = True

    def unless(self, gap: str) -> "Line":
        """The line; NOT PROVEN if it holds but `gap` says why nothing was compared. A failing line still fails.

        Args:
            gap: a reason; empty for none.
        """
        return replace(self, passed=None, note=gap) if gap and self.passed else self


def ids_line(tokenizer: Tokenizer, sequences: Iterable[Sequence[int]]) -> Line:
    """Encode the texts of sequences of ids twice, and compare."""
    texts = [text for ids in sequences if (text := tokenizer.decode(ids))]
    first, again = tokenizer.encode_batch(texts), tokenizer.encode_batch(texts)
    differ = sum(one != other for one, other in zip(first, again, strict=True))
    note = f"{differ} of {number_of(len(texts), 'texts')} have other ids" if differ else ""
    return Line(SAME_IDS, "", float(differ), 0.0, not differ, note).unless("" if texts else "the sample has no text")


def meaning_line(claim: Claim) -> Line:
    """The line of a claim that sequences are what the rows of the data say."""
    note = "; ".join([*claim.wrong[:MOST_WRONG], *filter(None, [claim.beside])])
    line = Line(claim.name, "", float(len(claim.wrong)), 0.0, not claim.wrong, note)
    return line.unless("" if claim.tried else "there is no such row")


def not_applicable(name: str, reason: str) -> Line:
    """A claim that does not concern this model or run."""
    return Line(name, "", None, None, None, reason, applies=False)


@dataclass(frozen=True)
class Certificate:
    lines: tuple[Line, ...]

    @property
    def passed(self) -> bool | None:
        """True if every line that applies was proven, False if one fails, None if nothing fails but something was not
        proven."""
        verdicts = {line.passed for line in self.lines if line.applies}
        if False in verdicts:
            return False
        return True if verdicts == {True} else None

    def text(self) -> list[str]:
        """The certificate as lines for a terminal."""
        names = [f"{_verdict(line):<5} {line.name}" for line in self.lines]
        width = max((len(name) for name in names if len(name) <= NAME_CELLS), default=0)
        room = max(len(_against(line)) for line in self.lines)
        lines: list[str] = []
        for name, line in zip(names, self.lines, strict=True):
            against = _against(line)
            beside = f"{against:<{room}}  {line.kernel}" if len(name) <= width else f"{against}  {line.kernel}".strip()
            one = f"{name:<{width}}  {beside}".rstrip()
            # Text that does not fit beside a claim stands below it.
            below = wrapped(f"{against}  {line.kernel}", indent=INDENT)
            lines += [one] if len(one) <= columns() else [name, *below]
            lines += wrapped(line.note, indent=INDENT) if line.note else []
        return [*lines, self._verdict()]

    def _verdict(self) -> str:
        """The last line of the text."""
        verdicts = [line.passed for line in self.lines if line.applies]
        num, failed, missing = len(verdicts), verdicts.count(False), verdicts.count(None)
        if failed:
            verdict = f"{failed} of {number_of(num, 'lines')} FAILED"
        else:
            verdict = f"{num - missing} of {number_of(num, 'lines')} hold" if missing else f"all {num} lines hold"
        beside = {"NOT PROVEN": missing, "N/A": len(self.lines) - num}
        return "; ".join([verdict, *(f"{number} {word}" for word, number in beside.items() if number)])

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, "lines": [asdict(line) for line in self.lines]}


class Lines:
    """Lines of an unfinished certificate. A check that raises an exception becomes a failing line.

    Out-of-memory errors say nothing about a model, and are raised.
    """

    def __init__(self, done: Iterable[Line] = ()) -> None:
        self.done = list(done)

    def add(self, name: str, check: Callable[[], Line | Sequence[Line]]) -> list[Line]:
        """Append and return the lines of a check; `name` is its name if it raises."""
        made = self.value(name, check)
        lines = [made] if isinstance(made, Line) else list(made or [])
        self.done += lines
        return lines

    def add_shown(self, name: str, check: Callable[[], Line | Sequence[Line]]) -> None:
        """`add`, with the name on the line of progress."""
        with progress(name):
            self.add(name, check)

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


def _verdict(line: Line) -> str:
    """The word before a line's name."""
    return {True: "PASS", False: "FAIL", None: "NOT PROVEN"}[line.passed] if line.applies else "N/A"


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
    return f"{line.measured:.2g} {'<=' if line.measured <= line.bound else '>'} {line.bound:.2g}"
