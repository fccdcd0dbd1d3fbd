"""Memory for a run: what a step and a checkpoint need, against what is free and allowed."""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unpad.drill.findings import Finding
from unpad.drill.room import size_text
from unpad.training.memory import free_memory

CGROUPS, CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NEARLY = 0.8  # of what is free


@dataclass(frozen=True)
class Limit:
    """Memory that a new process may still take; `reason` names what limits it."""

    num_bytes: int
    reason: str


def memory_limit() -> Limit:
    """The smallest of what is free, what the control group leaves, and what `ulimit` allows."""
    limits = [Limit(free_memory(), "free"), *_cgroup_limits()]
    for name, flag in (("RLIMIT_AS", "-v"), ("RLIMIT_DATA", "-d")):
        allowed = resource.getrlimit(getattr(resource, name))[0]
        if allowed != resource.RLIM_INFINITY:
            limits.append(Limit(allowed, f"allowed by ulimit {flag}"))
    return min(limits, key=lambda limit: limit.num_bytes)


def _cgroup_limits() -> list[Limit]:
    """Memory that the control groups of this process leave, of both versions: the innermost and all around it."""
    found = []
    with suppress(OSError, ValueError):
        for line in CGROUP.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root, most, used = CGROUPS, "memory.max", "memory.current"
            elif "memory" in controllers.split(","):
                root, most, used = CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            inner = root / path.lstrip("/")
            for folder in (inner, *inner.parents):
                with suppress(OSError, ValueError):  # "max" is no number: no limit
                    left = int((folder / most).read_text()) - int((folder / used).read_text()) + _cache(folder)
                    found.append(Limit(max(left, 0), "left to the container"))
                if folder == root:
                    break
    return found


def _cache(folder: Path) -> int:
    """Bytes of a control group's files that the system gives up when memory is short."""
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0


def check_memory(needed: int, how: str, limit: Limit) -> Finding:
    """Compare the memory that a run needs with what there is.

    Args:
        needed: bytes of the whole process.
        how: that was found out, such as "a step".
    """
    measured = f"{size_text(needed)} for {how}, {size_text(limit.num_bytes)} {limit.reason}"
    if needed > limit.num_bytes:
        return Finding(
            "memory", "fault", measured, "it does not fit: lower plan.tokens_per_micro, or the model's sizes"
        )
    if needed > NEARLY * limit.num_bytes:
        return Finding("memory", "warning", measured, "little is left for other programs: lower plan.tokens_per_micro")
    return Finding("memory", "ok", measured, "it fits")
