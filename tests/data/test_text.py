"""Texts and conversations as a family: the table of a run's sequences and the facts of its log."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.corpus import CHATS, TEXTS, make_recipe, write_corpus
from tests.helpers.shell import Shell
from unpad.data.family import open_data
from unpad.data.sources.split import Split, Wanted
from unpad.data.tokens.corpus import open_corpus
from unpad.storage import sha256_file


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("wanted", [Wanted.LEARNING, Wanted.TEST])
def test_the_table_is_of_the_sequences(tmp_path: Path, joined: bool, wanted: Wanted) -> None:
    write_corpus(tmp_path)
    row = (
        '{"messages": [%s{"role": "user", "content": "甲"}, {"role": "assistant", "content": "乙"}], "group": "%s"%s}\n'
    )
    with (tmp_path / "chat.jsonl").open("a", encoding="utf-8") as file:
        file.write(row % ('{"role": "system", "content": "丙"}, ', "g0", "") + row % ("", "t", ', "split": "test"'))
    data: dict[str, Any] = {"text": [{"path": "text", "weight": 0.5}], "chat": {"path": "chat.jsonl", "weight": 2}}
    opened = open_data(make_recipe(tmp_path, data=data, plan={"cross_documents": joined}), None, wanted)
    table, tokens = opened.table, opened.tokens
    assert table.positions.tolist() == (tokens.lengths - 1).tolist()
    for name in ("split", "num_targets", "kind", "source"):
        assert np.array_equal(getattr(table, name), getattr(tokens, name)), name
    assert table.num_targets.tolist() == [int(tokens.loss_mask(i).sum()) for i in range(len(tokens))]
    assert table.weights == (0.5, 2)
    files = [tmp_path / name for name in ("text/a.json", "text/b.json", "chat.jsonl")]
    assert table.file_hashes == tuple((str(file), sha256_file(file)) for file in files)
    assert table.num_test == (int((tokens.split == Split.TEST).sum()) if wanted is Wanted.LEARNING else 0)
    assert opened.facts() == {
        "characters": sum(map(len, TEXTS)) + sum(map(len, np.ravel(CHATS).tolist())) + 5,
        "lost_characters": 0,
        "system_turns": 1,
    }
    assert len(np.unique(table.group)) == (len(tokens) if joined else 71), "two rows of g0 are one unit"
    if not joined:
        assert table.group[40] == table.group[70]


PARAGRAPHS = [f"Paragraph {number} of the book{', which goes on' * (number % 7)}." for number in range(260)]
BOOKS: dict[str, tuple[list[str], dict[str, Any], bool | None]] = {  # None: held out as of a book, and no remark
    "a book": (PARAGRAPHS, {}, True),
    "with a paragraph twice": ([*PARAGRAPHS[:-3], PARAGRAPHS[0], *PARAGRAPHS[-3:]], {}, True),
    "of few paragraphs": (PARAGRAPHS[:199], {}, False),
    "of chapters": ([text * 40 for text in PARAGRAPHS], {}, False),
    "with marks": ([f"<|endoftext|>{text}" for text in PARAGRAPHS], {}, False),
    "with a separator": (PARAGRAPHS, {"separator": "\n\n"}, False),
    "joined": ([f"{number:040}\n\nx" for number in range(260)], {"join": 42}, None),
    "of a run before": (PARAGRAPHS, {"split_version": 2}, False),
}


@pytest.mark.promise("data.parts")
@pytest.mark.parametrize("name", BOOKS)
def test_the_end_of_a_book_is_held_out(unpad: Shell, tmp_path: Path, name: str) -> None:
    paragraphs, settings, is_book = BOOKS[name]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    recipe = make_recipe(tmp_path, data={"text": "book.txt", "chat": [], "holdout": 0.05, **settings})
    first, again = open_data(recipe, None), open_data(recipe, None)  # from the file and from the cache
    assert np.array_equal(first.table.split, again.table.split)
    num = len(first.table)
    held = np.flatnonzero(first.table.split == Split.HOLDOUT).tolist()
    end = list(range(num - round(0.05 * num), num))
    assert (held == [row for row in end if paragraphs[row] not in paragraphs[: end[0]]]) == (is_book is not False)
    told = "looks like one text in paragraphs"
    assert [any(told in line for line in data.lines()) for data in (first, again)] == [bool(is_book)] * 2
    if "split_version" not in settings:
        changes = [f"data.{key}={json.dumps(value)}" for key, value in settings.items()]
        assert (told in unpad("data", "check", tmp_path / "book.txt", *changes, code=0).out) == bool(is_book)


@pytest.mark.parametrize("settings", [{"join": 42}, {"unwrap": True}])
def test_settings_that_change_documents_have_shards_of_their_own(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "book.txt").write_text("\n\n".join(PARAGRAPHS), encoding="utf-8")
    book, settings = {"text": "book.txt", "chat": []}, {"data": {"text": "book.txt", "chat": [], **settings}}
    tokenizer = open_corpus(make_recipe(tmp_path, data=book)).tokenizer
    assert open_corpus(make_recipe(tmp_path, **settings), tokenizer=tokenizer).report.work.hits == 0


def test_several_plain_texts_are_split_as_any_rows(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    for name in "ab":
        (tmp_path / "books" / f"{name}.txt").write_text(
            "\n\n".join(name + text for text in PARAGRAPHS), encoding="utf-8"
        )
    data = open_data(make_recipe(tmp_path, data={"text": "books", "chat": []}), None)
    assert 0 < np.flatnonzero(data.table.split == Split.HOLDOUT)[0] < 200
