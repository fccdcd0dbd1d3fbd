"""Documents of other parts, and new ones, that occur in the training part of a corpus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from unpad.data.sources.alike import near_sets, plain
from unpad.data.sources.example import Example
from unpad.data.sources.leaks import NEW, Document, Leak, LeakReport, compare, refused, report
from unpad.data.sources.reader import TEXT_KINDS, read_rows, reading
from unpad.data.sources.split import PARTS, Split, Wanted
from unpad.data.tokens.cache import code_key, make_key, read_sealed, write_sealed
from unpad.data.tokens.corpus_files import Preparation, corpus_key, list_files
from unpad.data.tokens.token_set import TokenSet, rows_of
from unpad.errors import SourceError
from unpad.recipes.recipe import Recipe
from unpad.terminal.progress import counted, progress


def find_leaks(work: Preparation, part: Split) -> LeakReport | None:
    """Compare the originals of a part with the training ones, once per corpus and split; None if it has none."""
    if work.wanted is Wanted.NEW or not any((side == part).any() for side in work.sides):
        return None
    copied = [work.copy_settings()] if work.recipe.augment.multiplier else []
    path = work.folder / "leaks" / f"{make_key('leaks', code_key(), corpus_key(work), PARTS[part], *copied)}.json"
    data, damage = read_sealed(path)
    if damage:
        work.events.append(f"cache: the leak report of this corpus {damage}; it is made again")
    if data is not None:
        values = json.loads(data)
        return LeakReport(**{**values, "worst": [Leak(**leak) for leak in values["worst"]]})
    examples = [example for index in range(len(work.files)) for example in work.rows(index).examples]
    texts = [text_of(example) for example in examples]
    groups = [example.group for example in examples]
    with progress(f"looking for texts of {PARTS[part]} in training"):
        leaks = report(texts, np.concatenate(work.sides), groups, part, _copies(work))
    write_sealed(path, json.dumps(asdict(leaks)).encode())
    return leaks


def _copies(work: Preparation) -> dict[str, int]:
    """Augmented copies as `plain` has them -> index of their document."""
    sources, first = dict[str, int](), 0
    for index, side in enumerate(work.sides):
        trained = np.flatnonzero(side == Split.TRAIN) + first
        for number, copy in enumerate(work.copies(index)):
            sources.setdefault(plain(text_of(copy)), int(trained[number % len(trained)]))
        first += len(side)
    return sources


def near_documents(work: Preparation) -> NDArray[np.int64]:
    """Sets of near-duplicates among all documents as `near_sets` has them, looked for once per set of files."""
    key = make_key("near sets", code_key(), [file.key for file in work.files])
    path = work.folder / "near" / f"{key}.bin"
    data, damage = read_sealed(path)
    if damage:
        work.events.append(f"cache: the near-duplicates of this corpus {damage}; they are looked for again")
    if data is None:
        texts = [text_of(example) for index in range(len(work.files)) for example in work.rows(index).examples]
        with progress("looking for near-duplicates"):
            data = near_sets(texts).astype("<i8").tobytes()
        write_sealed(path, data)
    return np.frombuffer(data, "<i8").astype(np.int64)


def compare_new(
    recipe: Recipe, tokens: TokenSet, new_recipe: Recipe, new: TokenSet, seq_ids: np.ndarray
) -> tuple[LeakReport, list[tuple[str, str]]]:
    """Compare new documents with the training originals of a run, read from its files as a stream.

    Args:
        recipe, tokens: recipe and tokens of the run; new_recipe, new: those of the new documents.
        seq_ids: (n,) sequences of `new` with the documents to compare.

    Returns:
        The report, and the places of its worst leaks and their training documents.

    Raises:
        SourceError: a file of the run cannot be read, or changed.
    """
    spans = [new.documents[new.first_document[i] : new.first_document[i + 1]] for i in seq_ids.tolist()]
    numbers = np.sort(np.concatenate([np.zeros(0, np.int64), *spans])).tolist()
    asked = set(numbers)
    documents = [example for number, example in enumerate(_stream(new_recipe, new)) if number in asked]
    split = rows_of([part.split for part in tokens.parts], np.uint8)

    def corpus() -> Iterator[Document]:
        trained = counted(_stream(recipe, tokens), "looking for the new texts in training", len(split), "documents")
        for number, example in enumerate(trained):
            yield Document(number, text_of(example), example.group, bool(split[number] == Split.TRAIN))

    texts, groups = [text_of(example) for example in documents], [example.group for example in documents]
    leaks = compare(texts, groups, corpus, NEW, numbers=numbers)
    return leaks, [(new.place(leak.document), tokens.place(leak.source)) for leak in leaks.worst]


def _stream(recipe: Recipe, tokens: TokenSet) -> Iterator[Example]:
    """Read the originals of a corpus again, in the order of its documents."""
    hashes, number = dict(tokens.file_hashes), 0
    for file in list_files(recipe, TEXT_KINDS):
        path = file.file.path
        if hashes.get(str(path)) != file.sha256:
            raise SourceError("the file changed while it was read", where=str(path), fix="start again")
        with reading(path):
            for row in read_rows(file.kind, file.file, recipe.data):
                if isinstance(row, Example):
                    number += 1
                    yield row
    assert number == sum(part.shard.num_rows for part in tokens.parts if not part.shard.copy.any()), "a row vanished"


def text_of(example: Example) -> str:
    """Text of a document to compare with others; without system messages, which many conversations share."""
    turns = [turn.content for turn in example.turns if turn.role != "system"]
    return "\n".join(turns or [turn.content for turn in example.turns])


def leak_places(leaks: LeakReport | None, tokens: TokenSet) -> list[tuple[str, str]]:
    """Places of the worst leaks and of the training documents that they are like."""
    return [(tokens.where(leak.document), tokens.where(leak.source)) for leak in (leaks.worst if leaks else [])]


def refuse_leaks(leaks: LeakReport | None, places: list[tuple[str, str]]) -> None:
    """Refuse a part with near-duplicates of training documents, for `data.near_duplicates` refuse.

    Raises:
        SourceError: E_LEAK.
    """
    if leaks is not None and places:
        first = leaks.worst[0].describe(*places[0]).strip()
        raise refused(leaks.part, leaks.num_exact + leaks.num_near, "documents", first)
