"""Troubles of people who do not know the doctor's code are judged by the fields and words that they ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.planted import is_right, judge, load, name_of

MODULE = """
def a_refused_field(folder):
    return ["zh_chat", "optim.lrr=3"], "There is no such field.", ["optim.lrr", "optim.lr"], ["unknown"]

def another_cause(folder):
    return ["zh_chat", "optim.lrr=3"], "The data are wrong.", ["data.text"], []

TROUBLES, HEALTHY = [a_refused_field, another_cause], []
"""


@pytest.mark.promise("doctor.unseen")
@pytest.mark.parametrize(
    ("own", "text", "right"),
    [
        (["stages.tune.optim.lr"], "The learning rate is high.", True),
        (["optim.lr_scale"], "The learning rate is high.", False),
        (["optim"], "Lower optim.lr: the Rate is high.", True),
        (["optim"], "Lower optim.lr_scale: the rate is high.", False),
        (["optim.lr"], "Epsilon is large.", False),
    ],
)
def test_a_right_finding_names_a_field_and_says_a_word(own: list[str], text: str, right: bool) -> None:
    assert is_right(own, text, ["optim.lr"], ["rate"]) == right


@pytest.mark.promise("doctor.unseen")
def test_an_error_that_refuses_the_recipe_is_judged_like_a_finding(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    (refused, another), healthy = load(tmp_path / "module.py")
    assert name_of(refused) == "a refused field"
    assert (judge(refused, tmp_path).rank, judge(another, tmp_path).rank, healthy) == (1, 0, [])
