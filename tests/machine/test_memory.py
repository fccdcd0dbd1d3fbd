"""Memory: what is in use, and what the system, control groups and `ulimit` leave."""

import resource
from types import SimpleNamespace

import pytest

from unpad import machine
from unpad.machine import MemoryLimit, available_memory, memory_limit

CONTAINER = "left to the container"
PAGE = resource.getpagesize()
FREE = {"proc/meminfo": "MemTotal:    999 kB\nMemAvailable:   8388608 kB"}  # 8 GiB


@pytest.fixture(autouse=True)
def ulimits(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Limits of this process by kind; without one if it is not named."""
    limits: dict[int, int] = {}
    none = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits.get(kind, none), none))
    return limits


def test_without_a_limit_memory_is_what_the_system_can_give(tell):
    assert memory_limit() == MemoryLimit(4 << 30, "assumed free"), "a system that does not tell"
    tell(FREE)
    assert memory_limit() == MemoryLimit(8 << 30, "free")
    tell({"proc/self/cgroup": "4:memory:/\n0::/", "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": 5})
    assert memory_limit() == MemoryLimit(8 << 30, "free")


@pytest.mark.promise("memory.auto", "doctor.disk")
@pytest.mark.parametrize(
    ("groups", "texts"),
    [
        ("0::/job", {"job/memory.max": 400, "job/memory.current": 100}),
        ("0::/job", {"job/memory.max": 400, "job/memory.current": 200, "job/memory.stat": "anon 5\ninactive_file 100"}),
        ("0::/job/step", {"job/memory.max": 500, "job/memory.current": 200,
                          "job/step/memory.max": "max", "job/step/memory.current": 100}),
        ("0::/job/step", {"job/memory.max": 900, "job/memory.current": 200,
                          "job/step/memory.max": 400, "job/step/memory.current": 100}),
        ("0::/hidden", {"memory.max": 300, "memory.current": 0, "other/memory.max": 1, "other/memory.current": 0}),
        ("4:cpu,memory:/job", {"memory/job/memory.limit_in_bytes": 300, "memory/job/memory.usage_in_bytes": 0}),
        ("4:memory:/docker/x", {"memory/memory.limit_in_bytes": 400, "memory/memory.usage_in_bytes": 200,
                                "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 100"}),
        ("4:memory:/a/b\n0::/", {"memory/a/memory.limit_in_bytes": 500, "memory/a/memory.usage_in_bytes": 200,
                                 "memory/a/b/memory.limit_in_bytes": 900, "memory/a/b/memory.usage_in_bytes": 0,
                                 "memory.max": 800, "memory.current": 0}),
        ("damaged\n0::/job", {"job/memory.max": 300, "job/memory.current": 0}),
    ],
)  # fmt: skip
def test_the_tightest_control_group_of_either_version_leaves_what_it_does_not_use_or_can_give_up(tell, groups, texts):
    tell(
        {"proc/self/cgroup": f"1:name=systemd:/\n{groups}"} | {f"sys/fs/cgroup/{n}": text for n, text in texts.items()}
    )
    assert memory_limit() == memory_limit(of_new_process=True) == MemoryLimit(300, CONTAINER)


def test_a_group_that_uses_more_than_it_may_leaves_nothing(tell):
    tell({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": 300, "sys/fs/cgroup/memory.current": 400})
    assert memory_limit() == MemoryLimit(0, CONTAINER)


@pytest.mark.promise("memory.auto")
@pytest.mark.parametrize(("kind", "flag", "used"), [("RLIMIT_AS", "-v", 900), ("RLIMIT_DATA", "-d", 20)])
def test_ulimit_leaves_this_process_what_it_does_not_use_and_a_new_one_all(tell, ulimits, kind, flag, used):
    tell({**FREE, "proc/self/statm": "900 50 10 5 0 20 0"})
    ulimits[getattr(resource, kind)] = 1000 * PAGE
    assert memory_limit() == MemoryLimit((1000 - used) * PAGE, f"allowed by ulimit {flag}")
    assert memory_limit(of_new_process=True) == MemoryLimit(1000 * PAGE, f"allowed by ulimit {flag}")
    assert available_memory() == (1000 - used) * PAGE
    ulimits[getattr(resource, kind)] = 10 * PAGE
    assert available_memory() == 0, "more is in use than was allowed later"


def test_memory_in_use_is_that_of_this_process(tell, monkeypatch):
    monkeypatch.setattr(resource, "getrusage", lambda of: SimpleNamespace(ru_maxrss=5))
    known = (machine.process_memory, machine.peak_memory)
    ever = 5 if machine.sys.platform == "darwin" else 5 * 1024
    assert [read() for read in known] == [ever, ever], "a system that does not tell"
    tell({
        "proc/self/statm": "900 50 10 5 0 20 0",
        "proc/self/status": "Name:\tpython\nVmHWM:\t  3072 kB",
    })  # fmt: skip
    assert [read() for read in known] == [50 * PAGE, 3 << 20]
