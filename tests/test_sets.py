"""Tests are chosen for `make test` by their marks, and grids by pairs."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.helpers.grid import pairs

AXES = ["a", "b", "c"], [0, 1, 2], [True, False]


class Item:
    """A test with its name and marks."""

    def __init__(self, nodeid: str, *marks: Any) -> None:
        self.nodeid, self.marks = nodeid, [mark.mark for mark in marks]

    def iter_markers(self, name: str) -> list[Any]:
        return [mark for mark in self.marks if mark.name == name]

    def get_closest_marker(self, name: str) -> Any:
        return next(iter(self.iter_markers(name)), None)


def chosen(which: str, items: list[Item]) -> list[str]:
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    rest: list[Any] = list(items)
    pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _: which, hook=hook), rest)
    return [item.nodeid for item in rest]


def test_first_cases_of_slow_tests_and_a_test_of_every_promise_are_quick_and_the_others_the_rest():
    mark, shows = pytest.mark, pytest.mark.promise
    items = [
        Item("plain[1]"), Item("plain[2]"), Item("slow[1]", mark.slow, shows("x")), Item("slow[2]", mark.slow),
        Item("night", mark.nightly, shows("x")), Item("only[1]", mark.nightly, shows("y")),
        Item("only[2]", mark.nightly, shows("y")),
    ]  # fmt: skip
    assert chosen("quick", items) == ["plain[1]", "plain[2]", "slow[1]", "only[1]"]
    assert chosen("rest", items) == ["slow[2]", "night", "only[2]"]
    assert chosen("all", items) == [item.nodeid for item in items]


def test_any_two_values_of_two_axes_meet_in_a_row_and_all_rows_are_there_in_full(monkeypatch):
    monkeypatch.delenv("UNPAD_GRID", raising=False)
    rows = pairs(*AXES)
    assert len(rows) == 9
    for one, two in itertools.combinations(range(3), 2):
        assert {(row[one], row[two]) for row in rows} == set(itertools.product(AXES[one], AXES[two]))
    assert ("a", 0, True) not in pairs(*AXES, where=lambda letter, number, flag: (letter, number) != ("a", 0))
    monkeypatch.setenv("UNPAD_GRID", "full")
    everything = [getattr(row, "values", row) for row in pairs(*AXES)]
    assert everything[:9] == rows
    assert sorted(everything) == sorted(itertools.product(*AXES))
