"""Gates of the speed benchmark read as they are meant, and those of another processor do not apply."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import Rounds, TimedTurn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def gates() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("gates")
        for script in BENCHMARKS.glob("*.py"):
            sys.modules.pop(script.stem, None)


def _groups(gates: Any, *groups: dict[str, tuple[int, ...]], ceilings: tuple[float, ...] = (80.0, 100.0)) -> Any:
    """Groups of sides with these rates in their rounds."""
    rounds = [
        Rounds({name: [TimedTurn(1, r, r, 1.0) for r in rates] for name, rates in group.items()}, list(ceilings))
        for group in groups
    ]
    return gates.Groups("ours", rounds, {})


def test_a_gate_takes_the_lower_quartile_and_the_fastest_peer(gates):
    result = _groups(gates, {"ours": (40, 40, 40, 20, 40), "a": (5,) * 5, "b": (10,) * 5})
    judged = gates.judge(gates.Gate("x", "ours", ("a", "b"), 3.9, 8.0), result)
    assert judged["other"] == "b"
    assert judged["values"] == [4.0, 4.0, 4.0, 2.0, 4.0]
    assert judged["low"] == 4.0
    assert judged["met"]
    assert judged["of_goal"] == 0.5
    assert not gates.judge(gates.Gate("x", "ours", ("b",), 4.1), result)["met"]
    assert gates.judge(gates.Gate("x", "ours", (), 0.4), result)["values"] == [0.4, 0.4, 0.4, 0.2, 0.4]
    assert gates.judge(gates.Gate("x", "ours", ("missing",), 1.0), result) is None
    assert gates.judge(gates.Gate("x", "ours", ("missing", "b"), 1.0), result)["other"] == "b"


def test_a_gate_that_is_a_limit_takes_the_upper_quartile(gates):
    result = _groups(gates, {"ours": (10, 10, 10, 10, 10), gates.PRODUCTS: (11, 12, 13, 14, 15)})
    judged = gates.judge(gates.products(1.4), result)
    assert judged["values"] == [1.1, 1.2, 1.3, 1.4, 1.5]
    assert judged["met"], "the upper quartile is 1.4"
    assert not gates.judge(gates.products(1.39), result)["met"]
