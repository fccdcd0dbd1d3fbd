"""Sample of a large corpus; its lengths are known long before those of all documents."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unpad.data.sources.example import Example
from unpad.data.sources.reader import TEXT_KINDS
from unpad.data.sources.split import Split, Wanted
from unpad.data.tokens.corpus import (
    Corpus,
    encode_rows,
    open_originals,
    part_of,
    report_of,
    split_documents,
    stored_tokenizer,
    token_set,
)
from unpad.data.tokens.corpus_files import FileRows, Preparation, judge_rows, list_files
from unpad.data.tokens.encode import reserved_texts
from unpad.data.tokens.tokenizer import train_tokenizer
from unpad.recipes.recipe import Recipe
from unpad.storage import cache_folder

LARGE_BYTES = 8 << 20  # files of less are encoded in a few seconds
MOST = 2000  # documents of a kind; lengths of more would take longer and change a share of padding by less than 1 %
MOST_CHARS = 2_000_000  # of the documents of a kind
FEWEST = 100  # documents of a kind, however long

Place = tuple[int, int]  # of a document: index of its file, row in the file


@dataclass(frozen=True)
class CorpusSample:
    """Training documents of a corpus, drawn at random within their kind, without augmented copies.

    Args:
        num_documents: (num_kinds,) int64, training documents of each kind of TEXT_KINDS that they were drawn from.
        learned: whether their vocabulary was learned from them alone.
    """

    corpus: Corpus
    num_documents: np.ndarray
    learned: bool


def sample_corpus(recipe: Recipe, *, cache: Path | None = None) -> CorpusSample | None:
    """Read a recipe's data and encode a sample of its training documents; nothing is written to the cache.

    Near-duplicates are not kept in one part (`data.near_duplicates: together`), since finding them takes long.

    Returns:
        None if the files are small, all documents are encoded already, or the sample would be all of them.

    Raises:
        SourceError, RecipeError: as `open_corpus`.
    """
    work = Preparation(recipe, cache or cache_folder(), Wanted.LEARNING)
    work.files = list_files(recipe, TEXT_KINDS)
    work.shards = [None] * len(work.files)
    if sum(file.file.path.stat().st_size for file in work.files) < LARGE_BYTES:
        return None
    tokenizer = stored_tokenizer(work)
    if tokenizer is not None:
        open_originals(work, tokenizer)
        if all(shard is not None for shard in work.shards):
            return None
        work.shards = [None] * len(work.files)  # the rows are needed
    work.recipe = _without_search(recipe)
    bad, _ = judge_rows(work)
    split_documents(work)
    drawn, num_documents = _draw(work)
    if len(drawn) == num_documents.sum():
        return None
    chosen: dict[int, list[int]] = defaultdict(list)
    for index, row in drawn:
        chosen[index].append(row)
    learned = tokenizer is None
    if tokenizer is None:
        texts = [turn.content for place in drawn for turn in _example(work, place).turns]
        tokenizer = train_tokenizer(recipe.tokenizer, texts, reserved_texts(recipe.data.template))
    parts = []
    for index, rows in chosen.items():
        shard = encode_rows(work, index, _rows(work, index, rows), tokenizer)
        parts.append(part_of(work.files[index], shard, "", work.sides[index][rows], work.units[index][rows]))
    work.read.clear()
    tokens = token_set(work, parts)
    report = report_of(work, tokens, tokenizer, len(drawn), bad)
    return CorpusSample(Corpus(tokens, tokenizer, report, None), num_documents, learned)


def _without_search(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"near_duplicates": "report"})})


def _draw(work: Preparation) -> tuple[list[Place], np.ndarray]:
    """Draw training documents of each kind; return their places in order, and the number there is of each kind."""
    rng = np.random.default_rng(work.recipe.train.seed)
    drawn: list[Place] = []
    numbers = np.zeros(len(TEXT_KINDS), np.int64)
    for number, kind in enumerate(TEXT_KINDS):
        places = [
            (index, row)
            for index, file in enumerate(work.files)
            if file.kind == kind
            for row in np.flatnonzero(work.sides[index] == Split.TRAIN).tolist()
        ]
        numbers[number] = len(places)
        if places:
            chars = sum(len(turn.content) for place in places for turn in _example(work, place).turns) / len(places)
            most = min(len(places), MOST, max(FEWEST, int(MOST_CHARS / max(chars, 1))))
            drawn += [places[i] for i in np.sort(rng.choice(len(places), most, replace=False)).tolist()]
    return drawn, numbers


def _example(work: Preparation, place: Place) -> Example:
    index, row = place
    return work.rows(index).examples[row]


def _rows(work: Preparation, index: int, rows: list[int]) -> FileRows:
    every = work.rows(index)
    return FileRows(
        [every.examples[row] for row in rows],
        bad=[],
        content_key=every.content_key[rows],
        declared=every.declared[rows],
        copy=every.copy[rows],
    )
