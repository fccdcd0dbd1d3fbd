"""Cores: the work of others on those of this process, and what it makes of the steps of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from unpad.run import cores
from unpad.run.cores import Load, LoadMeter, StepShare


def test_the_work_of_this_process_s_cores_leaves_out_what_is_idle_and_other_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "STAT", tmp_path / "stat")
    monkeypatch.setattr(cores, "usable", lambda: {0, 3})
    assert cores.busy_seconds() is None
    rows = ["cpu  999 9 9 9 9 9 9", "cpu0 100 0 50 9000 700 0 50 0 0 0", "cpu1 5000 0 0 1", "cpu3 10 0 0 7 0 0 0 5"]
    (tmp_path / "stat").write_text("\n".join([*rows, "intr 1 2"]))
    ticks = cores.os.sysconf("SC_CLK_TCK")
    assert cores.busy_seconds() == 215 / ticks
    (tmp_path / "stat").write_text("cpu 0 0 0 0\ncpu0 0 0 0 0\n")  # a sandbox that counts nothing
    assert cores.busy_seconds() is None


@pytest.mark.parametrize(
    ("busy", "own", "expected"),
    [(20.0, 10.0, Load(1.0, 1.0)), (9.0, 10.0, Load(1.0, 0.0)), (None, 10.0, None), (4.0, 10.0, None)],
)
def test_work_of_others_is_what_this_process_did_not_do(busy: float | None, own: float, expected: Load | None) -> None:
    clock, worked, mine = iter([0.0, 10.0]), iter([0.0, busy]), iter([0.0, own])
    meter = LoadMeter(lambda: next(worked), lambda: next(mine), lambda: next(clock))
    assert meter.read() == expected


def test_a_reading_of_an_instant_says_nothing() -> None:
    clock = iter([0.0, 0.1])
    assert LoadMeter(lambda: 1.0, lambda: 1.0, lambda: next(clock)).read() is None


class Meter:
    """Stands for readings of the system."""

    load: Load | None = None

    def read(self) -> Load | None:
        return self.load


def lines_of(share: StepShare, seconds: float, processor: float, steps: int = 25) -> list[str]:
    return [line for _ in range(steps) if (line := share.step(seconds, processor)) is not None]


def test_steps_that_starve_are_told_once_and_again_when_the_cores_are_free() -> None:
    meter = Meter()
    share = StepShare(2, meter, 2)  # type: ignore[arg-type]
    meter.load = Load(0.9, 1.1)
    told = lines_of(share, 1.0, 0.9)
    assert len(told) == 1
    assert "2 threads got 0.9 of 2 cores, other processes use 1.1 of them; train.threads=1 is often faster" in told[0]
    assert lines_of(share, 1.0, 0.9, 100) == []
    assert lines_of(share, 1.0, 1.4, 100) == [], "between the two limits nothing changes"
    meter.load = Load(1.9, 0.1)
    told = lines_of(share, 1.0, 1.9, 50)
    assert [line.partition(":")[0] for line in told] == ["the cores are free again"]
    assert lines_of(share, 1.0, 1.9, 100) == []


@pytest.mark.parametrize("load", [None, Load(0.9, 0.3)])
def test_steps_that_leave_cores_idle_by_themselves_are_not_told(load: Load | None) -> None:
    meter = Meter()
    meter.load = load
    assert lines_of(StepShare(2, meter, 2), 1.0, 0.9, 100) == []  # type: ignore[arg-type]


def test_first_steps_and_short_times_are_not_judged_and_one_thread_gets_no_advice() -> None:
    meter = Meter()
    meter.load = Load(0.3, 1.7)
    share = StepShare(1, meter, 2)  # type: ignore[arg-type]
    assert lines_of(share, 100.0, 30.0, 24) == []
    (line,) = lines_of(share, 100.0, 30.0, 1)
    assert line.endswith("1 thread got 0.3 of 2 cores, other processes use 1.7 of them")
    short = StepShare(2, meter, 2)  # type: ignore[arg-type]
    assert lines_of(short, 0.001, 0.0001, 1000) == []
