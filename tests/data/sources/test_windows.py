"""Hashes of windows are equal where the windows are, and nowhere else."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.data.sources import windows as module
from unpad.data.sources.windows import windows


@pytest.mark.parametrize("size", [4, 8])
def test_every_arrangement_of_characters_has_a_hash_of_its_own(size: int) -> None:
    texts = ["".join(letters) for letters in product("ab" if size == 8 else "abcd", repeat=size)]
    ((grams, counts),) = windows(texts, size, seed=0)
    assert counts.tolist() == [1] * 256
    assert len(np.unique(grams)) == 256
    ((other, _),) = windows(texts, size, seed=1)
    assert not np.isin(grams, other).any(), "the seed draws the hash"


@settings(deadline=None)
@given(st.lists(st.text("ab好", max_size=14), max_size=9), st.sampled_from([4, 8]), st.integers(1, 40))
def test_hashes_and_counts_follow_the_windows_of_each_text(texts: list[str], size: int, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_CHARACTERS", chunk)
        parts = list(windows(texts, size, seed=0))
    grams, counts = (
        np.concatenate([np.zeros(0), *(part[i].astype(object) for part in parts)]).tolist() for i in (0, 1)
    )
    expected = [text[i : i + size] for text in texts for i in range(len(text) - size + 1)]
    assert counts == [max(len(text) - size + 1, 0) for text in texts]
    assert len(grams) == len(expected)
    assert len(set(zip(grams, expected, strict=True))) == len(set(grams)) == len(set(expected))
