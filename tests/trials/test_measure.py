"""`unpad plan --measure`: every strategy is timed with unchanged weights, and memory is that of `auto`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.families import images, patients, questions
from tests.helpers.toy import write_toy
from unpad.recipes.file import load_recipe
from unpad.training.rehearsal import Rehearsal
from unpad.training.setup import prepare_setup
from unpad.trials import preview
from unpad.trials.preview import BATCH_SIZES, MeasuredStage, PaddedBatch

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "SECONDS", 0.01)
    monkeypatch.setattr(preview, "ROUNDS", 2)


@pytest.mark.promise("bench.strategies", "bench.memory")
def test_strategies_take_turns_on_one_model_that_stays_and_larger_batches_need_more(tmp_path, monkeypatch):
    setup = prepare_setup(load_recipe(str(write_toy(tmp_path, stages=[], train={"max_epochs": 1}))), Path(), None)
    before = {name: value.clone() for name, value in setup.model.state_dict().items()}
    used: list[Rehearsal] = []
    step = Rehearsal.step
    monkeypatch.setattr(Rehearsal, "step", lambda self, micros: (used.append(self), step(self, micros))[1])
    result = preview.measure(setup, setup.stages[0], ["fixed", "pack"], "tokens")
    assert list(result.rates) == ["fixed", "pack"]
    assert all(len(rates) == 2 and min(rates) > 0 for rates in result.rates.values())
    assert len(set(map(id, used))) == 1
    for model in (setup.model, used[0].model):
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    peaks = [batch.peak_bytes for batch in result.batches]
    assert [batch.size for batch in result.batches] == list(BATCH_SIZES)
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]


def test_a_machine_that_is_slow_in_a_round_changes_no_ratio():
    result = MeasuredStage({"fixed": [100.0, 50.0], "pack": [400.0, 200.0]}, [PaddedBatch(1, 9, 1 << 20)], "tokens")
    assert result.times("pack", "fixed") == 4.0
    assert result.lines()[2].split() == ["pack", "300", "250", "to", "350", "4.0x"]


@pytest.mark.promise("bench.strategies")
@pytest.mark.parametrize("write", [images, questions, patients])
def test_the_verb_times_every_family(write, tmp_path, unpad):
    outcome = unpad("plan", write(tmp_path / "data"), "--measure", "--json", code=0)
    stages: list[dict[str, Any]] = json.loads(outcome.out)["stages"]
    for stage in stages:
        assert {"fixed", "pack"} <= set(stage["measured"]["tokens_per_second"])
        assert len(stage["measured"]["padded_batches"]) == len(BATCH_SIZES)
