"""Near-duplicates between the training documents and those held out, of the test part or new, and among the documents
of a corpus.

Texts are compared without punctuation, white space, case and the width of characters. A document is a near-duplicate if
half of its windows of 8 characters occur in training documents, or if one training document becomes it with changes to
at most a quarter of its characters.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unpad.data.sources.alike import CHANGED, candidates, changes, plain
from unpad.data.sources.split import Split
from unpad.data.sources.windows import windows
from unpad.errors import SourceError

N = 8  # characters per window; a clause of Chinese, a word or two of English
NEAR = 0.5
MAX_WORST = 10
FILTER_BITS = 24
BLOCK_CHARACTERS = 1 << 24  # of training documents that are compared at a time
NEW = "new data,"
PART_NAMES = {Split.HOLDOUT: "held out", Split.TEST: "test part,"}
PART_ADJECTIVES = {PART_NAMES[Split.HOLDOUT]: "held-out", PART_NAMES[Split.TEST]: "test-part"}


@dataclass(frozen=True, slots=True)
class Leak:
    """A document of another part that occurs in training.

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
    """Overlap of the documents of a part with the training documents.

    Args:
        num_holdout: documents of the part.
        num_exact: those that are equal to a training document.
        num_near: others that are near-duplicates.
        num_declared: documents of a group that is also trained on, on purpose; not in the other counts.
        num_groups: groups of these.
        worst: exact and near ones, the largest share first.
        part: name of the part in reports, of PART_NAMES.
    """

    num_holdout: int
    num_exact: int
    num_near: int
    num_declared: int
    num_groups: int
    worst: list[Leak]
    part: str = PART_NAMES[Split.HOLDOUT]

    def head(self) -> str:
        """The counts as text."""
        return (
            f"{self.part} {self.num_holdout} documents: {self.num_exact} equal to a trained one, "
            f"{self.num_near} near-duplicates, {self.num_declared} declared phrasings of trained facts"
            + (f" ({self.num_groups} groups are on both sides)" if self.num_groups else "")
            + (f"; {len(self.worst)} of them:" if self.num_exact + self.num_near > len(self.worst) > 0 else "")
        )

    def lines(self, places: Sequence[tuple[str, str]]) -> list[str]:
        """The report as text, given the places of the worst leaks and of their training documents."""
        found = [leak.describe(place, source) for leak, (place, source) in zip(self.worst, places, strict=True)]
        return [self.head(), *found]


def refused(part: str, number: int, unit: str, first: str) -> SourceError:
    """Error of `data.near_duplicates` refuse.

    Args:
        part: name of the part, of PART_NAMES; number: its near-duplicates; unit: documents or pictures.
        first: place of one of them and of the training row that it is like.
    """
    fix = "set data.near_duplicates to together or report, or declare the parts of these rows with split"
    what = f"E_LEAK {number:,} {PART_ADJECTIVES[part]} {unit} are near-duplicates of training ones, such as {first}"
    return SourceError(what, where="data.near_duplicates", fix=fix)


def report(
    texts: Sequence[str],
    split: NDArray[np.uint8],
    groups: Sequence[str],
    seed: int,
    part: Split = Split.HOLDOUT,
) -> LeakReport:
    """Compare every document of a part with all training documents.

    Args:
        texts: one text per document.
        split: (num_documents,) of `Split`; documents of other parts take no part.
        groups: group of each document, or "".
        seed: draws the hash; the result depends on it only through 64-bit collisions.
    """
    held: list[int] = np.flatnonzero(split == part).tolist()
    trained: list[int] = np.flatnonzero(split == Split.TRAIN).tolist()
    known = ((i, texts[i], groups[i]) for i in trained)
    chosen = [texts[i] for i in held], [groups[i] for i in held]
    return compare(*chosen, known, seed, PART_NAMES[part], numbers=held)


def compare(
    texts: Sequence[str],
    groups: Sequence[str],
    trained: Iterable[tuple[int, str, str]],
    seed: int,
    part: str,
    *,
    numbers: Sequence[int] | None = None,
) -> LeakReport:
    """Compare documents with training documents that arrive one after the other and are kept a block at a time.

    A document shorter than a window counts only when it equals a training document: any short phrase occurs somewhere.

    Args:
        texts, groups: text and group ("" for none) of each document.
        trained: number, text and group of every training document.
        numbers: of the documents, in the report; default 0, 1 and so on.
    """
    search, trained_groups = _Search(texts, seed), set[str]()
    for block in _blocks(trained, max(BLOCK_CHARACTERS, 4 * sum(map(len, texts)))):
        trained_groups.update(group for _, _, group in block if group)
        search.add([text for _, text, _ in block], [number for number, _, _ in block])
    declared = np.fromiter((group in trained_groups for group in groups), bool, len(groups))
    exact = (search.equal >= 0) & ~declared
    share = search.shares()
    share[exact] = 1.0
    near = ((share >= NEAR) | (search.changed >= 0)) & ~exact & ~declared
    altered = near & (search.changed >= 0) & ((share < NEAR) | (search.changed == 0))
    leaks = np.flatnonzero(exact | near)
    worst = leaks[np.lexsort((leaks, -share[leaks]))][:MAX_WORST]
    return LeakReport(
        num_holdout=len(texts),
        num_exact=int(exact.sum()),
        num_near=int(near.sum()),
        num_declared=int(declared.sum()),
        num_groups=len(trained_groups & set(groups)),
        worst=[
            Leak(
                document=i if numbers is None else numbers[i],
                share=round(float(share[i]), 4),
                source=int(search.equal[i] if exact[i] else search.source[i]),
                num_changed=int(search.changed[i]) if altered[i] else None,
            )
            for i in worst.tolist()
        ],
        part=part,
    )


def _blocks(trained: Iterable[tuple[int, str, str]], most: int) -> Iterator[list[tuple[int, str, str]]]:
    """Runs of documents of about `most` characters together."""
    block, size = list[tuple[int, str, str]](), 0
    for document in trained:
        block.append(document)
        size += len(document[1])
        if size >= most:
            yield block
            block, size = [], 0
    if block:
        yield block


class _Search:
    """Search for documents in training documents, which are added block by block.

    Args:
        texts: the documents.

    Attributes:
        equal: number of the first training document that is equal to each, (num_texts,) int64, -1 without one.
        source: number of the one that has most of it, or of which it is an altered copy, -1 without one.
        changed: number of changed characters of an altered copy, -1 otherwise.
    """

    def __init__(self, texts: Sequence[str], seed: int) -> None:
        self.texts, self.plain, self.seed = texts, [plain(text) for text in texts], seed
        self.equal, self.source, self.changed, self._votes = (np.full(len(texts), -1, np.int64) for _ in range(4))
        self._first = dict.fromkeys(texts, -1)
        nothing = np.empty(0, np.uint64)
        self._wanted = np.unique(np.concatenate([nothing, *(grams for grams, _ in windows(self.plain, N, seed))]))
        self._seen = nothing
        # Most training windows are in no document that is looked for. A table of the hashes' top bits lets only the few
        # others through to the exact comparison.
        self._table, self._shift = np.zeros(1 << FILTER_BITS, bool), np.uint64(64 - FILTER_BITS)
        self._table[self._wanted >> self._shift] = True

    def add(self, texts: Sequence[str], numbers: Sequence[int]) -> None:
        """Look for the documents in further training documents.

        Args:
            numbers: of these training documents.
        """
        for text, number in zip(texts, numbers, strict=True):
            if self._first.get(text) == -1:
                self._first[text] = number
        self.equal = np.fromiter((self._first[text] for text in self.texts), np.int64, len(self.texts))
        ours, found = [plain(text) for text in texts], [self._seen]
        for grams, _ in windows(ours, N, self.seed):
            found.append(np.intersect1d(grams[self._table[grams >> self._shift]], self._wanted))
        self._seen = np.unique(np.concatenate(found))
        for one, other, num_shared in candidates(self.plain, ours, self.seed):
            if self.equal[one] >= 0:
                continue
            number = _changes(self.plain[one], ours[other])
            if number >= 0 and (self.changed[one] < 0 or number < self.changed[one]):
                self.source[one], self.changed[one] = numbers[other], number
            elif self.changed[one] < 0 and num_shared > self._votes[one]:
                self.source[one], self._votes[one] = numbers[other], num_shared

    def shares(self) -> NDArray[np.float64]:
        """Share of each document's windows that occur in training documents, (num_texts,); 0 for short ones."""
        shares = [np.empty(0)]
        for grams, counts in windows(self.plain, N, self.seed):
            hits = np.concatenate([[0], np.cumsum(np.isin(grams, self._seen))])  # (num_windows + 1,)
            ends = np.cumsum(counts)
            shares.append((hits[ends] - hits[ends - counts]) / np.maximum(counts, 1))
        return np.concatenate(shares)


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
