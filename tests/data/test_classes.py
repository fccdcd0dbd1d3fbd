"""Rows with a class each: what `RowData` and `ClassData` fill in, and classes of a run."""

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from unpad.batching.batch import RaggedBatch, from_vectors
from unpad.data import rows
from unpad.data.sources.example import BadRow, SplitName
from unpad.data.sources.split import Wanted
from unpad.errors import SourceError
from unpad.recipes.recipe import Recipe


@dataclass(frozen=True)
class Word:
    where: str
    word: str
    label: str
    split: SplitName | None = None


WORDS = [Word("a:1", "by", "short"), Word("a:2", "because", "long"), Word("a:3", "between", "long")]


class WordData(rows.ClassData[Word]):
    family: ClassVar[str] = "words"
    kinds: ClassVar[tuple[str, ...]] = ("text",)

    def alone(self, seq_id: int, start: int, stop: int, first_target: int) -> RaggedBatch:
        letters = np.array([[ord(letter)] for letter in self.chosen.rows[seq_id].word], np.float32)
        return from_vectors([letters], dim=1, seq_labels=self.labels[[seq_id]], seq_ids=np.array([seq_id]))


def chosen_of(words: list[Word], bad: list[BadRow] | None = None) -> rows.ChosenRows[Word]:
    listed = rows.ListedRows(Recipe(data={"text": "a", "holdout": 0.0}), "text", [], words, [0] * len(words), bad or [])
    return rows.choose_rows(listed, Wanted.LEARNING, [rows.row_key(word.word) for word in words])


def data_of(words: list[Word], bad: list[BadRow] | None = None) -> WordData:
    chosen = chosen_of(words, bad)
    lengths = np.array([len(word.word) for word in words], np.int64)
    return WordData(chosen.table(lengths, []), chosen, *rows.label_rows(chosen, None))


def test_classes_have_the_numbers_of_their_names_and_are_kept():
    data = data_of(WORDS)
    assert (data.classes, data.labels.tolist(), data.num_outputs) == (("long", "short"), [1, 0, 0], 2)
    assert json.loads(data.files["classes.json"]) == {"classes": ["long", "short"]}
    assert (rows.read_classes(data.files), rows.num_classes(data.files)) == (data.classes, 2)
    kept = {"classes.json": b'{"classes": ["short", "middle", "long"]}'}
    classes, labels = rows.label_rows(data.chosen, kept)
    assert (classes, labels.tolist()) == (("short", "middle", "long"), [0, 2, 2])


def test_an_unknown_class_and_a_single_one_are_refused():
    with pytest.raises(SourceError, match='the class "short" is none of the run: long, middle') as refused:
        rows.label_rows(chosen_of(WORDS), {"classes.json": b'{"classes": ["long", "middle"]}'})
    assert refused.value.where == "a:1"
    with pytest.raises(SourceError, match="all text are of one class, long"):
        rows.label_rows(chosen_of(WORDS[1:]), None)


def test_the_fingerprint_follows_the_content_of_rows_and_not_their_places(tmp_path):
    own = data_of(WORDS).fingerprint()
    assert data_of([replace(word, where=f"b{word.where}") for word in WORDS]).fingerprint() == own
    for changed in (replace(WORDS[2], word="betweed"), replace(WORDS[2], label="short")):
        assert data_of([*WORDS[:2], changed]).fingerprint() != own
    held_out = replace(data_of(WORDS).table, split=np.array([0, 0, 1], np.uint8))
    assert replace(data_of(WORDS), table=held_out).fingerprint() != own
