"""Cores and threads: whether the machine is used, and by whom."""

from __future__ import annotations

from unpad.doctor.subject import Subject
from unpad.doctor.system import System
from unpad.machine.load import Load
from unpad.terminal.finding import Finding, Value

FIELD = "train.threads"
BUSY = 0.25  # of the cores, from which on others make times too long
QUIET = 0.1  # of a core: others that use more may need the cores that are idle just now
LEAST_SECONDS = 0.5  # the system counts in hundredths
GIB, SWAPPED_GIB = 1 << 30, 0.1


def check_threads(subject: Subject, system: System, load: Load | None) -> list[Finding]:
    """Compare threads with the cores that this process may use.

    Args:
        load: of the cores while steps were tried; more threads are advised only where it says that others rest.
    """
    if subject.setup.device.type != "cpu":
        return []
    threads, here, quota = system.threads(), system.cores(), system.quota()
    usable = here if quota is None else min(float(here), quota)
    if threads > max(usable, 1):
        why = "" if quota is None or quota >= here else f" (cgroup: {quota:g})"
        known: dict[str, Value] = {"threads": threads, "cores": usable, "why": why, "field": FIELD}
        return [Finding("too_many_threads", "warning", max(int(usable), 1), (FIELD,), known)]
    if threads < int(usable) and load is not None and load.others < QUIET:
        chosen = subject.setup.recipe.profile == "low_power"
        values: dict[str, Value] = {"threads": threads, "cores": int(usable), "field": FIELD}
        idle = 1 - threads / usable
        field = "profile" if chosen else FIELD
        return [Finding("threads", "note" if chosen else "warning", idle, (field,), values)]
    return []


def check_neighbours(load: Load | None, cores: int) -> list[Finding]:
    """A finding where other processes use a quarter of the cores or more.

    Args:
        load: of the cores while steps were tried.
    """
    if load is None or load.others < BUSY * cores:
        return []
    values: dict[str, Value] = {"cores": cores, "own": load.own}
    return [Finding("neighbour", "warning", load.others, ("/proc/stat",), values)]


def check_memory(system: System) -> list[Finding]:
    """Memory of this process on the disk."""
    swapped = system.swapped_bytes() / GIB
    return [Finding("swap", "warning", swapped, ("plan.tokens_per_micro",))] if swapped >= SWAPPED_GIB else []
