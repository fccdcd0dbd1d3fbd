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
    """One thing that a check found.

    Args:
        code: of the check, or of the entry of a catalogue that says it in words.
        severity: fault: a run cannot learn, or is not safe, so; warning: it learns worse or slower, or can be lost by
            something rare; note: worth knowing; ok: nothing is wrong.
        number: what was measured; NaN where `values` say it in words.
        fields: fields of the recipe, or files, to change, the likeliest first.
        values: what the words name, besides `number`.
    """

    code: str
    severity: Severity
    number: float = math.nan
    fields: tuple[str, ...] = ()
    values: dict[str, Value] = field(default_factory=dict)


def ranked(findings: list[Finding], order: list[str]) -> list[Finding]:
    """Findings by severity, those of one severity in the order of their codes: causes before what follows from them."""
    return sorted(findings, key=lambda found: (SEVERITIES.index(found.severity), order.index(found.code)))
