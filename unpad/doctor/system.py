"""Readings of the system about cores and processes, through functions that tests replace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from unpad.run.cores import busy_seconds, cores, own_seconds

SELF_STATUS = Path("/proc/self/status")
QUOTAS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def quota() -> float | None:
    """Cores' worth of time that the control group may use; None without a limit."""
    try:
        words = QUOTAS[0].read_text().split()
        return None if words[0] == "max" else int(words[0]) / int(words[1])
    except (OSError, ValueError, IndexError):
        pass
    try:
        limit = int(QUOTAS[1].read_text())
        return limit / int(PERIOD.read_text()) if limit > 0 else None
    except (OSError, ValueError):
        return None


def swapped_bytes() -> int:
    """Bytes of this process that are swapped out."""
    try:
        lines = SELF_STATUS.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSwap"))
    except (OSError, StopIteration, ValueError):
        return 0


@dataclass(frozen=True)
class System:
    """Readings of the machine; `now` is the clock that everything is timed by, in seconds."""

    cores: Callable[[], int] = cores
    quota: Callable[[], float | None] = quota
    threads: Callable[[], int] = torch.get_num_threads
    busy_seconds: Callable[[], float | None] = busy_seconds
    own_seconds: Callable[[], float] = own_seconds
    swapped_bytes: Callable[[], int] = swapped_bytes
    now: Callable[[], float] = time.perf_counter
