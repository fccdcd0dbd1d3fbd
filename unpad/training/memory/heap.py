"""The heap of the process: how it keeps freed memory."""

from __future__ import annotations

import ctypes
import sys

from unpad.machine.memory import process_memory

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
