"""Cores of the machine: those that this process may use, their work, and whether the steps of a run get their share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
IDLE = (3, 4)  # columns of /proc/stat: idle, and waiting for a disk
SHORTEST = 0.5  # seconds of a reading; the system counts in hundredths
FIRST_STEPS, LEAST_STEPS, LEAST_SECONDS = 5, 20, 20.0  # left out, and of a judgement
STARVED, FED = 0.6, 0.8  # of the time of all threads
OTHERS = 0.25  # of the cores


def usable() -> set[int] | None:
    """Numbers of the cores that this process may run on; None where the system does not say."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def cores() -> int:
    """Number of cores that this process may run on."""
    return len(usable() or range(os.cpu_count() or 1))


def busy_seconds() -> float | None:
    """Seconds that the cores of this process have worked, for whichever process; None where the system does not say."""
    own, ticks = usable(), 0
    if own is None:
        return None
    try:
        rows = [line.split() for line in STAT.read_text().splitlines() if line.startswith("cpu")]
        for name, *columns in rows:
            if name[3:].isdecimal() and int(name[3:]) in own:
                ticks += sum(int(value) for index, value in enumerate(columns[:8]) if index not in IDLE)
    except (OSError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None


def own_seconds() -> float:
    """Seconds that the threads of this process have worked."""
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
        """The load since the last reading, or since the start; None where the system does not tell it, or
        that is less than half a second ago."""
        before, self._last = self._last, (self._busy(), self._own(), self._now())
        (busy_before, own_before, began), (busy, own, now) = before, self._last
        if busy is None or busy_before is None or now - began < SHORTEST:
            return None
        mine, all_work = own - own_before, busy - busy_before
        if all_work < mine / 2:  # a sandbox that counts no core's work, or not that of this process
            return None
        return Load(mine / (now - began), max(all_work - mine, 0.0) / (now - began))


class StepShare:
    """Share of the cores that the steps of a run get; told when other processes begin or cease to take them.

    Args:
        threads: that compute a step.
    """

    def __init__(self, threads: int, meter: LoadMeter | None = None, num_cores: int | None = None) -> None:
        self._threads, self._meter, self._cores = threads, meter or LoadMeter(), num_cores or cores()
        self._left_out, self._starved = FIRST_STEPS, False
        self._begin()

    def _begin(self) -> None:
        self._steps, self._seconds, self._processor = 0, 0.0, 0.0

    def step(self, seconds: float, processor: float) -> str | None:
        """Count a step, and say in a line if the share has changed.

        Args:
            seconds: that it computed; processor: seconds that this process worked meanwhile, of all its threads.
        """
        if self._left_out:
            self._left_out -= 1
            if not self._left_out:
                self._meter.read()
            return None
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        self._processor += processor
        if self._steps < LEAST_STEPS or self._seconds < LEAST_SECONDS:
            return None
        load, got, steps = self._meter.read(), self._processor / self._seconds, self._steps
        self._begin()
        is_taken = load is not None and load.others >= OTHERS * self._cores
        share = got / self._threads
        if self._starved == (is_taken and share < (FED if self._starved else STARVED)):
            return None
        self._starved = not self._starved
        return self._line(steps, got, load)

    def _line(self, steps: int, got: float, load: Load | None) -> str:
        threads = f"{self._threads} thread{'s' * (self._threads > 1)}"
        got_of = f"in the last {steps} steps {threads} got {got:.1f} of {self._cores} cores"
        if not self._starved:
            return f"the cores are free again: {got_of}"
        taken = f"other processes use {load.others:.1f} of them" if load else ""
        advice = "; train.threads=1 is often faster then, as threads that share a core wait for each other"
        return f"{got_of}, {taken}{advice if self._threads > 1 else ''}"
