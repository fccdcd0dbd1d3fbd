"""Trials that the time cut short."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unpad.doctor.examine import check_length
from unpad.doctor.trials.carry import Carry
from unpad.doctor.trials.overfit import Overfit
from unpad.doctor.trials.sweep import Sweep
from unpad.doctor.words import sentences

WHOLE = Sweep(np.ones(100), np.ones(100), 1e-3, 1e-2)


@pytest.mark.promise("doctor.cut-short")
def test_trials_that_were_too_short_say_so_and_how_much_time_they_take() -> None:
    subject: Any = SimpleNamespace(clock=SimpleNamespace(seconds=20.0))
    cut = Sweep(np.zeros(0), np.zeros(0), None, None, short=6)
    overfit = Overfit(4, 12, 5.0, 4.9, None)
    labels = Carry(30, 30, None, 1.0, 0.9, 0.0, steps=4, is_short=True)
    found = check_length(subject, cut, overfit, labels)
    assert [(one.code, one.severity) for one in found] == [
        ("short_sweep", "note"),
        ("short_heart", "note"),
        ("short_labels", "note"),
    ]
    reason, advice = sentences(found[0], "en")
    assert reason.startswith("Only 6 of at least 24 learning rates could be tried")
    assert advice.endswith("--seconds 120")
    late = Carry(30, 30, None, 1.0, 0.9, 0.0, steps=240, is_short=True)
    reason, _ = sentences(check_length(subject, WHOLE, Overfit(60, 12, 5.0, 0.1, None), late)[0], "en")
    assert reason.startswith("Only 240 of at least 360 steps on labelled sequences")


def test_trials_that_were_learnt_or_ended_by_themselves_are_judged() -> None:
    subject: Any = SimpleNamespace(clock=SimpleNamespace(seconds=20.0))
    for overfit in (
        Overfit(4, 12, 5.0, 0.9, None),
        Overfit(4, 12, 5.0, 9.0, None, is_lost=True),
        Overfit(4, 60, 5.0, 4.9, 0.1),
    ):
        assert check_length(subject, WHOLE, overfit, None) == []
