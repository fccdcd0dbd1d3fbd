"""Near-duplicates between the training documents and those held out, of the test part or new; `alike.py` says what
near-duplicates are."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unpad.data.sources.alike import TextSearch, plain
from unpad.data.sources.split import Split
from unpad.errors import SourceError
from unpad.terminal.table import number_of

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
    for block in _blocks(corpus()):
        search.count([plain(document.text) for document in block])
    equal, nearest, trained_groups = dict.fromkeys(texts, -1), dict[int, tuple[float, int]](), set[str]()
    for block in _blocks(document for document in corpus() if document.trained):
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


def _blocks(documents: Iterable[Document]) -> Iterator[list[Document]]:
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
