"""`benchmarks/processes.py`: parts are run and shown each by itself, and the simulation is a recount."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unpad.batching.balance import Costs
from unpad.batching.plan import plan
from unpad.batching.shares import micro_cost
from unpad.recipes.training import PlanSettings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("processes")
    for name in ("processes", "process_balance", "process_speed", "process_sums", "process_updates"):
        sys.modules.pop(name, None)


def test_shares_in_turn_equal_a_recount(script: Any) -> None:
    settings = PlanSettings(tokens_per_step=300, tokens_per_micro=50)
    made = plan(np.arange(1, 60), settings, seed=0, epoch=0)
    spent = useful = 0.0
    for index in range(made.num_steps):
        costs = [micro_cost(micro, 9.0) for micro in made.step(index)]
        spent += max(sum(costs[rank::4]) for rank in range(4))
        useful += sum(costs)
    found = script.process_balance.in_turn(Costs(made, 9.0), 4)
    assert found == pytest.approx(useful / spent / 4)
    assert found <= Costs(made, 9.0).balance(4).efficiency


def test_shares_by_cost_are_best_and_within_the_bound(script: Any) -> None:
    balance = script.process_balance
    row = balance.efficiencies(balance.DISTRIBUTIONS["documents"], 8, 1 << 16, 20_000.0, updates=2)
    sides = row["sides"]
    assert 0 < sides["padded, in turn"] < sides["flat, in turn"] < sides["flat, by cost"] <= row["bound"] <= 1


def test_a_part_that_runs_leaves_the_others_as_they_were(script: Any, tmp_path: Path) -> None:
    results = json.loads((BENCHMARKS / "processes.json").read_text(encoding="utf-8"))
    (tmp_path / "processes.json").write_text(json.dumps({"other": {"kept": 1}}), encoding="utf-8")
    script.write(tmp_path, {"simulation": results["simulation"]})
    kept = json.loads((tmp_path / "processes.json").read_text(encoding="utf-8"))
    assert kept == {"other": {"kept": 1}, "simulation": results["simulation"]}
    assert "## Balance by simulation" in (tmp_path / "processes.md").read_text(encoding="utf-8")


def test_the_page_is_that_of_the_results(script: Any) -> None:
    results = json.loads((BENCHMARKS / "processes.json").read_text(encoding="utf-8"))
    assert script.page(results) == (BENCHMARKS / "processes.md").read_text(encoding="utf-8")


def test_speed_is_compared_within_a_turn(script: Any) -> None:
    speed = script.process_speed
    rates = {side.name: [100.0 * side.processes * turn for turn in (1, 2, 4)] for side in speed.SIDES}
    rows = {name: [{"tokens_per_second": rate, "processor_ms": 5.0} for rate in found] for name, found in rates.items()}
    machine = {"processor": "P", "cores": 2, "torch": "2", "kernels": "K", "load": None}
    results = {"machine": machine, "precision": "fp32", "wait_policy": "default", "sizes": {"8192": rows}}
    page = speed.markdown(results)
    assert page[-1] == "| 8,192 | 2.00, 2.00 to 2.00 | 2.00, 2.00 to 2.00 | 2.00, 2.00 to 2.00 |"
    assert "| 8,192 | 200 | 200 | 200 | 400 | 800 |" in page


def test_micro_batches_of_the_benchmark_are_as_many_as_it_says_and_processes_share_them(script: Any) -> None:
    side = script.process_speed.SIDES[1]
    assert [side.micro(update) for update in (1024, 16384)] == [1024, 4096]
    assert script.process_speed.TWO.micro(8192) == 2048
