"""Load: cores, the quota of control groups, and the work of others on the cores of this process."""

import os

import pytest

from unpad import machine
from unpad.machine import Load, LoadMeter

STAT = """cpu  999 9 9 9 9 9 9
cpu0 100 0 50 9000 700 0 50 0 0 0
cpu1 5000 0 0 1
cpu3 10 0 0 7 0 0 0 5
intr 1 2"""


def test_the_work_of_this_process_s_cores_leaves_out_what_is_idle_and_other_cores(tell, monkeypatch):
    monkeypatch.setattr(machine, "usable", lambda: {0, 3})
    assert machine.busy_seconds() is None
    tell({"proc/stat": STAT})
    assert machine.busy_seconds() == 215 / os.sysconf("SC_CLK_TCK")
    tell({"proc/stat": "cpu 0 0 0 0\ncpu0 0 0 0 0"})  # a sandbox that counts nothing
    assert machine.busy_seconds() is None


@pytest.mark.promise("doctor.machine")
@pytest.mark.parametrize(
    ("groups", "texts", "cores"),
    [
        ("0::/", {}, None),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/a/b", {"cpu.max": "400000 100000", "a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 0.5),
        ("0::/other/a", {"other/cpu.max": "100000 50000", "elsewhere/cpu.max": "1 100000"}, 2.0),
        ("4:cpu,cpuacct:/a", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu,cpuacct:/a", {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2.5),
        ("4:cpuset:/", {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cores_are_those_that_every_control_group_leaves(tell, groups, texts, cores):
    tell({"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{name}": text for name, text in texts.items()})
    assert machine.quota() == cores


def test_this_process_has_cores_and_has_worked():
    assert machine.own_seconds() > 0
    assert machine.cores() >= 1


@pytest.mark.promise("doctor.machine")
@pytest.mark.parametrize(
    ("busy", "own", "expected"),
    [(20.0, 10.0, Load(1.0, 1.0)), (9.0, 10.0, Load(1.0, 0.0)), (None, 10.0, None), (4.0, 10.0, None)],
)
def test_work_of_others_is_what_this_process_did_not_do(busy, own, expected):
    clock, worked, mine = iter([0.0, 10.0]), iter([0.0, busy]), iter([0.0, own])
    meter = LoadMeter(lambda: next(worked), lambda: next(mine), lambda: next(clock))
    assert meter.read() == expected


def test_a_reading_of_an_instant_says_nothing():
    clock = iter([0.0, 0.1])
    assert LoadMeter(lambda: 1.0, lambda: 1.0, lambda: next(clock)).read() is None
