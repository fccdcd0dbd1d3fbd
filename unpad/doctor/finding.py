"""Findings: what is wrong, with its number, and the field or file to change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["fault", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("fault", "warning", "note")
Value = float | int | str


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    Args:
        code: entry of the catalogue that says it in words.
        severity: fault: the run cannot learn so; warning: it learns worse or slower; note: worth knowing.
        number: what was measured.
        fields: fields of the recipe, or files, to change, the likeliest first.
        values: what the catalogue's sentences name, besides `number`.
    """

    code: str
    severity: Severity
    number: float
    fields: tuple[str, ...]
    values: dict[str, Value] = field(default_factory=dict)


def ranked(findings: list[Finding], order: list[str]) -> list[Finding]:
    """Findings by severity, those of one severity in the order of their codes in the catalogue: causes before what
    follows from them."""
    return sorted(findings, key=lambda found: (SEVERITIES.index(found.severity), order.index(found.code)))
