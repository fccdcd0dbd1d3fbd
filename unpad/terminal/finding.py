"""Findings of checks: what is wrong, with its number, and the field or file to change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["fault", "warning", "note", "ok"]
SEVERITIES: tuple[Severity, ...] = ("fault", "warning", "note", "ok")
Value = float | int | str


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        code: code of the check, or of the catalogue entry with its text.
        severity: fault: a run cannot learn, or is not safe; warning: it learns worse or slower, or can be lost by a
            rare event; note: worth knowing; ok: nothing is wrong.
        number: the measured value; NaN if `values` describe it in words.
        fields: fields of the recipe, or files, to change, the most likely first.
        values: further values in the text, besides `number`.
    """

    code: str
    severity: Severity
    number: float = math.nan
    fields: tuple[str, ...] = ()
    values: dict[str, Value] = field(default_factory=dict)


def ranked(findings: list[Finding], order: list[str]) -> list[Finding]:
    """Findings by severity, and within one severity in the order `order`, causes before consequences."""
    return sorted(findings, key=lambda found: (SEVERITIES.index(found.severity), order.index(found.code)))
