"""Advice on threads by the cores, and by the work of others on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unpad.doctor.trials.steps import System, check_neighbours, check_threads
from unpad.machine.load import Load


@pytest.mark.promise("doctor.threads")
@pytest.mark.parametrize(
    ("load", "threads", "neighbours"),
    [
        (Load(1.0, 0.0), ["threads"], []),
        (Load(1.0, 0.3), [], []),
        (Load(1.0, 0.9), [], ["neighbour"]),
        (None, [], []),
    ],
)
def test_more_threads_are_never_advised_while_others_use_the_cores_or_nobody_knows(
    load: Load | None, threads: list[str], neighbours: list[str]
) -> None:
    setup = SimpleNamespace(device=SimpleNamespace(type="cpu"), recipe=SimpleNamespace(profile="standard"))
    subject: Any = SimpleNamespace(setup=setup)
    readings = System(cores=lambda: 2, quota=lambda: None, threads=lambda: 1)
    assert [one.code for one in check_threads(subject, readings, load)] == threads
    assert [one.code for one in check_neighbours(load, 2)] == neighbours
