"""Memory of the process: in use, at its peak since a chosen moment, and how the heap keeps freed memory."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CLEAR_REFS, STATUS, STATM = Path("/proc/self/clear_refs"), Path("/proc/self/status"), Path("/proc/self/statm")
MEMINFO, CGROUP, CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def process_memory() -> int:
    """Resident bytes of this process; on systems without /proc, its peak."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return _largest_ever()


def peak_memory() -> int:
    """Largest resident bytes since `restart_peak`, or since the process began."""
    try:
        # Not ru_maxrss: a forked or executed process inherits its parent's.
        return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    except (OSError, StopIteration):
        return _largest_ever()


def restart_peak() -> None:
    """Reset `peak_memory` to the memory in use now, if the system can."""
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return


# Of glibc's malloc.h: free memory above which the heap shrinks, and the number of separately mapped blocks.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
_keeps_freed = False


def keep_freed_memory() -> bool:
    """Let the heap keep freed memory, so that the next large tensor reuses its pages; return whether that worked.

    By default glibc maps every tensor of more than 32 MB separately and unmaps it when freed, so that each use begins
    with a page fault per 4 KiB. This cannot be undone within the process: glibc forgets its moving threshold for good.
    `return_freed_memory` still returns free memory to the system.
    """
    global _keeps_freed
    if not _keeps_freed and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "gnu_get_libc_version"):  # other C libraries ignore the settings
            # -1: no amount of free memory is too much.
            _keeps_freed = all([libc.mallopt(M_MMAP_MAX, 0), libc.mallopt(M_TRIM_THRESHOLD, -1)])
    return _keeps_freed


def choose_allocator(asked: str, *, may_keep: bool) -> tuple[str, str]:
    """Set how the process handles freed memory; return the state, "keep" or "system", and the reason.

    Args:
        asked: auto, system or keep; auto keeps if it may.
        may_keep: whether the model runs on the processor and memory is not short.
    """
    if _keeps_freed:
        return "keep", "as an earlier run of this process set it" if asked == "system" else "set already"
    if asked == "system" or (asked == "auto" and not may_keep):
        return "system", "as the recipe says" if asked == "system" else "memory is short here, or a GPU computes"
    if not keep_freed_memory():
        return "system", "only glibc can keep freed memory"
    return "keep", "as the recipe says" if asked == "keep" else "every step makes the same large tensors"


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class HeapKeeper:
    """Limit on the growth of the heap, in which batches of ever new sizes leave holes.

    When the process has grown by half since its first step, free memory is returned to the system. That takes a
    fraction of a second, and is rare.
    """

    GROWTH = 1.5

    def __init__(self) -> None:
        self._normal: int | None = None

    def after_step(self) -> int:
        """Return the memory in use, in bytes, and free the holes if it has grown too much."""
        used = process_memory()
        if self._normal is None:
            self._normal = used
        elif used > self.GROWTH * self._normal:
            return_freed_memory()
            self._normal = None
        return used


def _largest_ever() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def available_memory() -> int:
    """Bytes that this process can allocate without swapping, within the limits of its control groups and its own."""
    return max(min([free_memory(), *_left_of_groups(), *_left_of_limits()]), 0)


def free_memory() -> int:
    """Bytes that the system can give without swapping; 4 GiB if it does not tell."""
    try:
        lines = MEMINFO.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4 << 30


def _left_of_groups() -> Iterator[int]:
    """Bytes left of the limits of this process's control groups, of both versions, and of those around them."""
    try:
        lines = CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, names = (
            (CGROUPS, ("memory.max", "memory.current", "inactive_file"))
            if not controllers
            else (
                CGROUPS / "memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        )
        place = PurePosixPath(path)
        for group in (place, *place.parents):
            try:
                folder = root / str(group).lstrip("/")
                most = int((folder / names[0]).read_text())
                used = int((folder / names[1]).read_text())
                rows = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                yield most - used + int(rows.get(names[2], 0))  # cached files give way
            except (OSError, ValueError):  # no such group is seen from here, or "max"
                continue


def _left_of_limits() -> Iterator[int]:
    """Bytes left of the limits that `ulimit` sets, of address space and of data."""
    try:
        import resource

        pages = [int(number) for number in STATM.read_text().split()]
    except (ImportError, OSError, ValueError):
        return
    size = os.sysconf("SC_PAGE_SIZE")
    for kind, used in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
        most = resource.getrlimit(kind)[0]
        if most != resource.RLIM_INFINITY:
            yield most - used * size
