"""Sides that do not fit into memory together are measured in groups, each with the anchor."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from unpad.trials.bench.measure import Rounds, TimedTurn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MACHINE = 900


class _MissingError(Exception):
    pass


@pytest.fixture(scope="module")
def groups() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("groups")
        for script in BENCHMARKS.glob("*.py"):
            sys.modules.pop(script.stem, None)


class _Machine:
    """Memory of a machine on which sides of given sizes run; one that does not fit is ended."""

    def __init__(self, groups: Any, sizes: dict[str, int], grows: int = 0) -> None:
        self.groups, self.sizes, self.grows = groups, sizes, grows
        self.alive: dict[str, int] = {}
        self.started: list[str] = []
        self.ended: list[str] = []

    def available(self) -> int:
        return MACHINE - sum(self.alive.values())

    def start(self, name: str) -> Any:
        self.started.append(name)
        return _Side(self, name)

    def measure(self, names: list[str]) -> Any:
        builder = self.groups.Builder(self.start, 0.0, MACHINE, self.available, _MissingError)

        def rounds(sides: dict[str, Any], share: float) -> Rounds:
            self.shares.append(round(share, 2))
            return Rounds({name: [TimedTurn(1, 1, 1, 1.0)] for name in sides}, [1.0])

        self.shares: list[float] = []
        found = self.groups.measure_groups(names, builder, rounds, lambda name, side: self.ended.append(name))
        assert self.alive == {}, "every process is closed"
        return found


class _Side:
    def __init__(self, machine: _Machine, name: str) -> None:
        self.machine, self.name = machine, name

    def build(self, warm_seconds: float) -> Any:
        size = self.machine.sizes[self.name]
        if size < 0:
            raise _MissingError("needs a package")
        if size > self.machine.available():
            raise MemoryError
        self.machine.alive[self.name] = size
        return self.machine.groups.Memory(size, size + self.machine.grows)

    def close(self) -> None:
        self.machine.alive.pop(self.name, None)


def _names(found: Any) -> list[list[str]]:
    return [list(rounds.turns) for rounds in found.rounds]


def test_sides_that_fit_are_one_group(groups: Any) -> None:
    machine = _Machine(groups, {"ours": 10, "a": 10, "b": 10})
    assert _names(machine.measure(["ours", "a", "b"])) == [["ours", "a", "b"]]
    assert machine.shares == [1.0]
    assert machine.ended == ["a", "b", "ours"]


def test_a_group_ends_where_a_third_of_the_machine_is_left_and_each_has_the_anchor(groups: Any) -> None:
    machine = _Machine(groups, {"ours": 100, "a": 290, "b": 220, "c": 100, "d": 290})
    found = machine.measure(["ours", "a", "b", "c", "d"])
    assert _names(found) == [["ours", "a", "b"], ["ours", "c", "d"]]
    assert machine.started.count("ours") == 1, "the anchor's process stays"
    assert machine.shares == [0.6, 1.0]


def test_a_group_ends_where_the_largest_side_would_not_fit_and_work_once_more(groups: Any) -> None:
    machine = _Machine(groups, {"ours": 50, "a": 200, "b": 200, "c": 10}, grows=300)
    assert _names(machine.measure(["ours", "a", "b", "c"])) == [["ours", "a", "b"], ["ours", "c"]]


def test_a_side_whose_process_is_ended_is_built_again_in_the_next_group(groups: Any) -> None:
    machine = _Machine(groups, {"ours": 100, "a": 300, "b": 600})
    assert _names(machine.measure(["ours", "a", "b"])) == [["ours", "a"], ["ours", "b"]]
    assert machine.started == ["ours", "a", "b", "b"]
    with pytest.raises(MemoryError):
        _Machine(groups, {"ours": 100, "b": 900}).measure(["ours", "b"])


def test_a_side_without_its_package_is_left_out(groups: Any) -> None:
    found = _Machine(groups, {"ours": 10, "a": -1, "b": 10, "c": -1}).measure(["ours", "a", "b", "c"])
    assert _names(found) == [["ours", "b"]]
    assert found.left_out == {"a": "needs a package", "c": "needs a package"}
    assert _names(_Machine(groups, {"ours": 10}).measure(["ours"])) == [["ours"]], "ours alone is a table too"
    machine = _Machine(groups, {"ours": 300, "a": 400, "b": -1})
    assert _names(machine.measure(["ours", "a", "b"])) == [["ours", "a"]], "no group for a side that is not there"
