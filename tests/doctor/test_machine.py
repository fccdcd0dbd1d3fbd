"""Readings of the machine: cores, the quota of a control group, and the work of others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unpad.doctor import system
from unpad.doctor.machine import check_neighbours, check_threads
from unpad.doctor.system import System
from unpad.run.cores import Load


def test_cores_are_those_of_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, old, period = tmp_path / "cpu.max", tmp_path / "quota", tmp_path / "period"
    monkeypatch.setattr(system, "QUOTAS", (new, old))
    monkeypatch.setattr(system, "PERIOD", period)
    assert system.quota() is None
    new.write_text("150000 100000\n")
    assert system.quota() == 1.5
    new.write_text("max 100000\n")
    assert system.quota() is None
    new.unlink()
    period.write_text("100000\n")
    for limit, cores in (("-1", None), ("250000", 2.5)):
        old.write_text(limit)
        assert system.quota() == cores


def test_swapped_memory_is_that_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "SELF_STATUS", tmp_path / "status")
    assert system.swapped_bytes() == 0
    (tmp_path / "status").write_text("Name:\tpython\nVmSwap:\t    2048 kB\n")
    assert system.swapped_bytes() == 2 << 20
    assert System().own_seconds() > 0
    assert System().cores() >= 1


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
