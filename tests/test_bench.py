"""`unpad bench`: every row trains what it says, and its numbers are those of the plan and the clock."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.toy import write_toy
from unpad import bench as module
from unpad.bench import BATCH_SIZES, Bench, Row, bench, spread
from unpad.errors import PlanError, RecipeError
from unpad.layout import PaddedLayout
from unpad.monitor import Timers
from unpad.recipe import load_recipe
from unpad.setup import Setup, prepare_setup


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_toy(tmp_path_factory.mktemp("bench")))


@pytest.fixture(scope="module")
def result(toy: str) -> Bench:
    return bench(toy, ["plan.batch_size=4"], rounds=3, seconds=0.02)


@pytest.fixture(scope="module")
def setup(toy: str) -> Setup:
    return prepare_setup(load_recipe(toy), Path(), None, Timers())


def _row(name: str, rates: list[float]) -> Row:
    return Row(name, {}, 1.0, 1.0, 0.0, rates, 1, 2, 1)


def test_rows_are_the_strategies_and_the_batch_sizes(result: Bench) -> None:
    assert [row.plan["strategy"] for row in result.strategies] == ["pack", "pack", "dynamic", "bucket", "pack"]
    assert [row.plan["batch_size"] for row in result.batch_sizes] == list(BATCH_SIZES)
    assert result.data["sequences"] > 60, "both stages' data"
    for row in result.strategies + result.batch_sizes:
        assert len(row.rates) == 3
        assert min(row.rates) > 0
        assert row.updates >= 3
        assert row.memory_bytes == row.peak_bytes - row.base_bytes >= 0
        assert row.base_bytes > 0


def test_only_padded_rows_pad(result: Bench) -> None:
    shares = [row.pad_share for row in result.strategies]
    assert shares[0] == shares[1] == shares[4] == 0
    assert shares[2] > shares[3] > 0
    by_size = [row.pad_share for row in result.batch_sizes]
    assert by_size == sorted(by_size)
    assert by_size[0] == 0 < by_size[1]


def test_one_at_a_time_is_one_flat_sequence_per_update(setup: Setup) -> None:
    alone, accumulated = module._strategies(setup)[:2]
    for micros in islice(module._updates(alone.setup, alone.stage), 30):
        (batch,) = micros
        assert batch.num_seqs == 1
        assert not isinstance(batch.layout, PaddedLayout)
        assert batch.total_tokens == int(batch.layout.lengths().sum())
    steps = list(islice(module._updates(accumulated.setup, accumulated.stage), 3))
    assert all(batch.num_seqs == 1 for micros in steps for batch in micros)
    assert len(steps[0]) > 2


def test_strategies_train_on_about_the_same_tokens_per_update(result: Bench) -> None:
    asked = result.strategies[1].plan["tokens_per_step"]
    assert {row.plan["tokens_per_step"] for row in result.strategies[1:]} == {asked}
    for row in result.strategies[1:]:
        assert 0.6 * asked < row.tokens_per_update < 1.5 * asked
    for row in result.strategies[:2]:
        assert row.tokens_per_pass == pytest.approx(result.data["mean_tokens"])
    assert result.strategies[0].tokens_per_update == pytest.approx(result.data["mean_tokens"])


def test_a_batch_size_is_one_update_of_that_many_sequences(setup: Setup) -> None:
    for variant, size in zip(module._batch_sizes(setup), BATCH_SIZES, strict=True):
        micros = next(module._updates(variant.setup, variant.stage))
        assert [batch.num_seqs for batch in micros] == [size]


def test_every_turn_starts_from_the_same_weights_and_leaves_them(setup: Setup) -> None:
    before = {name: value.clone() for name, value in setup.model.state_dict().items()}
    variant = module._strategies(setup)[4]
    updates = module._updates(variant.setup, variant.stage)
    done, tokens, seconds = module._turn(variant.setup, updates, 0.02)
    assert done >= 1
    assert tokens > 0
    assert seconds > 0
    assert all(torch.equal(value, before[name]) for name, value in setup.model.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in module._Trainer(setup).model.state_dict().items())


def test_a_turn_counts_real_tokens_and_updates_weights(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = module._strategies(setup)[2]
    fed: list[int] = []
    trainers: list[Any] = []
    original = module._Trainer.update

    def update(self: Any, micros: list[Any]) -> None:
        fed.append(sum(int(batch.layout.lengths().sum()) for batch in micros))
        trainers.append(self)
        original(self, micros)

    monkeypatch.setattr(module._Trainer, "update", update)
    done, tokens, _ = module._turn(variant.setup, module._updates(variant.setup, variant.stage), 0.05)
    assert tokens == sum(fed[-done:])
    assert len(fed) in (done + 1, done + 2), "warm-up is not counted"
    changed = trainers[-1].model.state_dict()
    assert any(not torch.equal(value, changed[name]) for name, value in setup.model.state_dict().items())


def test_ratios_are_taken_round_by_round() -> None:
    """A machine twice as slow in one round changes the rates of both rows and no ratio."""
    first, second = _row("first", [100.0, 50.0, 100.0]), _row("second", [400.0, 200.0, 400.0])
    assert second.times(first) == spread([4.0, 4.0, 4.0])
    assert second.times(first).low == second.times(first).high == 4
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == module.Spread(3.0, 2.0, 4.0)


def test_json_and_lines_hold_every_number(result: Bench) -> None:
    values = json.loads(json.dumps(result.to_json()))
    assert values["machine"]["processor"]
    assert {"torch", "threads", "precision", "cores", "load"} <= values["machine"].keys()
    assert values["strategies"][0]["times_first"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert values["batch_sizes"][4]["tokens_per_second"]["median"] == np.median(values["batch_sizes"][4]["rates"])
    text = "\n".join(result.lines())
    for row in result.strategies + result.batch_sizes:
        assert f"{row.rate().median:,.0f}" in text
        assert f"{row.pad_share:.1%}" in text


def test_stages_without_data_are_refused(toy: str) -> None:
    with pytest.raises(RecipeError, match="no stage has data"):
        bench(toy, ["data.chat=[]", "stages=[{name: tune, use: [chat]}]", "train.max_epochs=1"], rounds=1)


def test_a_plan_without_an_update_is_refused(toy: str) -> None:
    with pytest.raises(PlanError, match="drops every token"):
        bench(toy, ["plan.drop_last=true", "plan.tokens_per_step=1000000"], rounds=1, seconds=0.01)
