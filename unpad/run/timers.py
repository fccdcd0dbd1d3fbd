"""Wall time of a run, by activity, and the share of the cores that its steps get."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypedDict

from unpad.machine import Load, LoadMeter, cores


class Timing(TypedDict):
    """Wall time of one part of a run; `share` is of the whole run."""

    name: str
    seconds: float
    share: float


def covered_steps(after_step: int, step: int) -> str:
    """Steps of a process that resumed a run at `after_step` and ended at `step`, in words."""
    return f"took steps {after_step + 1:,} to {step:,} of the run" if step > after_step else "took no step of the run"


class Timers:
    """Seconds per named part of a run; a part inside another pauses the outer one, so no second counts twice."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        now = perf_counter()
        if self._open:
            self.totals[self._open[-1]] = self.totals.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    def summary(self, wall: float) -> list[Timing]:
        """Timings of all parts, longest first, and "other" for the rest of `wall` seconds."""
        rows = sorted(self.totals.items(), key=lambda item: -item[1])
        rows.append(("other", max(0.0, wall - sum(self.totals.values()))))
        return [{"name": name, "seconds": seconds, "share": seconds / wall if wall else 0.0} for name, seconds in rows]


FIRST_STEPS, LEAST_STEPS, LEAST_SECONDS = 5, 20, 20.0  # steps ignored at first; steps and seconds per reading
STARVED, FED = 0.6, 0.8  # of the time of all threads
OTHERS = 0.25  # of the cores


class StepShare:
    """Share of the cores that the steps of a run get; reported when other processes begin or stop using them.

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
        """Count a step; returns a line if the share has changed.

        Args:
            seconds: computing time; processor: CPU seconds of all threads of this process meanwhile.
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
