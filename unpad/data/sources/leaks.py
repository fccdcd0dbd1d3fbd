"""Near-duplicates of training documents among those held out, of the test part or new, by the short passages that they
share.

Two texts are near-duplicates if they are equal as `plain` has them, or if the windows that both have weigh at least as
much as those that the shorter one has alone. A window that k different texts of the corpus have weighs 1 / log2(k), and
one that the other text lacks 1; one of more than MOST_TEXTS counts for nothing. So a copy shares half of the shorter
text, and a signature, a disclaimer or the form of a question, which many texts share, makes no copies.
"""

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unpad.data.sources.split import Ints, Split, components, mixed
from unpad.errors import SourceError
from unpad.terminal.table import number_of

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


def windows(texts: Sequence[str]) -> Iterator[tuple[NDArray[np.uint64], Ints]]:
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


def _of_run(texts: Sequence[str], lengths: Ints) -> tuple[NDArray[np.uint64], Ints]:
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
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed(points.astype(np.uint64)) * powers)])
    hashes = mixed((sums[stop[begin]] - sums[begin]) * inverses[begin])
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


MOST_TEXTS = 64
WHOLE = 1 << 16  # weight of a window that only the two texts have; whole numbers add up to the same in any order
FILTER_BITS = 24
BLOCK = 1 << 22  # rows of pairs that are looked at together


@dataclass(frozen=True, slots=True)
class Near:
    """Near-duplicates of one text among others.

    Args:
        text: index of the text; other: index of the near-duplicate.
        share: share of the shorter one's windows that the other has too.
        equal: whether they are equal as `plain` has them.
    """

    text: int
    other: int
    share: float
    equal: bool


class TextSearch:
    """Search for texts among others, block by block: first `count` all documents of the corpus, then `match` those that
    they are compared with.

    Args:
        texts: as `plain` has them, all different.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._place = {text: index for index, text in enumerate(texts)}
        assert len(self._place) == len(texts), "texts are different"
        hashes, owner = _all_windows(texts)
        self._wanted, gram = np.unique(hashes, return_inverse=True)
        self._num_texts = len(texts)
        order = np.argsort(gram, kind="stable")
        self._gram, self._owner = gram[order].astype(np.int64), owner[order]
        self._counts = np.zeros(len(self._wanted), np.int64)
        self._seen: set[int] = set()
        # Most windows of a corpus are in no text that is looked for. A table of the hashes' top bits lets only the few
        # others through to the exact comparison.
        self._table, self._shift = np.zeros(1 << FILTER_BITS, np.bool_), np.uint64(64 - FILTER_BITS)
        self._table[self._wanted >> self._shift] = True

    def count(self, texts: Sequence[str]) -> None:
        """Count the windows of further documents, each different text once."""
        new = [text for text in dict.fromkeys(texts) if hash(text) not in self._seen]
        self._seen.update(map(hash, new))
        for hashes, owner in windows(new):
            gram, _ = self._known(hashes, owner)
            self._counts += np.bincount(gram, minlength=len(self._counts))

    def match(self, texts: Sequence[str]) -> Iterator[Near]:
        """Yield the near-duplicates of the texts among documents that were counted; `other` is an index of these."""
        for other, text in enumerate(texts):
            if text in self._place:
                yield Near(self._place[text], other, 1.0, equal=True)
        first: dict[str, int] = {}
        for other, text in enumerate(texts):
            first.setdefault(text, other)
        hashes, owner = _all_windows(list(first))
        sizes = np.bincount(owner, minlength=len(first))
        gram, owner = self._known(hashes, owner)
        numbers = list(first.values())
        for one, other, share in self._pairs(gram, owner, sizes):
            if self._place.get(texts[numbers[other]]) != one:
                yield Near(one, numbers[other], share, equal=False)

    def _known(self, hashes: NDArray[np.uint64], owner: Ints) -> tuple[Ints, Ints]:
        """Those of some windows that the texts have: index in `_wanted`, and text."""
        is_known = self._table[hashes >> self._shift]
        hashes, owner = hashes[is_known], owner[is_known]
        place = np.minimum(np.searchsorted(self._wanted, hashes), max(len(self._wanted) - 1, 0))
        known = self._wanted[place] == hashes if len(self._wanted) else np.zeros(len(hashes), np.bool_)
        return place[known], owner[known]

    def _pairs(self, gram: Ints, owner: Ints, sizes: Ints) -> Iterator[tuple[int, int, float]]:
        """Yield near-duplicates by their windows: text, other and share.

        Args:
            gram, owner: windows of the others, in order of `owner`.
            sizes: number of windows of each of the others.
        """
        # A window of too many texts counts on neither side.
        few = self._counts <= MOST_TEXTS
        num_windows = np.bincount(self._owner[few[self._gram]], minlength=self._num_texts)
        sizes = sizes - np.bincount(owner[~few[gram]], minlength=len(sizes))
        rare = few & (self._counts > 1)
        mine = np.bincount(self._gram[rare[self._gram]], minlength=len(self._counts))  # texts that have each window
        starts = np.searchsorted(self._gram, np.arange(len(self._counts)))
        gram, owner = gram[rare[gram]], owner[rare[gram]]
        weights = np.rint(WHOLE / np.log2(np.maximum(self._counts, 2))).astype(np.int64)
        for rows in _blocks(owner, mine[gram]):
            each = mine[gram[rows]]
            text = self._owner[_runs(starts[gram[rows]], each)]
            pair = np.repeat(owner[rows], each) * self._num_texts + text
            pair, row, shared = np.unique(pair, return_inverse=True, return_counts=True)
            weight = np.bincount(row, np.repeat(weights[gram[rows]], each), len(pair)).astype(np.int64)
            other, text = pair // self._num_texts, pair % self._num_texts
            size = np.minimum(sizes[other], num_windows[text])
            near = weight >= WHOLE * (size - shared)
            share = shared[near] / size[near]
            yield from zip(text[near].tolist(), other[near].tolist(), share.tolist(), strict=True)


def near_sets(texts: Sequence[str]) -> Ints:
    """Number the sets of texts that are near-duplicates of each other, directly or through others, (num_texts,)."""
    place: dict[str, int] = {}
    number = np.array([place.setdefault(plain(text), len(place)) for text in texts], np.int64)
    different = list(place)
    search = TextSearch(different)
    search.count(different)
    ends = np.array([(near.text, near.other) for near in search.match(different)], np.int64).reshape(-1, 2)
    pairs = np.repeat(np.arange(len(ends)), 2)
    return components(len(different), [(ends.reshape(-1), pairs)])[number]


def _all_windows(texts: Sequence[str]) -> tuple[NDArray[np.uint64], Ints]:
    parts = [(np.zeros(0, np.uint64), np.zeros(0, np.int64)), *windows(texts)]
    return np.concatenate([hashes for hashes, _ in parts]), np.concatenate([owner for _, owner in parts])


def _runs(starts: Ints, sizes: Ints) -> Ints:
    """Places from each start on, as many as its size, one run after the other."""
    return np.repeat(starts - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())


def _blocks(owner: Ints, costs: Ints) -> Iterator[Ints]:
    """Cut rows in order of `owner` into runs of about BLOCK costs, between owners."""
    totals = np.cumsum(costs)
    begins = np.flatnonzero(np.diff(owner, prepend=-1))
    if not len(begins):
        return
    at = np.unique(np.concatenate([[0], begins[np.flatnonzero(np.diff(totals[begins] // BLOCK)) + 1], [len(owner)]]))
    for first, last in zip(at[:-1].tolist(), at[1:].tolist(), strict=True):
        yield np.arange(first, last)


# --------------------------------------------------------------------------- training documents against others


MAX_WORST = 10
BLOCK_CHARACTERS = 1 << 24  # of training documents that are compared at a time
NEW = "new data,"
PART_NAMES = {Split.HOLDOUT: "held out", Split.TEST: "test part,"}
PART_ADJECTIVES = {PART_NAMES[Split.HOLDOUT]: "held-out", PART_NAMES[Split.TEST]: "test-part"}


@dataclass(frozen=True, slots=True)
class Leak:
    """A document of another part that is equal to a training document or a near-duplicate of one.

    Args:
        document: its index.
        source: index of the training document.
        how: equal; alike: equal apart from what `plain` drops; copy: so to an augmented copy of the training document;
            shares: they have `share` of the shorter text in common.
        share: share of the shorter text's windows that the other has too.
    """

    document: int
    source: int
    how: Literal["equal", "alike", "copy", "shares"]
    share: float

    def describe(self, place: str, source: str) -> str:
        """Line of a report, given the places of both documents."""
        if self.how == "equal":
            return f"  {place}: equal to {source}"
        if self.how == "alike":
            return f"  {place}: equal to {source} but for punctuation, spaces, case or width"
        if self.how == "copy":
            return f"  {place}: equal to an augmented copy of {source}"
        return f"  {place}: has {self.share:.0%} of the shorter text in common with {source}"


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
        places: of the worst, in their order, and of their training documents.
    """

    num_holdout: int
    num_exact: int
    num_near: int
    num_declared: int
    num_groups: int
    worst: list[Leak]
    part: str = PART_NAMES[Split.HOLDOUT]
    places: list[tuple[str, str]] = field(default_factory=list)

    def head(self) -> str:
        """The counts as text."""
        return (
            f"{self.part} {number_of(self.num_holdout, 'documents')}: {self.num_exact} equal to a trained one, "
            f"{number_of(self.num_near, 'near-duplicates')}"
            + (f", {number_of(self.num_declared, 'declared phrasings')} of trained facts" if self.num_declared else "")
            + (f" ({number_of(self.num_groups, 'groups')} on both sides)" if self.num_groups else "")
            + (f"; {len(self.worst)} of them:" if self.num_exact + self.num_near > len(self.worst) > 0 else "")
        )

    def lines(self) -> list[str]:
        """The report as text, once the places are known."""
        worst = [leak.describe(*places) for leak, places in zip(self.worst, self.places, strict=True)]
        return [self.head(), *worst, *([f"  do: {advice(self.part)}"] if worst else [])]


def advice(part: str) -> str:
    """Advice on near-duplicates of training rows in a part, of PART_NAMES or NEW."""
    if part == NEW:
        return "leave these rows out of the new data, or read its figures as those of rows that training has seen"
    return "set data.near_duplicates=together; if rows of both parts declare theirs with split, correct or remove these"


def refused(part: str, number: int, unit: str, first: str, fix: str = "") -> SourceError:
    """Error of `data.near_duplicates` refuse.

    Args:
        part: name of the part, of PART_NAMES; number: its near-duplicates; unit: documents or pictures.
        first: place of one of them and of the training row that it is like.
        fix: by default the advice.
    """
    what = f"E_LEAK {number:,} {PART_ADJECTIVES[part]} {unit} are near-duplicates of training ones, such as {first}"
    return SourceError(what, where="data.near_duplicates", fix=fix or advice(part))


@dataclass(frozen=True, slots=True)
class Document:
    """A document of the corpus: its index, text, group ("" for none), and whether it is of the training part."""

    number: int
    text: str
    group: str
    trained: bool


def report(
    texts: Sequence[str],
    split: NDArray[np.uint8],
    groups: Sequence[str],
    part: Split = Split.HOLDOUT,
    copies: Mapping[str, int] | None = None,
) -> LeakReport:
    """Compare every document of a part with all training documents.

    Args:
        texts: one text per document of the corpus.
        split: (num_documents,) of `Split`.
        groups: group of each document, or "".
        copies: augmented copies as `plain` has them -> index of their document.
    """
    held: list[int] = np.flatnonzero(split == part).tolist()
    trained: list[bool] = (split == Split.TRAIN).tolist()

    def corpus() -> Iterator[Document]:
        return map(Document, range(len(texts)), texts, groups, trained)

    chosen = [texts[i] for i in held], [groups[i] for i in held]
    return compare(*chosen, corpus, PART_NAMES[part], numbers=held, copies=copies)


def compare(
    texts: Sequence[str],
    groups: Sequence[str],
    corpus: Callable[[], Iterable[Document]],
    part: str,
    *,
    numbers: Sequence[int] | None = None,
    copies: Mapping[str, int] | None = None,
) -> LeakReport:
    """Compare documents with the training documents of a corpus, which is read twice, a block at a time.

    Args:
        texts, groups: text and group ("" for none) of each document.
        corpus: reads all documents from the start; how many have a passage decides what the passage weighs.
        numbers: numbers of the documents in the report; default 0, 1 and so on.
        copies: as of `report`.
    """
    plains = list(map(plain, texts))
    different = list(dict.fromkeys(plains))
    search, place = TextSearch(different), {text: index for index, text in enumerate(different)}
    search.count(different)
    for block in _document_blocks(corpus()):
        search.count([plain(document.text) for document in block])
    equal, nearest, trained_groups = dict.fromkeys(texts, -1), dict[int, tuple[float, int]](), set[str]()
    for block in _document_blocks(document for document in corpus() if document.trained):
        for document in block:
            trained_groups.add(document.group)
            if equal.get(document.text) == -1:
                equal[document.text] = document.number
        for near in search.match([plain(document.text) for document in block]):  # of equal shares the first row
            mine = near.share + near.equal, -block[near.other].number
            nearest[near.text] = max(nearest.get(near.text, mine), mine)
    trained_groups.discard("")
    leaks = []
    for index, (text, same) in enumerate(zip(texts, plains, strict=True)):
        if groups[index] not in trained_groups:
            number, copied = index if numbers is None else numbers[index], (copies or {}).get(same)
            leaks += _leaks(number, equal[text], nearest.get(place[same]), copied)
    order = "equal", "alike", "copy", "shares"
    worst = sorted(leaks, key=lambda leak: (order.index(leak.how), -leak.share, leak.document))
    num_exact = sum(leak.how == "equal" for leak in leaks)
    return LeakReport(
        num_holdout=len(texts),
        num_exact=num_exact,
        num_near=len(leaks) - num_exact,
        num_declared=sum(group in trained_groups for group in groups),
        num_groups=len(trained_groups & set(groups)),
        worst=worst[:MAX_WORST],
        part=part,
    )


def _leaks(number: int, equal: int, nearest: tuple[float, int] | None, copied: int | None) -> list[Leak]:
    """The leak of a document, given the documents that it is equal to, nearest to, and equal to a copy of; or none."""
    if equal >= 0:
        return [Leak(number, equal, "equal", 1.0)]
    if nearest is not None:
        score, source = nearest
        return [Leak(number, -source, "alike" if score > 1 else "shares", round(min(score, 1.0), 4))]
    return [] if copied is None else [Leak(number, copied, "copy", 1.0)]


def _document_blocks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Runs of documents of about BLOCK_CHARACTERS together."""
    block, size = list[Document](), 0
    for document in documents:
        block.append(document)
        size += len(document.text)
        if size >= BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
    if block:
        yield block
