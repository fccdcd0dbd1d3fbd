"""Texts before which an answer ends, looked for while it appears; several users read it (apart: pieces come and go)."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Text up to the one of `stops` that is complete first, also across pieces; a start of a stop is held back.

    `found` is True once one has occurred; nothing is pushed then.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._waiting = ""
        self.found = False

    def push(self, piece: str) -> str:
        """Add a piece, and return the text that is certain to come before any stop."""
        waiting = self._waiting + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := waiting.find(stop)) >= 0]
        if ends:
            self.found, self._waiting = True, ""
            return waiting[: min(ends)[1]]
        starts = (n for stop in self._stops for n in range(1, len(stop)) if waiting.endswith(stop[:n]))
        keep = len(waiting) - max(starts, default=0)
        self._waiting = waiting[keep:]
        return waiting[:keep]

    def rest(self) -> str:
        """The text that was held back, when nothing follows."""
        rest, self._waiting = self._waiting, ""
        return rest
