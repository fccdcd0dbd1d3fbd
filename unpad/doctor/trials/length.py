"""Trials that the time cut short, so that they say nothing; and how much time they would take."""

from __future__ import annotations

import math

from unpad.doctor.subject import Subject
from unpad.doctor.trials import heart as hearts
from unpad.doctor.trials import sweep as sweeps
from unpad.doctor.trials.carry import FIRST_STEPS, Carry
from unpad.doctor.trials.heart import Heart
from unpad.doctor.trials.sweep import Sweep
from unpad.terminal.finding import Finding

ROUND = 10  # seconds
MORE = 1.5  # times the time that is reckoned, as machines slow down


def check_length(subject: Subject, found: Sweep, heart: Heart, carry: Carry | None) -> list[Finding]:
    """Notes on trials that were too short to be judged."""
    findings = []
    if found.short:
        findings.append(_short("short_sweep", subject, found.short, sweeps.LEAST))
    if heart.is_short:
        findings.append(_short("short_heart", subject, heart.steps, hearts.LEAST_STEPS))
    if carry is not None and carry.is_short:
        findings.append(_short("short_labels", subject, carry.steps, FIRST_STEPS))
    return findings


def _short(code: str, subject: Subject, taken: int, least: int) -> Finding:
    given = subject.clock.seconds
    wanted = given * max(MORE * least / max(taken, 1), 2.0)
    return Finding(code, "note", taken, ("--seconds",), {"least": least, "seconds": ROUND * math.ceil(wanted / ROUND)})
