"""Texts and conversations as a family: the table of a run's sequences and the facts of its log."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.corpus import CHATS, TEXTS, make_recipe, write_corpus
from unpad.data.family import open_data
from unpad.data.sources.split import Split, Wanted
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
