"""`unpad bench`: every row trains what it says, and its numbers are those of the plan and the clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.families import images, patients, questions
from tests.helpers.toy import write_toy
from unpad.batching.layout import PaddedLayout
from unpad.errors import PlanError, RecipeError
from unpad.machine.memory import process_memory
from unpad.nn.flops import sizes_of, training_operations
from unpad.nn.native import library as native
from unpad.processes.children import run_all
from unpad.recipes.file import load_recipe
from unpad.training.auto_size import StageMemory
from unpad.training.memory import KEPT, OVERHEAD, Footprint
from unpad.training.rehearsal import Rehearsal
from unpad.training.setup import Setup, prepare_setup
from unpad.training.step import StepResult
from unpad.trials.bench import bench as bench_verb
from unpad.trials.bench import speed
from unpad.trials.bench.bench import Bench, bench, predicted_memory, train
from unpad.trials.bench.measure import Spread, spread
from unpad.trials.bench.speed import (
    BATCH_SIZES,
    Effort,
    SpeedRow,
    _side,
    every_update,
    measure,
    size_variants,
    strategy_variants,
    to_row,
)

pytestmark = pytest.mark.slow

bench_module = import_module("unpad.trials.bench.bench")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_toy(tmp_path_factory.mktemp("bench")))


def called_here(function: Callable[..., Any], calls: Sequence[Sequence[Any]], **_: Any) -> Iterator[Any]:
    """Stands for `run_all`."""
    return (function(*call) for call in calls)


SMALL = Effort(rounds=3, seconds=0.02, updates=3, ceiling_size=128)


@pytest.fixture(scope="module")
def result(toy: str) -> Bench:
    """Memory is measured in this process: one test below has a process of its own, eleven would take half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_verb, "run_all", called_here)
        return bench(toy, ["plan.batch_size=4"], SMALL)


@pytest.fixture(scope="module")
def setup(toy: str) -> Setup:
    return prepare_setup(load_recipe(toy), Path(), None)


def _row(name: str, rates: list[float], torch_rates: list[float] | None = None, **fields: Any) -> SpeedRow:
    values: dict[str, Any] = {
        "plan": {}, "tokens_per_update": 1.0, "tokens_per_pass": 1.0, "sequence_tokens": 1.0, "padded_length": 1.0,
        "pad_share": 0.0, "largest_pass": 1, "shares": rates, "updates": 1, "peak_bytes": 2, "base_bytes": 1,
    }  # fmt: skip
    return SpeedRow(name, rates=rates, torch_rates=torch_rates or [], **(values | fields))


@pytest.mark.promise("bench.strategies")
def test_rows_are_the_strategies_and_the_batch_sizes(result: Bench) -> None:
    strategies = ["pack", "pack", "fixed", "dynamic", "bucket", "pack"]
    assert [row.plan["strategy"] for row in result.strategies] == strategies
    assert [row.plan["batch_size"] for row in result.batch_sizes] == list(BATCH_SIZES)
    assert result.data["sequences"] > 60, "both stages' data"
    for row in result.strategies + result.batch_sizes:
        assert len(row.rates) == 3
        assert min(row.rates) > 0
        assert len(row.shares) == 3
        assert min(row.shares) > 0
        assert len(row.torch_rates) == (3 if native.enabled() else 0)
        assert row.updates >= 3
        assert row.memory_bytes == row.peak_bytes - row.base_bytes >= 0
        assert row.base_bytes > 0


def test_only_padded_rows_pad(result: Bench) -> None:
    shares = [row.pad_share for row in result.strategies]
    assert shares[0] == shares[1] == shares[5] == 0
    assert shares[2] > shares[3] > shares[4] > 0
    for row in result.strategies + result.batch_sizes:
        assert row.pad_share == pytest.approx(1 - row.sequence_tokens / row.padded_length)
    assert result.strategies[2].padded_length == 64, "the toy's context"
    by_size = [row.pad_share for row in result.batch_sizes]
    assert by_size == sorted(by_size)
    assert by_size[0] == 0 < by_size[1]


def test_one_at_a_time_is_one_flat_sequence_per_update(setup: Setup) -> None:
    alone, accumulated = strategy_variants(setup)[:2]
    for micros in islice(every_update(alone.setup, alone.stage), 30):
        (batch,) = micros
        assert batch.num_seqs == 1
        assert not isinstance(batch.layout, PaddedLayout)
        assert batch.total_tokens == int(batch.layout.lengths().sum())
    steps = list(islice(every_update(accumulated.setup, accumulated.stage), 3))
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
    for variant, size in zip(size_variants(setup), BATCH_SIZES, strict=True):
        micros = next(every_update(variant.setup, variant.stage))
        assert [batch.num_seqs for batch in micros] == [size]


def test_sides_share_weights_that_no_turn_changes(setup: Setup) -> None:
    before = {name: value.clone() for name, value in setup.model.state_dict().items()}
    rehearsals: list[Rehearsal] = []
    with pytest.MonkeyPatch.context() as patch:
        original = Rehearsal.step

        def step(self: Rehearsal, micros: list[Any]) -> StepResult:
            rehearsals.append(self)
            return original(self, micros)

        patch.setattr(Rehearsal, "step", step)
        measure(setup, strategy_variants(setup)[4:], SMALL)
    assert len(set(map(id, rehearsals))) == 1
    assert rehearsals[0].optimizer.state, "updates were made"
    assert all(torch.equal(value, before[name]) for name, value in rehearsals[0].model.state_dict().items())


def test_a_step_counts_real_tokens_and_their_operations(setup: Setup) -> None:
    variant = strategy_variants(setup)[3]
    micros = next(every_update(variant.setup, variant.stage))
    work = _side(Rehearsal(setup, variant.stage), variant, True).step()
    lengths = [length for batch in micros for length in batch.layout.lengths().tolist()]
    assert work.tokens == sum(lengths) < sum(batch.total_tokens for batch in micros)
    sizes = sizes_of(setup.model.config, setup.data.num_outputs)
    assert work.operations == training_operations(sizes, lengths, sum(batch.num_targets for batch in micros))


@pytest.mark.promise("bench.strategies")
def test_the_column_torch_is_measured_without_native_kernels(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not this machine has them: what counts is that they are off during every one of its updates."""
    monkeypatch.setattr(native, "_load", lambda: (object(), "for the test"))
    seen: list[bool] = []
    monkeypatch.setattr(Rehearsal, "step", lambda self, micros: seen.append(native.enabled()))
    variant = strategy_variants(setup)[5]
    measured = measure(setup, [variant], Effort(rounds=2, seconds=0.0, ceiling_size=16))
    assert list(measured.turns) == [variant.name, variant.name + ", torch"]
    warming, first, second = [True, True, False, False], [True, False], [False, True]
    assert seen == [*warming, *first, *second], "two to warm each, then by turns"
    row = to_row(variant, measured, (2, 1))
    assert len(row.rates) == len(row.torch_rates) == 2
    gain = row.native_gain()
    assert gain is not None
    assert gain == spread([fast / slow for fast, slow in zip(row.rates, row.torch_rates, strict=True)])


@pytest.mark.promise("bench.memory")
def test_memory_is_that_of_a_process_of_its_own(toy: str) -> None:
    ballast = torch.ones(128 << 20, dtype=torch.uint8)  # would show in the base of a forked process, or of this one
    ((peak, base),) = run_all(bench_verb._peak_of, [(toy, [], 0)])
    own = process_memory()
    assert ballast.numel() + base <= own + (64 << 20)
    assert 0 < base <= peak < own


@pytest.mark.promise("bench.memory")
def test_memory_is_predicted_from_small_passes_and_held_against_the_rows(setup: Setup) -> None:
    footprint, parameters = Footprint(1000.0, 5.0, 0.5), [nn.Parameter(torch.zeros(10))]
    memory = StageMemory(setup.stages[0], footprint, parameters)

    def needed(tokens: int) -> float:  # weights and two moments, and a pass over sequences of 4 tokens
        return 3 * 40 + KEPT + OVERHEAD * (1000 + 5 * tokens + 0.5 * 4 * tokens)

    peaks = {n: 500 + int(needed(100 * n)) for n in (1, 2, 4)} | {8: 500 + int(2 * needed(800))}
    rows = [_row(str(n), [1.0], largest_pass=100 * n, peak_bytes=peak, base_bytes=500) for n, peak in peaks.items()]
    model = predicted_memory(memory, rows, longest=4)
    assert model.bytes_per_token == pytest.approx(7 * OVERHEAD)
    assert model.predict(1600) == pytest.approx(needed(1600))
    assert model.fitting_tokens(500 + int(needed(1000)) + 1) == 1000
    assert model.fitting_tokens(10) == 0
    assert model.worst_error == pytest.approx(0.5, abs=1e-3)


@pytest.mark.promise("bench.steps")
def test_equal_updates_learn_and_see_more_tokens_in_larger_batches(setup: Setup) -> None:
    sizes = size_variants(setup)
    trained = [train(sizes[i], 25, 1) for i in (0, 3)]
    assert [row.updates for row in trained] == [25, 25]
    assert trained[0].tokens < trained[1].tokens
    untrained = train(sizes[0], 0, 1).heldout_loss
    losses = [row.heldout_loss for row in trained]
    assert untrained is not None
    assert losses[0] is not None
    assert losses[1] is not None
    assert losses[1] < losses[0] < untrained


def test_ratios_are_taken_round_by_round() -> None:
    """A machine twice as slow in one round changes the rates of both rows and no ratio."""
    first, second = _row("first", [100.0, 50.0, 100.0]), _row("second", [400.0, 200.0, 400.0])
    assert second.times(first) == spread([4.0, 4.0, 4.0])
    assert second.times(first).low == second.times(first).high == 4
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)


@pytest.mark.promise("bench.strategies")
def test_json_and_lines_hold_every_number(result: Bench) -> None:
    values = json.loads(json.dumps(result.to_json()))
    assert values["machine"]["processor"]
    assert {"torch", "threads", "precision", "cores", "load"} <= values["machine"].keys()
    assert len(values["ceilings"]) == 4
    assert [row["name"] for row in values["trained"]][-1] == "packed, no padding"
    assert values["strategies"][0]["times_first"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert values["batch_sizes"][4]["tokens_per_second"]["median"] == np.median(values["batch_sizes"][4]["rates"])
    text = "\n".join(result.lines())
    for row in result.strategies + result.batch_sizes:
        assert f"{row.rate().median:,.0f}" in text
        assert f"{row.pad_share:.1%}" in text


@pytest.mark.promise("bench.strategies")
@pytest.mark.parametrize(
    ("write", "units"),
    [
        (partial(images, num=24), ("images", "patches")),
        (questions, ("questions", "positions")),
        (partial(patients, num=12, model={"context": 64}), ("patients", "events")),
    ],
    ids=["images", "vqa", "patients"],
)
def test_every_family_is_measured_in_its_own_units(
    write: Callable[[Path], Path], units: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bench_verb, "run_all", called_here)
    for module in (speed, bench_module):  # the least that the trained sizes are among
        monkeypatch.setattr(module, "BATCH_SIZES", bench_module.TRAINED_SIZES)
    measured = bench(
        str(write(tmp_path)), ["plan.batch_size=4"], Effort(rounds=1, seconds=0.001, updates=2, ceiling_size=64)
    )
    assert f"training {units[0]} of" in "\n".join(measured.lines())
    assert f"Tokens are real {units[1]}" in "\n".join(measured.lines())
    for row in measured.strategies + measured.batch_sizes:
        assert row.rates[0] > 0
        assert row.shares == []
        assert row.pad_share == pytest.approx(1 - row.sequence_tokens / row.padded_length)
    json.dumps(measured.to_json())


def test_stages_without_data_are_refused(toy: str) -> None:
    with pytest.raises(RecipeError, match="no stage has data"):
        bench(toy, ["data.chat=[]", "stages=[{name: tune, use: [chat]}]", "train.max_epochs=1"], SMALL)


def test_a_plan_without_an_update_is_refused(toy: str) -> None:
    with pytest.raises(PlanError, match="drops every token"):
        bench(toy, ["plan.drop_last=true", "plan.tokens_per_step=1000000"], SMALL)
