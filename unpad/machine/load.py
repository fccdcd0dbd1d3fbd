"""The processor: name, instructions, the cores that this process may use, and their load by it and by others."""

import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from unpad.machine.memory import control_groups, lines_of, system_file


def processor_fields() -> dict[str, str]:
    """Fields of the last processor of /proc/cpuinfo by name; empty without that file."""
    lines = lines_of(system_file("proc/cpuinfo"))
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def processor_name() -> str:
    """Model of the processor, or its architecture if the system gives no name."""
    return processor_fields().get("model name") or platform.processor() or platform.machine()


def full_processor_name() -> str:
    """Name with family and model, which distinguish processors with equal names in clouds."""
    fields, name = processor_fields(), processor_name()
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else name


IDLE = (3, 4)  # columns of /proc/stat: idle, and waiting for a disk
SHORTEST = 0.5  # seconds of a reading; the system counts in hundredths


def usable() -> set[int] | None:
    """Numbers of the cores that this process may run on; None where the system does not say."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def cores() -> int:
    """Number of cores that this process may run on."""
    return len(usable() or range(os.cpu_count() or 1))


def quota() -> float | None:
    """Number of cores that the control groups allow this process; None without a limit."""
    found = []
    for folder, version in control_groups("cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        words = " ".join(line for name in names for line in lines_of(folder / name)).split()
        with suppress(ValueError, ZeroDivisionError):  # the group is not visible, "max", or -1
            limit, period = map(int, words)
            found += [limit / period] if limit > 0 else []
    return min(found, default=None)


def load_average() -> float | None:
    """Runnable processes, mean of the last minute; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def busy_seconds() -> float | None:
    """Busy seconds of the cores of this process, by any process; None if the system does not report them."""
    own, ticks = usable(), 0
    if own is None:
        return None
    try:
        for name, *columns in filter(None, map(str.split, lines_of(system_file("proc/stat")))):
            if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in own:
                ticks += sum(int(value) for index, value in enumerate(columns[:8]) if index not in IDLE)
    except ValueError:
        return None
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None


def own_seconds() -> float:
    """CPU seconds of the threads of this process."""
    times = os.times()
    return times.user + times.system


@dataclass(frozen=True)
class Load:
    """Work of the cores over some time, in cores.

    Args:
        own: of this process; others: of all others.
    """

    own: float
    others: float


class LoadMeter:
    """The work of the cores between two readings."""

    def __init__(
        self,
        busy: Callable[[], float | None] = busy_seconds,
        own: Callable[[], float] = own_seconds,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._busy, self._own, self._now = busy, own, now
        self._last = (busy(), own(), now())

    def read(self) -> Load | None:
        """The load since the last reading, or since the start; None if the system does not report it, or after less
        than half a second."""
        before, self._last = self._last, (self._busy(), self._own(), self._now())
        (busy_before, own_before, began), (busy, own, now) = before, self._last
        if busy is None or busy_before is None or now - began < SHORTEST:
            return None
        mine, all_work = own - own_before, busy - busy_before
        if all_work < mine / 2:  # a sandbox that does not count the work of cores or of this process
            return None
        return Load(mine / (now - began), max(all_work - mine, 0.0) / (now - began))
