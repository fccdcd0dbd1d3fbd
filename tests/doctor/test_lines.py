"""Text of an examination: lines of 80 columns in both languages, and a sweep drawn in characters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unpad.doctor.lines import drawing, fact_lines, finding_lines
from unpad.doctor.subject import Subject
from unpad.doctor.trials.sweep import HIGHEST, LOWEST, Sweep
from unpad.doctor.words import Language
from unpad.terminal.finding import Finding, ranked
from unpad.terminal.table import WIDTH, cells


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_finding_has_its_rank_field_reason_and_advice(language: Language) -> None:
    values = {"rate": 0.3, "low": 1e-4, "high": 1e-3, "middle": 3e-4, "field": "optim.lr"}
    lines = finding_lines(3, Finding("lr_high", "fault", 300.0, ("optim.lr",), dict(values)), language)
    assert lines[0].split() == ["3", "FAULT" if language == "en" else "故障", "optim.lr"]
    assert any("300" in line for line in lines)
    assert any("optim.lr=3.0e-04" in line for line in lines)
    assert max(map(cells, lines)) <= WIDTH


def test_facts_are_in_columns() -> None:
    assert fact_lines([("线程", "1"), ("rate", "2")]) == ["线程  1", "rate  2"]


def test_the_drawing_marks_the_range_and_the_rate_of_the_recipe() -> None:
    rates = np.geomspace(LOWEST, HIGHEST, 100)
    losses = 1 - 0.8 * np.exp(-((np.log10(rates) + 3) ** 2))
    drawn = drawing(Sweep(rates, losses, 1e-4, 1e-3), 1e-3, "en")
    assert max(map(cells, drawn)) <= WIDTH
    axis = next(line for line in drawn if "===" in line)
    assert drawn[-1].index("^") == axis.rindex("=")
    assert sum(line.count("*") for line in drawn) > 50
    right = drawing(Sweep(rates, losses, 1e-4, 1e-3), 0.9, "zh")
    assert right[-1].endswith("9.0e-01，本配方 ^")
    assert max(map(cells, right)) <= WIDTH
    assert drawing(Sweep(rates[:0], losses[:0], None, None), 1e-3, "en") == []


def test_findings_are_ranked_by_severity_and_causes_stand_first() -> None:
    found = [Finding(code, severity, 0, ()) for code, severity in (("b", "note"), ("c", "fault"), ("a", "fault"))]  # type: ignore[arg-type]
    assert [one.code for one in ranked(found, ["a", "b", "c"])] == ["a", "c", "b"]


def test_stages_after_the_one_that_is_tried_are_named() -> None:
    ids = np.arange(3)
    names = (
        ("facts", ids, False),
        ("tried", ids, False),
        ("later", ids, False),
        ("none", ids[:0], False),
        ("pairs", ids, True),
    )
    stages = [SimpleNamespace(name=name, train_ids=of, of_pairs=pairs) for name, of, pairs in names]
    subject: Any = SimpleNamespace(setup=SimpleNamespace(stages=stages), stage=stages[1])
    assert Subject.other_stages.__get__(subject) == ["later"]
