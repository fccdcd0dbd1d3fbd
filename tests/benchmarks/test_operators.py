"""`benchmarks/operators.py`: the least time of every call, and the table of them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("operators")


def test_every_call_counts_at_its_least(operators: Any) -> None:
    rounds = [[("a", 3.0), ("b", 1.0), ("a", 2.0)], [("a", 1.0), ("b", 4.0), ("a", 5.0)]]
    assert operators.least_times([[operators.Call(*call) for call in calls] for calls in rounds]) == {"a": 3, "b": 1}


def test_rounds_of_different_calls_are_no_rounds_of_one_step(operators: Any) -> None:
    with pytest.raises(AssertionError, match="differ"):
        operators.least_times([[operators.Call("a", 1.0)], [operators.Call("b", 1.0)]])


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
