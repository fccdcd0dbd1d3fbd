"""Lines of the certificate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from unpad.text_table import WIDTH, cells, wrapped

NAME_CELLS, AGAINST_CELLS, INDENT = 56, 22, 8


@dataclass(frozen=True)
class Line:
    """One claim of the certificate. `passed` is None for a kernel that no line exercised: NOT PROVEN."""

    name: str
    kernel: str
    measured: float | None
    bound: float | None
    passed: bool | None


@dataclass(frozen=True)
class Certificate:
    lines: tuple[Line, ...]

    @property
    def passed(self) -> bool:
        return all(line.passed is not False for line in self.lines)

    def text(self) -> list[str]:
        """The certificate as lines for a terminal."""
        words = {True: "PASS", False: "FAIL", None: "NOT PROVEN"}
        lines = []
        for line in self.lines:
            name, against = f"{words[line.passed]:<5} {line.name}", _against(line)
            one = f"{name:<{NAME_CELLS}}  {against:<{AGAINST_CELLS}}  {line.kernel}".rstrip()
            # What does not fit beside the name stands below it.
            below = wrapped(f"{against}  {line.kernel}".strip(), WIDTH - INDENT)
            lines += [one] if cells(one) <= WIDTH else [name, *(" " * INDENT + part for part in below)]
        failed = sum(line.passed is False for line in self.lines)
        missing = sum(line.passed is None for line in self.lines)
        verdict = (
            f"{failed} of {len(self.lines)} lines FAILED" if failed else f"all {len(self.lines) - missing} lines hold"
        )
        return [*lines, verdict + (f"; {missing} NOT PROVEN" if missing else "")]

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, "lines": [asdict(line) for line in self.lines]}


def _against(line: Line) -> str:
    if line.measured is None or line.bound is None:
        return ""
    if line.bound == 0:
        return "exact" if line.measured == 0 else f"{line.measured:.3g}, not exact"
    return f"{line.measured:.2g} {'<=' if line.passed else '>'} {line.bound:.2g}"
