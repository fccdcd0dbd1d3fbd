"""Near-duplicates between the training and the held-out documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unpad.data.sources.split import Split

N = 8  # characters per window; a clause of Chinese, a word or two of English
NEAR = 0.5
MAX_WORST = 10
CHUNK_CHARACTERS = 1 << 22  # bounds memory: about 40 bytes per character of a chunk
FILTER_BITS = 24


@dataclass(frozen=True, slots=True)
class LeakReport:
    """Overlap of the held-out documents with the training documents.

    Args:
        num_exact: held-out documents that are equal to a training document.
        num_near: others with at least half of their 8-character windows in training documents.
        num_declared: held-out documents of a group that is also trained on, on purpose; not in the other counts.
        worst: (index of the document, share of its windows in training), largest first, exact and near ones only.
    """

    num_holdout: int
    num_exact: int
    num_near: int
    num_declared: int
    worst: list[tuple[int, float]]

    def lines(self) -> list[str]:
        """The report as text."""
        head = (
            f"held out {self.num_holdout} documents: {self.num_exact} equal to a trained one, "
            f"{self.num_near} near-duplicates, {self.num_declared} declared phrasings of trained facts"
        )
        return [head, *(f"  document {index}: {share:.0%} of it occurs in training" for index, share in self.worst)]


def report(texts: Sequence[str], split: NDArray[np.uint8], groups: Sequence[str], seed: int) -> LeakReport:
    """Compare every held-out document with all training documents.

    A document shorter than a window counts only when it equals a training document: any short phrase occurs somewhere.

    Args:
        texts: one text per document.
        split: (num_documents,) of `Split`.
        groups: group of each document, or "".
        seed: draws the hash; the result depends on it only through 64-bit collisions.
    """
    held: list[int] = np.flatnonzero(split == Split.HOLDOUT).tolist()
    trained: list[int] = np.flatnonzero(split == Split.TRAIN).tolist()
    trained_texts, trained_groups = {texts[i] for i in trained}, {groups[i] for i in trained} - {""}
    declared = np.fromiter((groups[i] in trained_groups for i in held), bool, len(held))
    exact = np.fromiter((texts[i] in trained_texts for i in held), bool, len(held)) & ~declared
    share = _shares([texts[i] for i in held], [texts[i] for i in trained], seed)
    share[exact] = 1.0
    near = (share >= NEAR) & ~exact & ~declared
    leaks = np.flatnonzero(exact | near)
    worst = leaks[np.lexsort((leaks, -share[leaks]))][:MAX_WORST]
    return LeakReport(
        num_holdout=len(held),
        num_exact=int(exact.sum()),
        num_near=int(near.sum()),
        num_declared=int(declared.sum()),
        worst=[(held[i], round(float(share[i]), 4)) for i in worst],
    )


def _shares(held: Sequence[str], trained: Sequence[str], seed: int) -> NDArray[np.float64]:
    """Share of each held-out text's windows that occur in the training texts, (num_held,); 0 for short texts."""
    multipliers = np.random.default_rng(seed).integers(0, 2**63, 4).astype(np.uint64) * np.uint64(2) + np.uint64(1)
    wanted = np.unique(np.concatenate([grams for grams, _ in _windows(held, multipliers)] or [np.empty(0, np.uint64)]))
    # Most training windows are in no held-out document. A table of the hashes' top bits lets only the few others
    # through to the exact comparison.
    table = np.zeros(1 << FILTER_BITS, bool)
    shift = np.uint64(64 - FILTER_BITS)
    table[wanted >> shift] = True
    found = [np.empty(0, np.uint64)]
    for grams, _ in _windows(trained, multipliers):
        found.append(np.unique(grams[table[grams >> shift]]))
    seen = np.intersect1d(wanted, np.unique(np.concatenate(found)), assume_unique=True)
    shares = []
    for grams, counts in _windows(held, multipliers):
        hits = np.concatenate([[0], np.cumsum(np.isin(grams, seen))])  # (num_windows + 1,)
        ends = np.cumsum(counts)
        shares.append((hits[ends] - hits[ends - counts]) / np.maximum(counts, 1))
    return np.concatenate([np.empty(0), *shares])


def _windows(
    texts: Sequence[str], multipliers: NDArray[np.uint64]
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64]]]:
    """Yield, for one run of texts after another, the hashes of all windows and the number of windows per text."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    starts = np.cumsum(lengths) - lengths
    for chunk in np.unique(starts // CHUNK_CHARACTERS) if len(texts) else ():
        first, last = np.searchsorted(starts, [chunk * CHUNK_CHARACTERS, (chunk + 1) * CHUNK_CHARACTERS])
        run, counts = texts[first:last], np.maximum(lengths[first:last] - N + 1, 0)
        points = np.frombuffer("".join(run).encode("utf-32-le", "surrogatepass"), np.uint32)
        if len(points) < N:
            yield np.empty(0, np.uint64), counts
            continue
        one = points * multipliers[0]
        one ^= one >> np.uint64(32)
        two = one[:-1] * multipliers[1] + one[1:]  # hashes of 2, 4 and 8 characters, each from two halves
        four = two[:-2] * multipliers[2] + two[2:]
        eight = four[:-4] * multipliers[3] + four[4:]  # (num_points - 7,)
        inside = np.ones(len(points), bool)
        for back in range(1, N):  # a window may not begin in the last seven characters of a text
            ends = np.cumsum(lengths[first:last])
            inside[ends[lengths[first:last] >= back] - back] = False
        yield eight[inside[: len(eight)]], counts
