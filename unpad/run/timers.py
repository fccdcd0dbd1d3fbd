"""Wall time of a run, by activity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any


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

    def summary(self, wall: float) -> list[dict[str, Any]]:
        """Rows {"name", "seconds", "share"}, longest first, and "other" for what of `wall` seconds no timer saw."""
        rows = sorted(self.totals.items(), key=lambda item: -item[1])
        rows.append(("other", max(0.0, wall - sum(self.totals.values()))))
        return [{"name": name, "seconds": seconds, "share": seconds / wall if wall else 0.0} for name, seconds in rows]
