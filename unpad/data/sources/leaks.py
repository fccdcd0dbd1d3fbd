"""Near-duplicates between the training and the held-out documents, and among the documents of a corpus.

Texts are compared without punctuation, white space, case and the width of characters. A held-out document is a
near-duplicate if half of its windows of 8 characters occur in training documents, or if one training document becomes
it with changes to at most a quarter of its characters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unpad.data.sources.alike import CHANGED, candidates, changes, plain
from unpad.data.sources.split import Split, groups_on_both_sides, numbered
from unpad.data.sources.windows import windows

N = 8  # characters per window; a clause of Chinese, a word or two of English
NEAR = 0.5
MAX_WORST = 10
FILTER_BITS = 24


@dataclass(frozen=True, slots=True)
class Leak:
    """A held-out document that occurs in training.

    Args:
        document: its index.
        share: of its windows that occur in training documents; 1 for an equal one.
        source: index of the training document that has most of it; -1 if it is spread over many.
        num_changed: characters by which it differs from `source` apart from punctuation, if it is an altered copy.
    """

    document: int
    share: float
    source: int
    num_changed: int | None

    def describe(self, place: str, source: str) -> str:
        """Line of a report, given the places of both documents; an empty `source` is left out."""
        if self.num_changed is not None:
            unit = "character" if self.num_changed == 1 else "characters"
            what = f"{self.num_changed} {unit} changed" if self.num_changed else "another punctuation or width"
            return f"  {place}: {source} with {what}"
        return f"  {place}: {self.share:.0%} of it occurs in training" + (f", most of it in {source}" if source else "")


@dataclass(frozen=True, slots=True)
class LeakReport:
    """Overlap of the held-out documents with the training documents.

    Args:
        num_exact: held-out documents that are equal to a training document.
        num_near: others that are near-duplicates.
        num_declared: held-out documents of a group that is also trained on, on purpose; not in the other counts.
        num_groups: groups of these.
        worst: exact and near ones, the largest share first.
    """

    num_holdout: int
    num_exact: int
    num_near: int
    num_declared: int
    num_groups: int
    worst: list[Leak]

    def head(self) -> str:
        """The counts as text."""
        return (
            f"held out {self.num_holdout} documents: {self.num_exact} equal to a trained one, "
            f"{self.num_near} near-duplicates, {self.num_declared} declared phrasings of trained facts"
            + (f" ({self.num_groups} groups are on both sides)" if self.num_groups else "")
            + (f"; {len(self.worst)} of them:" if self.num_exact + self.num_near > len(self.worst) > 0 else "")
        )


def report(texts: Sequence[str], split: NDArray[np.uint8], groups: Sequence[str], seed: int) -> LeakReport:
    """Compare every held-out document with all training documents.

    A document shorter than a window counts only when it equals a training document: any short phrase occurs somewhere.

    Args:
        texts: one text per document.
        split: (num_documents,) of `Split`; documents of TEST take no part.
        groups: group of each document, or "".
        seed: draws the hash; the result depends on it only through 64-bit collisions.
    """
    held: list[int] = np.flatnonzero(split == Split.HOLDOUT).tolist()
    trained: list[int] = np.flatnonzero(split == Split.TRAIN).tolist()
    trained_groups = {groups[i] for i in trained} - {""}
    declared = np.fromiter((groups[i] in trained_groups for i in held), bool, len(held))
    first: dict[str, int] = {}
    for i in reversed(trained):
        first[texts[i]] = i
    equal = np.fromiter((first.get(texts[i], -1) for i in held), np.int64, len(held))
    exact = (equal >= 0) & ~declared
    theirs, ours = [plain(texts[i]) for i in held], [plain(texts[i]) for i in trained]
    share = _shares(theirs, ours, seed)
    share[exact] = 1.0
    source, num_changed = _sources(theirs, ours, ~exact & ~declared, seed)
    near = ((share >= NEAR) | (num_changed >= 0)) & ~exact & ~declared
    altered = near & (num_changed >= 0) & ((share < NEAR) | (num_changed == 0))
    leaks = np.flatnonzero(exact | near)
    worst = leaks[np.lexsort((leaks, -share[leaks]))][:MAX_WORST]
    sides = split[split != Split.TEST]
    return LeakReport(
        num_holdout=len(held),
        num_exact=int(exact.sum()),
        num_near=int(near.sum()),
        num_declared=int(declared.sum()),
        num_groups=groups_on_both_sides(numbered(groups)[split != Split.TEST], sides),
        worst=[
            Leak(
                document=held[i],
                share=round(float(share[i]), 4),
                source=int(equal[i]) if exact[i] else trained[source[i]] if source[i] >= 0 else -1,
                num_changed=int(num_changed[i]) if altered[i] else None,
            )
            for i in worst.tolist()
        ],
    )


def near_pairs(texts: Sequence[str], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tie near-duplicates among documents together, for `split.assign`.

    Two documents are near-duplicates if half of the windows of the shorter one occur in the other, or if one becomes
    the other with changes to at most a quarter of its characters.

    Returns:
        Documents and keys, of equal length: documents with a common key are near-duplicates.
    """
    every = [plain(text) for text in texts]
    left, right = [], []
    for one, other, _ in candidates(every, every, seed):
        if one < other and (_changes(every[one], every[other]) >= 0 or _contained(every[one], every[other])):
            left.append(one)
            right.append(other)
    pairs = np.arange(len(left))
    return np.array(left + right, np.int64), np.concatenate([pairs, pairs])


def _sources(
    held: Sequence[str], trained: Sequence[str], asked: NDArray[np.bool_], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For every held-out text the training text that has most of it, or of which it is an altered copy.

    Args:
        asked: (num_held,) texts to look for.

    Returns:
        Index into `trained`, -1 without one; and the number of changed characters, -1 if it is no altered copy.
    """
    source, changed, votes = (np.full(len(held), -1, np.int64) for _ in range(3))
    for one, other, num_shared in candidates(held, trained, seed):
        if not asked[one]:
            continue
        number = _changes(held[one], trained[other])
        if number >= 0 and (changed[one] < 0 or number < changed[one]):
            source[one], changed[one] = other, number
        elif changed[one] < 0 and num_shared > votes[one]:
            source[one], votes[one] = other, num_shared
    return source, changed


def _changes(one: str, other: str) -> int:
    """Number of characters in which two texts differ; -1 if it is more than a quarter of the longer one, or if one is
    shorter than a window without being equal."""
    if one == other:
        return 0
    most = int(CHANGED * max(len(one), len(other)))
    if min(len(one), len(other)) < N or abs(len(one) - len(other)) > most:
        return -1
    number = changes(one, other)
    return number if number <= most else -1


def _contained(one: str, other: str) -> bool:
    """True if half of the windows of the shorter text occur in the other."""
    short, long = sorted((one, other), key=len)
    parts = [short[i : i + N] for i in range(len(short) - N + 1)]
    return bool(parts) and sum(part in long for part in parts) >= NEAR * len(parts)


def _shares(held: Sequence[str], trained: Sequence[str], seed: int) -> NDArray[np.float64]:
    """Share of each held-out text's windows that occur in the training texts, (num_held,); 0 for short texts."""
    wanted = np.unique(np.concatenate([grams for grams, _ in windows(held, N, seed)] or [np.empty(0, np.uint64)]))
    # Most training windows are in no held-out document. A table of the hashes' top bits lets only the few others
    # through to the exact comparison.
    table = np.zeros(1 << FILTER_BITS, bool)
    shift = np.uint64(64 - FILTER_BITS)
    table[wanted >> shift] = True
    found = [np.empty(0, np.uint64)]
    for grams, _ in windows(trained, N, seed):
        found.append(np.unique(grams[table[grams >> shift]]))
    seen = np.intersect1d(wanted, np.unique(np.concatenate(found)), assume_unique=True)
    shares = []
    for grams, counts in windows(held, N, seed):
        hits = np.concatenate([[0], np.cumsum(np.isin(grams, seen))])  # (num_windows + 1,)
        ends = np.cumsum(counts)
        shares.append((hits[ends] - hits[ends - counts]) / np.maximum(counts, 1))
    return np.concatenate([np.empty(0), *shares])
