"""How much memory the process uses: now, and at its peak since a moment that is ours to choose."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

CLEAR_REFS, STATUS, STATM = Path("/proc/self/clear_refs"), Path("/proc/self/status"), Path("/proc/self/statm")


def process_memory() -> int:
    """Resident bytes of this process; where the system has no /proc, its peak."""
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
    """Let `peak_memory` start again from what is in use now, where the system can."""
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return


def return_freed_memory() -> None:
    """Give freed memory back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class HeapKeeper:
    """Keeps the heap from growing with the variety of shapes: batches of ever new sizes leave holes in it.

    Once the process is half as large again as after its first step, what is free goes back to the system. That costs a
    fraction of a second, seldom.
    """

    GROWTH = 1.5

    def __init__(self) -> None:
        self._normal: int | None = None

    def after_step(self) -> int:
        """Look at the memory in use, and return it in bytes."""
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
    """Bytes that could be taken without swapping; 4 GiB where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4 << 30
