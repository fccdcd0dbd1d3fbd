"""Totals on screen: the last step of all stages and all epochs, known before the first."""

import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.helpers.toy import events, write_toy
from unpad.training import stage as stage_module
from unpad.training.loop import train
from unpad.training.optim import Epochs
from unpad.training.stage import LastStep, RunLength, StageLength

pytestmark = pytest.mark.slow

UNEVEN: dict[str, dict[str, Any]] = {
    "two stages": {},
    "epochs that differ by a few steps": {"plan": {"tokens_per_step": 70}},
    "a share of a source": {"plan": {"tokens_per_step": 90}, "weight": {}},
    "no short last step": {"plan": {"tokens_per_step": 110, "drop_last": True}},
    "growing steps": {"plan": {"tokens_per_step": 60, "grow": {2: 120}}},
    "an end by steps": {"train": {"max_steps": 15}},
}


def totals(recipe: Path, folder: Path) -> tuple[list[str], int]:
    """Totals of all lines on the screen, and the last step."""
    out = StringIO()
    result = train(str(recipe), folder, ["train.log_every=1"], console=Console(file=out, width=300))
    return re.findall(r"^step \d+/(\S+|about \d+)  ", out.getvalue(), re.M), result.step


@pytest.mark.promise("run.lines")
@pytest.mark.parametrize("case", UNEVEN)
def test_every_line_names_the_last_step_of_the_whole_run(tmp_path, case):
    sections = dict(UNEVEN[case])
    if "weight" in sections:
        sections = {
            "plan": sections["plan"],
            "data": {"text": [{"path": str(tmp_path / "texts.jsonl"), "weight": 0.6}]},
        }
    shown, last = totals(write_toy(tmp_path, **sections), tmp_path / "run")
    assert shown == [str(last)] * last
    assert {entry["total_steps"] for entry in events(tmp_path / "run", "stage")} == {last}
    assert all(entry["total_exact"] for entry in events(tmp_path / "run", "stage"))


@pytest.mark.promise("run.lines")
def test_a_total_that_is_not_planned_to_the_end_says_about(tmp_path, monkeypatch):
    recipe = write_toy(tmp_path, plan={"tokens_per_step": 70})
    monkeypatch.setattr(stage_module, "MOST_PLANNED", 0)
    out = StringIO()
    train(str(recipe), tmp_path / "run", ["train.log_every=1"], console=Console(file=out, width=300))
    shown = re.findall(r"^step (\d+)/(about )?(\d+)", out.getvalue(), re.M)
    assert shown[0][1] == "about "
    assert shown[-1] == (shown[-1][0], "", shown[-1][0])  # the last epoch is planned: nothing is left to estimate
    assert all(int(step) <= int(total) for step, _, total in shown)


def test_a_run_is_known_to_the_step_only_if_every_stage_before_its_end_is():
    guessed = StageLength(Epochs((0,), (10,)), max_epochs=3, max_steps=None, planned={0: 10})
    known = StageLength(Epochs((0,), (4,)), max_epochs=2, max_steps=None, planned={0: 4, 1: 5})
    run = RunLength([guessed, None, known])
    assert run.last(0, 0) == LastStep(39, False)
    assert run.last(1, 30) == run.last(2, 30) == LastStep(39, True)
    assert RunLength([known, guessed]).last(0, 0) == LastStep(39, False)
