"""Findings of a drill: one per check, with a verdict, and the table of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from unpad.errors import UnpadError
from unpad.terminal.finding import Finding, Severity
from unpad.terminal.table import WIDTH, cells, columns, number_of, wrapped

HEAD = ("check", "verdict", "measured", "what it means")
WIDTHS = (14, 7, 27, 26)  # widths of the columns; with the gaps, the width of a terminal
GAP = 2
assert sum(WIDTHS) + GAP * (len(WIDTHS) - 1) == WIDTH


def finding(check: str, severity: Severity, measured: str, meaning: str) -> Finding:
    """Finding of one check, as text.

    Args:
        severity: ok; warning: a run can be lost here by an event rarer than a kill, or this could not be measured;
            fault: a run is not safe here.
        meaning: consequence for a run, and advice unless it is ok.
    """
    return Finding(check, severity, values={"measured": measured, "meaning": meaning})


def attempt(check: str, measure: Callable[[], Finding], meaning: str) -> Finding:
    """Run a check; an error of the system is a fault.

    Args:
        meaning: of such a fault.
    """
    try:
        return measure()
    except UnpadError as error:
        return finding(check, "fault", error.what, meaning)
    except OSError as error:
        return finding(check, "fault", f"refused: {error.strerror or error}", meaning)


@dataclass(frozen=True)
class Drilled:
    """Result of a drill.

    Args:
        where: the temporary folder that it worked in.
        subject: the recipe or run.
        notes: differences of the killed training from the recipe.
        seconds: that the drill took.
        facts: measured numbers, for programs.
    """

    where: str
    subject: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if no check found a fault."""
        return not self._num("fault")

    def _num(self, severity: Severity) -> int:
        return sum(one.severity == severity for one in self.findings)

    def lines(self) -> list[str]:
        """The table, the changes to the recipe, and a last line with counts."""
        rows = [(one.code, one.severity, *map(str, one.values.values())) for one in self.findings]
        table = table_lines([HEAD, *rows])
        notes = [line for note in self.notes for line in wrapped(f"note: {note}")]
        faults, warnings = self._num("fault"), self._num("warning")
        verdict = "no fault found" if self.passed else f"{number_of(faults, 'faults')} found"
        warned = f", {number_of(warnings, 'warnings')}" if warnings else ""
        last = f"{verdict}{warned}: {self.subject} in {self.where}, {self.seconds:.0f} s"
        return [*table, "", *notes, *wrapped(last)]

    def to_json(self) -> dict[str, Any]:
        findings = [{"check": one.code, "verdict": one.severity, **one.values} for one in self.findings]
        return {**asdict(self), "findings": findings, "passed": self.passed}


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out rows of texts side by side, each wrapped in its column; a word that is too wide is broken. In a terminal
    that is too narrow for the columns, the measurement and its meaning stand below their check."""
    if columns() < WIDTH:
        return [line for row in rows[1:] for line in _below_each_other(row)]
    lines = []
    for row in rows:
        parts = [wrapped(text, size, breaks_words=True) for text, size in zip(row, WIDTHS, strict=True)]
        for index in range(max(map(len, parts))):
            here = [part[index] if index < len(part) else "" for part in parts]
            padded = [text + " " * (size - cells(text)) for text, size in zip(here, WIDTHS, strict=True)]
            lines.append((" " * GAP).join(padded).rstrip())
    return lines


def _below_each_other(row: Sequence[str]) -> list[str]:
    check, verdict, *texts = row
    below = [line for text in texts for line in wrapped(text, columns(), indent=2, breaks_words=True)]
    return [*wrapped(f"{check}: {verdict}", columns(), breaks_words=True), *below]
