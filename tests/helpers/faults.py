"""Faults of a disk and of memory: the steps of durable writing, killed or failing one at a time."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from unpad.storage import disk

NO_MEMORY = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"  # what torch says


def operations(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the storage operations that `work` does."""
    names: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(disk, "operation", lambda name, path: names.append(name))
        work()
    return names


def at_operation(number: int, act: Callable[[], None]) -> Callable[[str, Path], None]:
    """A hook that acts at one operation, counted from 0."""
    seen = iter(range(10**6))
    return lambda name, path: act() if next(seen) == number else None


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
