"""`benchmarks/operators.py`: the time of every call, and the table of them."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("operators")


def times(operators: Any, rounds: list[list[tuple[str, float]]]) -> dict[str, float]:
    made: dict[str, float] = operators.times_by_operator([[operators.Call(*c) for c in calls] for calls in rounds], min)
    return made


def test_every_call_counts_at_its_least(operators: Any) -> None:
    rounds = [[("a", 3.0), ("b", 1.0), ("a", 2.0)], [("a", 1.0), ("b", 4.0), ("a", 5.0)]]
    assert times(operators, rounds) == {"a": 3, "b": 1}


def test_rounds_of_unequal_calls_are_compared_by_operator_and_place(operators: Any) -> None:
    first = [("a", 3.0), ("b", 1.0), ("a", 2.0)]
    clipped = [("b", 4.0), ("a", 1.0), ("clip", 9.0), ("a", 5.0), ("a", 0.5)]
    assert times(operators, [first, clipped, first]) == {"a": 3, "b": 1}
    assert times(operators, [first, clipped]) == {"a": 3.5, "b": 1, "clip": 9}


def test_the_processor_clock_counts_work_and_no_waiting(operators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(ours: None, micros: list[None]) -> None:
        time.sleep(0.05)
        torch.eye(4, requires_grad=True).mm(torch.eye(4)).sum().backward()

    monkeypatch.setattr(operators, "take_step", step)
    operators.timed_step(None, [])  # torch imports what the first one needs
    began = time.thread_time()
    calls = operators.timed_step(None, [])
    assert sum(call.milliseconds for call in calls) <= 1000 * (time.thread_time() - began)
    names = [call.name for call in calls]
    assert names.count("aten::mm") == 2, "forward and backward"
    assert names[-1] == operators.PYTHON


def test_processor_time_of_more_threads_is_refused(
    operators: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["operators.py", "W1", "--clock", "processor", "--threads", "1", "2"])
    with pytest.raises(SystemExit, match="2"):
        operators.main()
    assert "leave out --threads" in capsys.readouterr().err


def test_the_table_has_shares_of_the_products_and_how_an_operator_gains(operators: Any) -> None:
    times = {
        1: {"aten::mm": 60.0, "aten::addmm": 40.0, "aten::sum": 2.0, "aten::view": 0.01},
        2: {"aten::mm": 30.0, "aten::addmm": 20.0, "aten::sum": 2.0, "aten::view": 0.01},
    }
    assert operators.table(times)[2:] == [
        "| a step | 102.01 | 102.0% | 52.01 | 104.0% | 0.51 |",
        "| products | 100.00 | 100.0% | 50.00 | 100.0% | 0.50 |",
        "| aten::sum | 2.00 | 2.0% | 2.00 | 4.0% | 1.00 |",
    ]


def test_an_operator_that_one_number_of_threads_lacks_has_no_time_there(operators: Any) -> None:
    rows = operators.table({1: {"aten::mm": 1.0}, 2: {"aten::mm": 1.0, "aten::sum": 2.0}})
    assert rows[-1].startswith("| aten::sum | 0.00 | 0.0% | 2.00 |")
