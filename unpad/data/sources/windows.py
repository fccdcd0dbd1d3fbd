"""Hashes of all windows of a few characters of many texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

CHUNK_CHARACTERS = 1 << 22  # bounds memory: about 40 bytes per character of a chunk


def windows(texts: Sequence[str], size: int, seed: int) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64]]]:
    """Yield, for one run of texts after another, the hashes of all windows and the number of windows per text.

    Args:
        size: characters per window, 4 or 8.
        seed: draws the hash.
    """
    multipliers = np.random.default_rng(seed).integers(0, 2**63, 4).astype(np.uint64) * np.uint64(2) + np.uint64(1)
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    starts = np.cumsum(lengths) - lengths
    for chunk in np.unique(starts // CHUNK_CHARACTERS) if len(texts) else ():
        first, last = np.searchsorted(starts, [chunk * CHUNK_CHARACTERS, (chunk + 1) * CHUNK_CHARACTERS])
        run, counts = texts[first:last], np.maximum(lengths[first:last] - size + 1, 0)
        points = np.frombuffer("".join(run).encode("utf-32-le", "surrogatepass"), np.uint32)
        if len(points) < size:
            yield np.empty(0, np.uint64), counts
            continue
        one = points * multipliers[0]
        one ^= one >> np.uint64(32)
        two = one[:-1] * multipliers[1] + one[1:]  # hashes of 2, 4 and 8 characters, each from two halves
        grams = two[:-2] * multipliers[2] + two[2:]
        if size == 8:
            grams = grams[:-4] * multipliers[3] + grams[4:]  # (num_points - 7,)
        inside = np.ones(len(points), bool)
        ends = np.cumsum(lengths[first:last])
        for back in range(1, size):  # a window may not begin in the last characters of a text
            inside[ends[lengths[first:last] >= back] - back] = False
        yield grams[inside[: len(grams)]], counts
