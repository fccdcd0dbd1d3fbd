"""Readings of the machine and of this process: memory, processor, and load. Nothing here needs torch.

Memory is that used by this process, its peak since a chosen moment, and what is still available. Of the processor it
is the name, instructions, the cores that this process may use, and their load by it and by others.
"""

import mmap
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import NamedTuple

# --------------------------------------------------------------------------- memory

FILES = {  # of a control group, by version: its limit, what is used, and the cached files among that
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
ROOT = Path("/")  # of the system's files; tests replace it
UNKNOWN = 4 << 30  # bytes assumed free if the system does not report them
PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True)
class MemoryLimit:
    """Available memory; `reason` names the limit."""

    num_bytes: int
    reason: str


def process_memory() -> int:
    """Resident bytes of this process; on systems without /proc, its peak."""
    pages = _pages()
    return pages[1] * PAGE_BYTES if len(pages) > 1 else _largest_ever()


def peak_memory() -> int:
    """Largest resident bytes since `restart_peak`, or since the process began."""
    # Not ru_maxrss: a forked or executed process inherits its parent's.
    peak = number_of(system_file("proc/self/status"), "VmHWM")
    return _largest_ever() if peak is None else peak * 1024


def restart_peak() -> None:
    """Reset `peak_memory` to the memory in use now, if the system can."""
    with suppress(OSError):
        system_file("proc/self/clear_refs").write_text("5")


def available_memory() -> int:
    """Bytes that this process can allocate without swapping, within the limits of its control groups and its own."""
    return memory_limit().num_bytes


def memory_limit(*, of_new_process: bool = False) -> MemoryLimit:
    """The smallest of the free memory, the rest of every control group's limit, and the rest of `ulimit`.

    Args:
        of_new_process: `ulimit` counts each process separately, so a new process has the full limit.
    """
    free = number_of(system_file("proc/meminfo"), "MemAvailable")
    limits = [
        MemoryLimit(UNKNOWN, "assumed free") if free is None else MemoryLimit(free * 1024, "free"),
        *_left_of_groups(),
    ]
    return min([*limits, *_left_of_ulimits(of_new_process)], key=lambda limit: limit.num_bytes)


def _left_of_groups() -> Iterator[MemoryLimit]:
    """Limits of the control groups minus their use; cached files do not count, as the system drops them when memory is
    short."""
    for folder, version in control_groups("memory"):
        most, used, cached = FILES[version]
        with suppress(OSError, ValueError):  # the group is not visible, or "max"
            left = int((folder / most).read_text()) - int((folder / used).read_text())
            left += number_of(folder / "memory.stat", cached) or 0
            yield MemoryLimit(max(left, 0), "left to the container")


def _left_of_ulimits(of_new_process: bool) -> Iterator[MemoryLimit]:
    """Limits of the address space and of data, minus the use of this process."""
    pages = _pages()
    for name, flag, column in (("AS", "-v", 0), ("DATA", "-d", 5)):
        most = limit_of(name)
        if most is not None:
            used = 0 if of_new_process or len(pages) <= column else pages[column] * PAGE_BYTES
            yield MemoryLimit(max(most - used, 0), f"allowed by ulimit {flag}")


def _pages() -> list[int]:
    """Columns of /proc/self/statm, in pages: address space, resident, shared, code, 0, data and stack, 0."""
    words = " ".join(lines_of(system_file("proc/self/statm"))).split()
    return [int(word) for word in words] if all(word.isdecimal() for word in words) else []


def _largest_ever() -> int:
    resource, scale = _resource(), 1 if sys.platform == "darwin" else 1024
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def limit_of(name: str) -> int | None:
    """Soft limit of this process, by its name after RLIMIT_, such as AS; None without one."""
    resource = _resource()
    limit = -1 if resource is None else resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
    return None if resource is None or limit == resource.RLIM_INFINITY else limit


def _resource() -> ModuleType | None:
    """The module `resource`, which Windows lacks."""
    try:
        return import_module("resource")
    except ImportError:
        return None


class ControlGroup(NamedTuple):
    """Folder of a control group, which may be hidden, and its version, 1 or 2."""

    folder: Path
    version: int


def system_file(name: str) -> Path:
    """Path of a file by its name without the first slash, such as proc/stat."""
    return ROOT / name


def lines_of(path: Path) -> list[str]:
    """Lines of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def number_of(path: Path, field: str) -> int | None:
    """First number of the line that begins with a field, with or without a colon; None without one."""
    for line in lines_of(path):
        words = line.split()
        if len(words) > 1 and words[0].removesuffix(":") == field and words[1].isdecimal():
            return int(words[1])
    return None


def control_groups(controller: str) -> Iterator[ControlGroup]:
    """Control groups of this process that a controller such as "memory" may limit, the innermost first and then those
    around it, of both versions.

    A container may show them only at the root: many of the folders do not exist.
    """
    for line in lines_of(system_file("proc/self/cgroup")):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = system_file("sys/fs/cgroup") / (controller if controllers else "")
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):
            yield ControlGroup(top / group, 1 if controllers else 2)


# --------------------------------------------------------------------------- processor and load


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
    return ticks / os.sysconf("SC_CLK_TCK") if ticks and hasattr(os, "sysconf") else None


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
