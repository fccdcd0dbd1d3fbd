"""A watch of any kind: the loop asks it when due, logs and saves its readings, and restores it in a resumed run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.toy import LOOP, events, rows, run, write_toy
from unpad.errors import UnpadError
from unpad.models.contract import Model
from unpad.processes.group import ALONE, Group
from unpad.run import checkpoint
from unpad.run.timers import Timers
from unpad.training.context import Action, SavedWatches, Verdict
from unpad.training.stage import StageSetup
from unpad.training.step import StepResult

pytestmark = pytest.mark.slow


class Pulse:
    """Counts its readings of the model, two steps apart; does `actions` at the readings of these numbers."""

    name, subject = "heart", "pulse"

    def __init__(self, saved: SavedWatches, actions: dict[int, Action]) -> None:
        self.count = saved.states.get("heart", {"count": 0})["count"]
        self.beats = saved.tensors.get("beats", torch.zeros(1)).clone()
        self.actions, self.saved = actions, saved

    def describe(self) -> str:
        return "the pulse is taken"

    def due(self, step: int) -> bool:
        return step % 2 == 0

    def check(self, step: int) -> Verdict:
        self.count, self.beats = self.count + 1, self.beats + step
        return Verdict(step, "red", True, self.actions.get(self.count), f"beat {self.count}", {"beats": self.count})

    def scaled(self, weights: dict[str, float]) -> dict[str, float]:
        return {name: weight / 2**self.count for name, weight in weights.items()}

    def values(self) -> dict[str, Any]:
        return {"count": self.count}

    def tensors(self) -> dict[str, Tensor]:
        return {"beats": self.beats}

    def save_healthy(self, checkpoints: Path, group: Group = ALONE) -> Path:
        checkpoint.save_named(checkpoints, "healthy", checkpoint.State(0, {}, {}))
        return checkpoints / "healthy"

    def recover(self, step: int, optimizer: torch.optim.Optimizer) -> str:
        optimizer.state.clear()
        return "shocked"

    def error(self, verdict: Verdict) -> UnpadError:
        return UnpadError(verdict.message)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Pulse]:
    """Give every stage a `Pulse`; the list collects them."""
    watches: list[Pulse] = []

    def start(stage: StageSetup, model: Model, saved: SavedWatches, timers: Timers) -> list[Pulse]:
        watches.append(Pulse(saved, ACTIONS))
        return watches[-1:]

    ACTIONS.clear()
    monkeypatch.setattr(LOOP, "start_watches", start)
    return watches


ACTIONS: dict[int, Action] = {}


def test_readings_are_rows_events_and_weights_of_the_loss(tmp_path, started, monkeypatch):
    step, trained = LOOP.train_step, list[float]()

    def watched(*arguments: Any, **options: Any) -> StepResult:
        trained.append(options["weights"]["cross_entropy"])
        return step(*arguments, **options)

    monkeypatch.setattr(LOOP, "train_step", watched)
    run(write_toy(tmp_path, stages=[]), tmp_path / "run", "train.max_steps=6", "train.max_epochs=1")
    assert [(row["step"], row["values"]) for row in rows(tmp_path / "run", "pulse")] == [
        (2, {"beats": 1}), (4, {"beats": 2}), (6, {"beats": 3}),
    ]  # fmt: skip
    assert [event["message"] for event in events(tmp_path / "run", "pulse")] == ["the pulse is taken"]
    assert [event["message"] for event in events(tmp_path / "run", "heart")] == ["beat 1", "beat 2", "beat 3"]
    assert {"pulse"} <= {part["name"] for part in events(tmp_path / "run", "timers")[0]["rows"]}
    assert len(started) == 1
    assert trained == [1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4]


@pytest.mark.promise("patients.collapse")
def test_a_resumed_run_gives_a_watch_its_state_and_tensors_back(tmp_path, started):
    recipe = write_toy(tmp_path, optim={"lr": 1e-2, "schedule": "constant"})
    run(recipe, tmp_path / "whole", "train.max_steps=16")
    for steps, resume in ((5, False), (13, True), (16, True)):
        run(recipe, tmp_path / "cut", f"train.max_steps={steps}", resume=resume)
    for kind in ("train", "pulse"):
        assert rows(tmp_path / "cut", kind) == rows(tmp_path / "whole", kind)
    assert [(one.saved.step, one.saved.stage_start) for one in started[2:]] == [(0, 0), (5, 0), (12, 12), (13, 12)]
    first, second = started[0], started[1]  # of the whole run's stages: the second begins with a state of its own
    assert (first.count, second.count) == (6, 2)
    state, _ = checkpoint.load_newest(tmp_path / "cut/checkpoints")
    assert state.values["progress"]["heart"] == {"count": 2}
    assert torch.equal(state.tensors["beats"], second.beats)


def test_save_recover_and_stop_are_done(tmp_path, started):
    ACTIONS.update({1: "save", 2: "recover", 3: "stop"})
    recipe = write_toy(tmp_path, stages=[], train={"max_epochs": 9, "eval_every": 3})
    with pytest.raises(UnpadError, match="beat 3"):
        run(recipe, tmp_path / "run")
    saved = [event["path"] for event in events(tmp_path / "run", "checkpoint")]
    assert saved[0] == "healthy"
    assert saved[-1] == "step-00000006"
    assert [event["message"] for event in events(tmp_path / "run", "heart")] == [
        "beat 1", "beat 2", "shocked", "beat 3",
    ]  # fmt: skip
    assert [row["best"] for row in rows(tmp_path / "run", "eval")] == [True]  # at step 3; forgotten with the recovery
    state, _ = checkpoint.load_newest(tmp_path / "run/checkpoints")
    assert (state.step, state.values["progress"]["best"]) == (6, None)
    assert state.values["progress"]["heart"] == {"count": 3}
