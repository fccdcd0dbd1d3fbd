from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.batching.layout import MAX_CELL_RATIO, attention_cells, length_groups

DESCENDING = st.lists(st.integers(1, 300), max_size=120).map(lambda x: np.array(sorted(x, reverse=True), np.int64))


def groups(lengths, offsets):
    return [lengths[a:b] for a, b in pairwise(offsets)]


@given(DESCENDING, st.sampled_from([0.0, 0.15, 0.4]), st.integers(1, 3000))
@settings(deadline=None, max_examples=200)
def test_groups_are_consecutive_and_keep_to_waste_and_size(lengths, waste, max_tokens):
    offsets = length_groups(lengths, waste, max_tokens, max_groups=10**9)
    assert offsets[0] == 0
    assert offsets[-1] == len(lengths)
    for group in groups(lengths, offsets.tolist()):
        cells = len(group) * group[0]
        assert len(group) > 0
        assert cells <= max(max_tokens, group[0])
        assert 1 - group.sum() / cells <= waste + 1e-12


@given(DESCENDING)
@settings(deadline=None)
def test_equal_lengths_stay_together_where_they_fit(lengths):
    offsets = length_groups(lengths, max_tokens=10**9, max_groups=10**9)
    assert all(lengths[cut - 1] != lengths[cut] for cut in offsets[1:-1])


def test_equal_lengths_above_the_size_are_cut_into_full_groups():
    assert length_groups(np.full(10, 100), max_tokens=400).tolist() == [0, 4, 8, 10]
    assert length_groups(np.array([5000, 5000, 10]), max_tokens=4096).tolist() == [0, 1, 2, 3]


def test_many_groups_are_united_while_attention_stays_small():
    spread = np.arange(600, 0, -1)
    alone = length_groups(spread, max_tokens=10**9, max_groups=10**9)
    united = length_groups(spread, max_tokens=10**9, max_groups=len(alone) - 2)
    assert len(united) < len(alone)
    assert attention_cells(spread, united) <= MAX_CELL_RATIO * attention_cells(spread)


def test_groups_are_no_wider_than_their_number_asks_for():
    spread = np.arange(600, 0, -1)
    wider = length_groups(spread, 0.25, max_groups=10**9)
    assert len(wider) < len(length_groups(spread, max_groups=10**9))
    assert length_groups(spread, max_groups=len(wider) - 1).tolist() == wider.tolist()
    assert len(length_groups(spread, max_groups=len(wider) - 2)) < len(wider)


@given(DESCENDING, st.integers(1, 8))
@settings(deadline=None)
def test_uniting_groups_never_makes_attention_explode(lengths, max_groups):
    offsets = length_groups(lengths, max_groups=max_groups)
    strict = length_groups(lengths, max_groups=10**9)
    needed = attention_cells(lengths)
    assert attention_cells(lengths, offsets) <= max(MAX_CELL_RATIO * needed, attention_cells(lengths, strict))


@given(DESCENDING)
@settings(deadline=None)
def test_attention_cells_equal_a_recount(lengths):
    offsets = length_groups(lengths)
    expected = sum(len(group) * int(group[0]) ** 2 for group in groups(lengths, offsets.tolist()))
    assert attention_cells(lengths, offsets) == expected
    assert attention_cells(lengths) == sum(int(n) ** 2 for n in lengths)


def test_empty_lists_and_empty_sequences_are_legal():
    assert length_groups(np.zeros(0, np.int64)).tolist() == [0]
    assert length_groups(np.array([3, 0, 0])).tolist() == [0, 1, 3]
    assert attention_cells(np.zeros(0, np.int64), np.zeros(1, np.int64)) == 0
