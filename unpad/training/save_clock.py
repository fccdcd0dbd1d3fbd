"""Clock of the checkpoints that are due by time."""

from __future__ import annotations

import time


class SaveClock:
    """Time since the last checkpoint of this process.

    Args:
        every_seconds: time between checkpoints; None for checkpoints by steps alone.
    """

    def __init__(self, every_seconds: float | None) -> None:
        self._every, self._saved_at = every_seconds, time.monotonic()

    def due(self) -> bool:
        """True if the next step is to be followed by a checkpoint."""
        return self._every is not None and time.monotonic() - self._saved_at >= self._every

    def saved(self) -> None:
        """Begin anew after a checkpoint."""
        self._saved_at = time.monotonic()
