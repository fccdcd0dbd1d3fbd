"""Work is shared out among processes by cost."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.batching.balance import assign, assign_equally, micro_cost, micro_costs
from unpad.batching.plan import Micro, plan
from unpad.recipes.training import PlanSettings, strategy_names

COSTS = st.lists(st.floats(0, 1e6), max_size=40)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
RATIOS = st.floats(0.1, 1e6) | st.just(math.inf)


def micro(lengths: list[int], pad_to: int = 0, fill_to: int = 0) -> Micro:
    starts = np.zeros(len(lengths), np.int32)
    return Micro(np.arange(len(lengths)), starts, np.array(lengths, np.int32), starts, pad_to, fill_to)


@given(COSTS, st.integers(1, 9))
def test_every_piece_goes_to_one_process_and_equal_costs_give_equal_shares(costs, num):
    shares = assign(costs, num)
    assert len(shares) == num
    assert sorted(piece for share in shares for piece in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    assert assign(list(costs), num) == shares


@pytest.mark.promise("processes.shares")
@given(COSTS, st.integers(1, 9))
def test_the_largest_share_is_within_four_thirds_of_a_bound_on_the_best(costs, num):
    """The best is at least the mean, the largest cost, and two of the `num` + 1 largest, which share a process."""
    largest = sorted(costs, reverse=True)
    pair = largest[num - 1] + largest[num] if len(costs) > num else 0.0
    bound = max(sum(costs) / num, max(costs, default=0.0), pair)
    loads = [sum(costs[piece] for piece in share) for share in assign(costs, num)]
    assert max(loads) <= 4 / 3 * bound + 1e-6


def test_the_largest_piece_goes_first_and_to_the_process_with_the_least():
    assert assign([3, 9, 4, 4], 2) == [[1], [0, 2, 3]]
    assert assign([1, 1, 1], 2) == [[0, 2], [1]], "ties go to the earlier piece and the lower process"
    assert assign([5.0], 3) == [[0], [], []]


def test_a_ragged_micro_batch_costs_its_tokens_and_cells():
    assert micro_cost(micro([3, 4]), 10.0) == 7 + 25 / 10
    assert micro_cost(micro([3, 4]), math.inf) == 7
    assert micro_cost(micro([]), 10.0) == 0


def test_padding_and_filler_cost_what_is_computed_for_them():
    assert micro_cost(micro([3, 4], pad_to=5), 10.0) == 10 + 50 / 10
    assert micro_cost(micro([3, 4], fill_to=9), 10.0) == 9 + (25 + 2) / 10, "filler is of sequences of one token"


def test_sequences_that_attend_as_other_vectors_cost_the_cells_of_those():
    attended = np.array([2, 1])
    assert micro_cost(micro([3, 4]), 10.0, attended) == 7 + 5 / 10
    assert micro_cost(micro([3, 4], pad_to=4), 10.0, attended) == 8 + 8 / 10


@given(LENGTHS, RATIOS, st.integers(0, 70), st.integers(1, 60))
def test_more_work_never_costs_less(lengths, ratio, fill_to, more):
    cost = micro_cost(micro(lengths, fill_to=fill_to), ratio)
    assert cost <= micro_cost(micro([*lengths, more], fill_to=fill_to), ratio)
    assert cost <= micro_cost(micro([lengths[0] + more, *lengths[1:]], fill_to=fill_to), ratio)
    assert cost <= micro_cost(micro(lengths, fill_to=fill_to + more), ratio)
    assert cost <= micro_cost(micro(lengths, fill_to=fill_to), ratio / 2)
    assert cost <= micro_cost(micro(lengths, pad_to=max(lengths)), ratio) or fill_to


@pytest.mark.parametrize("strategy", strategy_names())
@given(lengths=LENGTHS, ratio=RATIOS, by_set=st.booleans())
@settings(max_examples=25)
def test_costs_of_a_plan_are_those_of_its_micro_batches(strategy, lengths, ratio, by_set):
    chosen = PlanSettings(strategy=strategy, tokens_per_step=90, tokens_per_micro=40, batch_size=3, row_tokens=64)
    made = plan(np.array(lengths), chosen, seed=0, epoch=0)
    attended = (np.array(lengths) + 1) // 2 if by_set else None
    one_by_one = [micro_cost(one, ratio, attended) for step in range(made.num_steps) for one in made.step(step)]
    assert micro_costs(made, ratio, attended).tolist() == one_by_one


@given(st.integers(1, 6), st.integers(0, 6), st.data())
def test_equal_numbers_go_to_every_process_and_alike_pieces_to_the_same_place(num, turns, data):
    costs = data.draw(st.lists(st.floats(0, 1e6), min_size=num * turns, max_size=num * turns))
    shares = assign_equally(costs, num)
    assert [len(share) for share in shares] == [turns] * num
    assert sorted(piece for share in shares for piece in share) == list(range(len(costs)))
    places = [[costs[share[turn]] for share in shares] for turn in range(turns)]
    assert all(min(one) >= max(other) for one, other in pairwise(places))
    loads = [sum(costs[piece] for piece in share) for share in shares]
    assert max(loads, default=0) - min(loads, default=0) <= max(costs, default=0) + 1e-6


def test_the_largest_of_a_turn_goes_to_the_process_with_the_least():
    assert assign_equally([9, 5, 8, 4], 2) == [[0, 3], [2, 1]]
