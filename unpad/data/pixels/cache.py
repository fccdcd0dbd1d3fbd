"""Decoded pixels or patches of images, kept in memory while they fit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class PixelCache:
    """Cache of patches or pixels of images, up to `most_bytes`."""

    most_bytes: int
    used: int = 0
    made: dict[int, np.ndarray] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, image: int, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the cached values of an image; `make` them if they are missing."""
        known = self.made.get(image)
        if known is not None:
            return known
        values = make()
        with self.lock:
            if image not in self.made and self.used + values.nbytes <= self.most_bytes:
                self.made[image] = values
                self.used += values.nbytes
        return values
