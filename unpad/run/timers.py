"""Wall time of a run, by activity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypedDict


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
