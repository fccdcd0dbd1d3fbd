"""Texts that may be altered copies of each other, and the number of characters that were changed."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from unpad.data.sources.windows import windows

CHANGED = 0.25  # largest share of changed characters of a copy
WINDOW = 4  # of any five neighbours of a copy's characters four are unchanged somewhere
NUM_CANDIDATES = 4
COMMON = (1024, 64)  # windows in more texts than this say nothing; the second where the first makes too many pairs
MOST_PAIRS = 1 << 24
BLOCK = 1 << 22  # pairs that are looked at together


class _Plain(dict[int, int | None]):
    """Table for `str.translate` that drops punctuation, separators and control characters."""

    def __missing__(self, point: int) -> int | None:
        kept = None if unicodedata.category(chr(point))[0] in "PZC" else point
        self[point] = kept
        return kept


_PLAIN = _Plain()


def plain(text: str) -> str:
    """A text without punctuation, white space, case and the width of characters (Unicode NFKC)."""
    return unicodedata.normalize("NFKC", text).casefold().translate(_PLAIN)


def changes(one: str, other: str) -> int:
    """Least number of characters to replace, insert or delete that turns one text into the other.

    Hyyro (2003), "A bit-vector algorithm for computing Levenshtein and Damerau edit distances", after Myers (1999).
    """
    if not one:
        return len(other)
    places: dict[str, int] = {}
    for index, character in enumerate(one):
        places[character] = places.get(character, 0) | 1 << index
    whole, last = (1 << len(one)) - 1, 1 << (len(one) - 1)
    up, down, distance = whole, 0, len(one)
    for character in other:
        match = places.get(character, 0)
        diagonal = (((match & up) + up) ^ up) | match | down
        more, less = down | ~(diagonal | up) & whole, up & diagonal
        distance += bool(more & last) - bool(less & last)
        more = more << 1 | 1
        up = (less << 1 | ~(diagonal | more)) & whole
        down = more & diagonal & whole
    return distance


def candidates(texts: Sequence[str], others: Sequence[str], seed: int) -> Iterator[tuple[int, int, int]]:
    """Yield pairs of texts that share uncommon windows of four characters, for every text those that share most.

    A text and its altered copy share one as long as four characters in a row are unchanged. Equal indices of one list
    given twice are not paired.

    Yields:
        Index into `texts`, index into `others`, number of shared windows.
    """
    wanted = np.unique(np.concatenate([grams for grams, _ in windows(texts, WINDOW, seed)] or [np.empty(0, np.uint64)]))
    if not wanted.size:
        return
    gram, text = _occurrences(texts, wanted, seed)
    found, other = (gram, text) if others is texts else _occurrences(others, wanted, seed)
    order = np.argsort(found, kind="stable")
    found, other = found[order], other[order]
    counts = np.bincount(found, minlength=len(wanted))
    starts = np.cumsum(counts) - counts
    pairs = counts[gram]
    most = COMMON[0] if pairs[pairs <= COMMON[0]].sum() <= MOST_PAIRS else COMMON[1]
    used = np.flatnonzero((pairs > 0) & (pairs <= most))
    order = used[np.argsort(text[used], kind="stable")]
    gram, text, pairs = gram[order], text[order], pairs[order]
    begins = np.flatnonzero(np.diff(text, prepend=-1))
    totals = np.cumsum(np.add.reduceat(pairs, begins)) if len(begins) else pairs
    for block in np.split(np.arange(len(begins)), np.flatnonzero(np.diff(totals // BLOCK)) + 1) if len(begins) else ():
        stop = begins[block[-1] + 1] if block[-1] + 1 < len(begins) else len(text)
        yield from _best(
            gram[begins[block[0]] : stop], text[begins[block[0]] : stop], counts, starts, other, others is texts
        )


def _occurrences(
    texts: Sequence[str], wanted: NDArray[np.uint64], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every different wanted window of every text: its index in `wanted`, which is sorted, and that of the text."""
    grams, members, first = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for hashes, counts in windows(texts, WINDOW, seed):
        place = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
        known = wanted[place] == hashes
        member = np.repeat(np.arange(first, first + len(counts)), counts)[known]
        both = np.unique(member * len(wanted) + place[known])
        grams.append(both % len(wanted))
        members.append(both // len(wanted))
        first += len(counts)
    return np.concatenate(grams), np.concatenate(members)


def _best(
    gram: NDArray[np.int64],
    text: NDArray[np.int64],
    counts: NDArray[np.int64],
    starts: NDArray[np.int64],
    other: NDArray[np.int64],
    same: bool,
) -> Iterator[tuple[int, int, int]]:
    """Yield for some texts the others that share most of their windows; see `candidates`."""
    each = counts[gram]
    within = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    partner, mine = other[np.repeat(starts[gram], each) + within], np.repeat(text, each)
    width = int(other.max(initial=0)) + 1
    pair, votes = np.unique(mine * width + partner, return_counts=True)
    one, two = pair // width, pair % width
    if same:
        kept = one != two
        one, two, votes = one[kept], two[kept], votes[kept]
    order = np.lexsort((two, -votes, one))
    one, two, votes = one[order], two[order], votes[order]
    rank = np.arange(len(one)) - np.searchsorted(one, one)
    chosen = rank < NUM_CANDIDATES
    yield from zip(one[chosen].tolist(), two[chosen].tolist(), votes[chosen].tolist(), strict=True)
