"""Cores and threads: whether the machine is used, and by whom."""

from __future__ import annotations

from collections.abc import Callable

from unpad.doctor.finding import Finding, Value
from unpad.doctor.subject import Subject
from unpad.doctor.system import System

FIELD = "train.threads"
BUSY = 0.25  # of the cores
LEAST_SECONDS = 0.5  # the system counts in hundredths
GIB, SWAPPED_GIB = 1 << 30, 0.1


def check_threads(subject: Subject, system: System) -> list[Finding]:
    """Compare threads with the cores that this process may use."""
    if subject.setup.device.type != "cpu":
        return []
    threads, here, quota = system.threads(), system.cores(), system.quota()
    usable = here if quota is None else min(float(here), quota)
    if threads > max(usable, 1):
        why = "" if quota is None or quota >= here else f" (cgroup: {quota:g})"
        known: dict[str, Value] = {"threads": threads, "cores": usable, "why": why, "field": FIELD}
        return [Finding("too_many_threads", "warning", max(int(usable), 1), (FIELD,), known)]
    if threads < int(usable):
        chosen = subject.setup.recipe.profile == "low_power"
        values: dict[str, Value] = {"threads": threads, "cores": int(usable), "field": FIELD}
        idle = 1 - threads / usable
        field = "profile" if chosen else FIELD
        return [Finding("threads", "note" if chosen else "warning", idle, (field,), values)]
    return []


class Neighbours:
    """The work of other processes while the examination goes on."""

    def __init__(self, system: System, now: Callable[[], float]) -> None:
        self._system, self._now = system, now
        self._began, self._busy, self._own = now(), system.busy_seconds(), system.own_seconds()

    def check(self) -> list[Finding]:
        """A finding where others use a quarter of the cores or more."""
        busy, own = self._system.busy_seconds(), self._system.own_seconds()
        seconds, cores = self._now() - self._began, self._system.cores()
        if busy is None or self._busy is None or seconds < LEAST_SECONDS:
            return []
        mine = (own - self._own) / seconds
        others = max((busy - self._busy) / seconds - mine, 0.0)
        if others < BUSY * cores:
            return []
        values: dict[str, Value] = {"cores": cores, "own": mine}
        return [Finding("neighbour", "warning", others, ("/proc/stat",), values)]


def check_memory(system: System) -> list[Finding]:
    """Memory of this process on the disk."""
    swapped = system.swapped_bytes() / GIB
    return [Finding("swap", "warning", swapped, ("plan.tokens_per_micro",))] if swapped >= SWAPPED_GIB else []
