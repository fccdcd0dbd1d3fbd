"""Texts as they are compared with each other, and hashes of their short passages."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

CHUNK_CHARACTERS = 1 << 20  # bounds memory: about 100 bytes per character of a chunk
PASSAGE = 15  # letters of a window, about three words; other characters count as the letters that they stand for
SHORTEST = 24  # letters of a text that has windows: shorter ones are phrases that occur anywhere
IDEOGRAPH, SYLLABLE = 3, 2  # letters that a character stands for
_SCRIPTS = (
    (IDEOGRAPH, ((0x2190, 0x2BFF), (0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x1F000, 0x1FAFF), (0x20000, 0x3FFFF))),
    (SYLLABLE, ((0x1200, 0x137F), (0x3040, 0x30FF), (0x31F0, 0x31FF), (0xA000, 0xA4CF), (0xAC00, 0xD7A3))),
)  # Han and pictographs; Ethiopic, kana, Yi and Hangul


class _Plain(dict[int, int | None]):
    """Table for `str.translate` that drops punctuation, separators and control characters."""

    def __missing__(self, point: int) -> int | None:
        letter = None if unicodedata.category(chr(point))[0] in "PZC" else point
        self[point] = letter
        return letter


_PLAIN = _Plain()


def plain(text: str) -> str:
    """A text without punctuation, white space, case and the width of characters (Unicode NFKC); one of nothing else
    stays as it is."""
    return unicodedata.normalize("NFKC", text).casefold().translate(_PLAIN) or text


def windows(texts: Sequence[str]) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64]]]:
    """Yield, for one run of texts after another, the different windows of each text.

    A window is the shortest run of characters from any place of a text that stands for PASSAGE letters. A text of less
    than SHORTEST has none.

    Yields:
        Hash of each window, and the index of its text; in order of both, the index first.
    """
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    starts = np.cumsum(lengths) - lengths
    for chunk in np.unique(starts // CHUNK_CHARACTERS) if len(texts) else ():
        first, last = np.searchsorted(starts, [chunk * CHUNK_CHARACTERS, (chunk + 1) * CHUNK_CHARACTERS])
        hashes, owner = _of_run(texts[first:last], lengths[first:last])
        yield hashes, owner + first


def _of_run(texts: Sequence[str], lengths: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    points = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    ends = np.cumsum(lengths)
    letters = np.concatenate([[0], np.cumsum(_letters()[points], dtype=np.int64)])  # (num_points + 1,)
    long = letters[ends] - letters[ends - lengths] >= SHORTEST
    stop = np.searchsorted(letters, letters[:-1] + PASSAGE)  # first place after the window of each place
    begin = np.flatnonzero((stop <= np.repeat(ends, lengths)) & np.repeat(long, lengths))
    owner = np.repeat(np.arange(len(texts)), lengths)[begin]
    # A polynomial of the characters modulo 2^64: the hash of a window is the difference of two running sums,
    # divided by the power of its first place.
    base = 0x2545F4914F6CDD1D
    powers, inverses = (np.cumprod(np.full(len(points), factor, np.uint64)) for factor in (base, pow(base, -1, 2**64)))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mix(points.astype(np.uint64)) * powers)])
    hashes = _mix((sums[stop[begin]] - sums[begin]) * inverses[begin])
    order = np.lexsort((hashes, owner))
    hashes, owner = hashes[order], owner[order]
    new = np.ones(len(hashes), np.bool_)
    new[1:] = (hashes[1:] != hashes[:-1]) | (owner[1:] != owner[:-1])
    return hashes[new], owner[new]


@lru_cache(maxsize=1)
def _letters() -> NDArray[np.uint8]:
    """Letters that every code point stands for."""
    table = np.ones(0x110000, np.uint8)
    for number, ranges in _SCRIPTS:
        for first, last in ranges:
            table[first : last + 1] = number
    return table


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele et al. 2014, "Fast splittable pseudorandom number generators")."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
