"""Steps are full of real tokens, and few of them differ in size."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.batching.grouping import runs_within, sum_runs
from unpad.batching.strategies import pack
from unpad.batching.strategies.pack import filled_runs


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 300), max_size=200), limit=st.integers(1, 500), seed=st.integers(0, 99))
def test_trading_keeps_every_piece_and_the_limit(lengths, limit, seed):
    tokens = np.array(lengths, np.int64)
    order, bounds = filled_runs(tokens, np.random.default_rng(seed).permutation(len(lengths)), limit)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    totals, counts = sum_runs(tokens[order], bounds), np.diff(bounds)
    assert np.all((totals <= limit) | (counts == 1))
    assert np.all(counts > 0)


def lengths_like_chat(num: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(20) - 0.18, 0.6, num)
    return np.clip(drawn.round(), 2, 128).astype(np.int64)


def test_most_steps_are_full_to_the_token():
    lengths = lengths_like_chat(5000)
    shuffled = np.random.default_rng(1).permutation(5000)
    order, bounds = filled_runs(lengths, shuffled, 2048)
    totals = sum_runs(lengths[order], bounds)[:-1]
    assert (totals == 2048).mean() > 0.9
    assert len(set(totals.tolist())) < 4
    before = sum_runs(lengths[shuffled], runs_within(lengths[shuffled], 2048))[:-1]
    assert len(set(before.tolist())) > 20


def test_an_epoch_of_very_many_steps_is_cut_as_it_comes(monkeypatch):
    monkeypatch.setattr(pack, "MOST_STEPS", 2)
    lengths = lengths_like_chat(500)
    order, bounds = filled_runs(lengths, np.arange(500), 2048)
    assert order.tolist() == list(range(500))
    assert bounds.tolist() == runs_within(lengths, 2048).tolist()


def test_pieces_stay_within_a_few_steps_of_where_they_were_drawn():
    order, _ = filled_runs(lengths_like_chat(5000), np.arange(5000), 2048)
    assert np.abs(order - np.arange(5000)).max() <= 128 * 3 + pack.WINDOW
