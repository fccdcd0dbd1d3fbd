import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.batching.plan import MOST_AT_ONCE, WINDOW, draw_sequences, num_windows, plan, window_places
from unpad.errors import PlanError
from unpad.recipes.training import PlanSettings


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.floats(0.1, 3.5), min_size=3, max_size=3))
@settings(deadline=None)
def test_a_weight_takes_its_whole_part_of_everything_and_a_share_of_the_rest(source_of, weights):
    source_of = np.array(source_of, np.int64)
    times = np.bincount(draw_sequences(source_of, weights, seed=0, epoch=0), minlength=len(source_of))
    for source, weight in enumerate(weights):
        of_source = times[source_of == source]
        assert set(of_source.tolist()) <= {int(weight), int(weight) + 1}
        assert abs(of_source.sum() - weight * len(of_source)) < 1


def test_weight_one_is_every_sequence_once():
    assert draw_sequences(np.array([0, 1, 0]), [1.0, 1.0], seed=5, epoch=2).tolist() == [0, 1, 2]


def test_the_share_depends_on_seed_and_epoch_only():
    source_of = np.zeros(200, np.int64)
    drawn = [draw_sequences(source_of, [0.5], seed, epoch).tolist() for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert drawn[0] == drawn[1]
    assert len({tuple(ids) for ids in drawn}) == 3


def test_the_share_is_drawn_from_a_stream_that_the_order_of_the_plan_does_not_use():
    drawn = draw_sequences(np.zeros(200, np.int64), [0.5], seed=3, epoch=4)
    plans = np.random.default_rng([3, 4])
    share = int(100 + plans.random())
    assert drawn.tolist() != sorted(plans.permutation(200)[:share].tolist())


def test_a_single_sequence_of_half_weight_appears_in_about_half_of_the_epochs():
    assert 70 < sum(len(draw_sequences(np.array([0]), [0.5], seed=0, epoch=epoch)) for epoch in range(200)) < 130


@pytest.mark.promise("batch.windows")
def test_windows_are_dealt_blocks_of_neighbours():
    places = [window_places(10**6 + 7, 3, window, seed=1, epoch=2) for window in range(3)]
    assert np.array_equal(np.sort(np.concatenate(places)), np.arange(10**6 + 7))
    for ids in places:
        assert (np.diff(ids) == 1).mean() > 0.999  # read from few places of a file
        assert 0.4 < (ids < 5 * 10**5).mean() < 0.6  # and from everywhere in it


@pytest.mark.promise("batch.windows")
def test_only_more_than_ten_million_sequences_are_windows_unless_asked_for():
    found = [num_windows(num, PlanSettings()) for num in (0, 1, MOST_AT_ONCE, MOST_AT_ONCE + 1)]
    assert found == [1, 1, 1, MOST_AT_ONCE // WINDOW + 1]
    with pytest.raises(PlanError, match="planned at once"):
        plan(np.arange(9), PlanSettings(window=5), seed=0, epoch=0)


@pytest.mark.promise("batch.windows")
def test_each_window_is_shuffled_by_itself_and_the_first_as_a_whole_epoch():
    orders = [plan(np.full(99, 9), PlanSettings(), seed=0, epoch=0, window=one).order.tolist() for one in (None, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.promise("batch.windows")
def test_a_window_is_planned_in_memory_of_its_own_size(tmp_path):
    lengths = np.memmap(tmp_path / "lengths", np.int32, "w+", shape=400_000)
    lengths[:] = np.random.default_rng(0).integers(1, 60, len(lengths))
    tracemalloc.start()
    seq_ids = window_places(len(lengths), 40, 3, seed=0, epoch=0)
    plan(lengths, PlanSettings(), seed=0, epoch=0, window=3, seq_ids=seq_ids)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300 * 10_000  # of all sequences an array of eight bytes takes more
