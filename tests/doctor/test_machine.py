"""Readings of the machine: cores, the quota of a control group, and the work of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from unpad.doctor import system
from unpad.doctor.machine import Neighbours
from unpad.doctor.system import System


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


def test_the_work_of_all_cores_leaves_out_what_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "STAT", tmp_path / "stat")
    assert system.busy_seconds() is None
    (tmp_path / "stat").write_text("cpu  100 0 50 9000 700 0 50 0 0 0\ncpu0 1\n")
    ticks = system.os.sysconf("SC_CLK_TCK")
    assert system.busy_seconds() == 200 / ticks


def test_swapped_memory_is_that_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "SELF_STATUS", tmp_path / "status")
    assert system.swapped_bytes() == 0
    (tmp_path / "status").write_text("Name:\tpython\nVmSwap:\t    2048 kB\n")
    assert system.swapped_bytes() == 2 << 20
    assert system.own_seconds() > 0
    assert system.cores() >= 1


@pytest.mark.parametrize(("busy", "own", "others"), [(20.0, 10.0, 1.0), (12.0, 10.0, None), (9.0, 10.0, None)])
def test_work_of_others_is_what_this_process_did_not_do(busy: float, own: float, others: float | None) -> None:
    clock, worked, mine = iter([0.0, 10.0]), iter([0.0, busy]), iter([0.0, own])
    readings = System(cores=lambda: 2, busy_seconds=lambda: next(worked), own_seconds=lambda: next(mine))
    found = Neighbours(readings, lambda: next(clock)).check()
    assert [round(one.number, 6) for one in found] == ([] if others is None else [others])
