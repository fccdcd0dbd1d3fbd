"""Windows of texts: where they begin and end, and hashes that are equal where the windows are, and nowhere else."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.data.sources import leaks as module
from unpad.data.sources.leaks import PASSAGE, SHORTEST, plain, windows

LETTERS = {"a": 1, "b": 1, "の": 2, "한": 2, "好": 3, "😀": 3, "ก": 1}


def expected(text: str) -> set[str]:
    """The different windows of a text, counted letter by letter."""
    worth = [LETTERS[character] for character in text]
    if sum(worth) < SHORTEST:
        return set()
    ends = ((i, next((j for j in range(i, len(text) + 1) if sum(worth[i:j]) >= PASSAGE), 0)) for i in range(len(text)))
    return {text[first:last] for first, last in ends if last}


@settings(deadline=None)
@given(st.lists(st.text("".join(LETTERS), max_size=40), max_size=9), st.integers(1, 60))
def test_every_text_has_the_hashes_of_its_own_windows(texts: list[str], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_CHARACTERS", chunk)
        parts = list(windows(texts))
    hashes = [int(value) for part in parts for value in part[0]]
    owners = [int(value) for part in parts for value in part[1]]
    mine = [expected(text) for text in texts]
    assert owners == [index for index, own in enumerate(mine) for _ in own]
    of_text = [{h for h, owner in zip(hashes, owners, strict=True) if owner == index} for index in range(len(texts))]
    for (one, a), (other, b) in product(zip(mine, of_text, strict=True), repeat=2):
        assert len(one & other) == len(a & b)
    assert len(set(hashes)) == len(set().union(*mine))


def test_every_arrangement_of_characters_has_a_hash_of_its_own() -> None:
    texts = ["".join(letters) * 2 for letters in product("甲乙丙", repeat=5)]
    hashes = np.concatenate([one for one, _ in windows(texts)])
    assert len(np.unique(hashes)) == len(texts)
    many = ["".join(letters) + "z" * (SHORTEST - 10) for letters in product("ab", repeat=10)]
    hashes = np.concatenate([one for one, _ in windows(many)])
    assert len(np.unique(hashes)) == sum(2**left for left in range(1, 11))


@pytest.mark.promise("data.near-duplicates")
@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a" * 23, 0), ("abcdefghijklmnopqrstuvwx", 10), ("春眠不觉晓处处", 0), ("春眠不觉晓处处闻", 4),
        ("ひらがなはおんせつもじ", 0), ("ひらがなはおんせつもじだ", 5), ("我用unpad训练模型一次", 9),
    ],
)  # fmt: skip
def test_windows_grow_with_the_script(text: str, number: int) -> None:
    assert sum(len(hashes) for hashes, _ in windows([text])) == number


def test_punctuation_case_and_width_do_not_count_but_a_text_of_nothing_else_stays() -> None:
    assert plain("Ｈello,  World！ 2026") == "helloworld2026"
    assert plain("…！") == "…！"
