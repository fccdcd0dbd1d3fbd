"""Checkpoints by time."""

import pytest

from benchmarks.equal_processes import digests
from tests.helpers.toy import events, run, write_toy
from unpad.training import context
from unpad.training.context import SaveClock


def test_a_checkpoint_is_due_so_many_seconds_after_the_last_one(monkeypatch):
    now = 100.0
    monkeypatch.setattr(context.time, "monotonic", lambda: now)
    clock, never = SaveClock(5.0), SaveClock(None)
    assert not clock.due()
    now = 105.0
    assert clock.due()
    assert not never.due()
    clock.saved()
    assert not clock.due()


@pytest.mark.promise("run.every-seconds")
def test_checkpoints_by_time_change_no_byte_of_a_run(tmp_path):
    recipe = write_toy(tmp_path, stages=[], train={"threads": 1, "max_steps": 7})
    run(recipe, tmp_path / "rare")
    run(recipe, tmp_path / "often", "checkpoint.every_seconds=1e-9")
    steps = {name: [event["step"] for event in events(tmp_path / name, "checkpoint")] for name in ("rare", "often")}
    assert steps == {"rare": [3, 6, 7], "often": list(range(1, 8))}
    assert digests(tmp_path / "rare") == digests(tmp_path / "often")
