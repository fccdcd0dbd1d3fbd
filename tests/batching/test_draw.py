import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.batching.plan import draw_sequences


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
