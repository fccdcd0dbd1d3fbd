"""Cores: what the work of others makes of the steps of a run."""

import pytest

from unpad.machine import Load
from unpad.run.timers import StepShare


class Meter:
    """Stands for readings of the system."""

    load: Load | None = None

    def read(self) -> Load | None:
        return self.load


def lines_of(share: StepShare, seconds: float, processor: float, steps: int = 25) -> list[str]:
    return [line for _ in range(steps) if (line := share.step(seconds, processor)) is not None]


@pytest.mark.promise("doctor.threads")
def test_steps_that_starve_are_told_once_and_again_when_the_cores_are_free():
    meter = Meter()
    share = StepShare(2, meter, 2)
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


@pytest.mark.promise("doctor.threads")
@pytest.mark.parametrize("load", [None, Load(0.9, 0.3)])
def test_steps_that_leave_cores_idle_by_themselves_are_not_told(load):
    meter = Meter()
    meter.load = load
    assert lines_of(StepShare(2, meter, 2), 1.0, 0.9, 100) == []


def test_first_steps_and_short_times_are_not_judged_and_one_thread_gets_no_advice():
    meter = Meter()
    meter.load = Load(0.3, 1.7)
    share = StepShare(1, meter, 2)
    assert lines_of(share, 100.0, 30.0, 24) == []
    (line,) = lines_of(share, 100.0, 30.0, 1)
    assert line.endswith("1 thread got 0.3 of 2 cores, other processes use 1.7 of them")
    assert lines_of(StepShare(2, meter, 2), 0.001, 0.0001, 1000) == []
