"""The packaged Chinese example: what it says about itself is so."""

import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from tests.helpers.corpus import prepare
from unpad.data.check import check
from unpad.data.sources.files import PACKAGE
from unpad.data.sources.split import Split
from unpad.recipes.file import load_recipe

FOLDER = PACKAGE / "examples" / "zh"


def read(name: str) -> list[dict[str, Any]]:
    with (FOLDER / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def phrasings() -> dict[str, list[dict[str, Any]]]:
    """Single questions by fact; conversations of several turns stand for themselves and are not asked."""
    facts = defaultdict(list)
    for row in read("chat.jsonl"):
        if len(row["messages"]) == 2:
            facts[row["fact"]].append(row)
    return facts


def test_every_row_can_be_used():
    for name, least in (("facts.jsonl", 300), ("chat.jsonl", 300), ("pairs.jsonl", 100)):
        report = check(FOLDER / name)
        assert report.passed
        assert report.num_used == report.num_rows >= least


def test_no_question_is_asked_twice(phrasings):
    questions = [row["messages"][0]["content"] for rows in phrasings.values() for row in rows]
    assert len(set(questions)) == len(questions)


def test_the_split_of_the_packaged_recipe_leaks_nothing_that_is_not_declared(tmp_path):
    tokens, _, report = prepare(load_recipe("zh_chat"))
    held_chats = np.flatnonzero((tokens.split == Split.HOLDOUT) & (tokens.kind == 1))
    assert held_chats.size == 320
    leaks = report.leaks[Split.HOLDOUT]
    assert (leaks.num_exact, leaks.num_near) == (0, 0), leaks.places
    assert leaks.num_declared >= 320
    assert report.rows_used == 2540
    assert not report.bad_rows
    groups = np.array([group for part in tokens.parts for group in part.shard.groups])
    trained = set(groups[(tokens.split == Split.TRAIN) & (tokens.kind == 1)])
    assert set(groups[held_chats]) <= trained
