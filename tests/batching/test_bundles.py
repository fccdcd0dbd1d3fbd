"""Sequences that belong together stay in one micro-batch, whatever the strategy."""

import numpy as np
import pytest

from unpad.batching.plan import Plan, plan
from unpad.errors import PlanError
from unpad.recipes.training import PlanSettings, strategy_names

LENGTHS = np.random.default_rng(3).integers(1, 40, 61)
# Pairs far apart, a bundle of three, and sequences by themselves.
BUNDLES = np.concatenate([np.arange(25), np.arange(25)[::-1], [7, -1, -1, -1, 30, 30, 30, -1, -1, -1, -1]])


def settings(name: str, **fields: object) -> PlanSettings:
    sizes = {"tokens_per_step": 120, "tokens_per_micro": 70, "batch_size": 2, "row_tokens": 130}
    return PlanSettings(strategy=name, **{**sizes, **fields})


def made(name: str, bundles: np.ndarray | None = BUNDLES, ids: np.ndarray | None = None, **fields: object) -> Plan:
    return plan(LENGTHS, settings(name, **fields), seed=1, epoch=2, seq_ids=ids, bundles=bundles, max_tokens=40)


def micros(of: Plan) -> list[list[int]]:
    return [micro.seq_ids.tolist() for step in range(of.num_steps) for micro in of.step(step)]


@pytest.mark.promise("pairs.together")
@pytest.mark.parametrize("name", strategy_names())
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_bundle_is_never_split(name, drop_last):
    planned = made(name, drop_last=drop_last)
    place = {seq: index for index, micro in enumerate(micros(planned)) for seq in micro}
    for number in range(31):
        members = np.flatnonzero(number == BUNDLES).tolist()
        assert len({place.get(seq) for seq in members}) <= 1
    assert planned.ledger.total == LENGTHS.sum()
    assert drop_last or sorted(place) == list(range(61))
    assert planned.num_steps > 3
    for step in range(planned.num_steps):
        for micro in planned.step(step):
            assert micro.pad_to in (0, int((micro.stops - micro.starts).max()), 40)


@pytest.mark.parametrize("name", strategy_names())
def test_without_a_bundle_of_several_the_plan_is_the_same(name):
    plain, alone = made(name, None), made(name, np.full(61, -1))
    assert micros(plain) == micros(alone)
    assert plain.pad_to.tolist() == alone.pad_to.tolist()


def test_the_plan_without_bundles_splits_them():
    place = {seq: index for index, micro in enumerate(micros(made("pack", None))) for seq in micro}
    assert any(place[first] != place[49 - first] for first in range(25))


def test_a_bundle_larger_than_a_micro_batch_has_one_to_itself():
    bundles = np.zeros(3, np.int64)
    planned = plan(np.array([30, 30, 30]), settings("pack"), seed=0, epoch=0, bundles=bundles)
    assert [sorted(one) for one in micros(planned)] == [[0, 1, 2]]


@pytest.mark.promise("pairs.together")
def test_a_bundle_is_dropped_as_a_whole():
    bundles = np.array([0, 1, 2, 0, 1, 2])
    planned = plan(
        np.array([9, 5, 5, 5, 5, 10]), settings("pack", overflow="drop", max_tokens=8), seed=0, epoch=0, bundles=bundles
    )
    assert sorted(seq for micro in micros(planned) for seq in micro) == [1, 4]
    assert planned.ledger.tokens("dropped") == 9 + 5 + 5 + 10


@pytest.mark.promise("pairs.together")
@pytest.mark.parametrize("overflow", ["split", "truncate_right", "truncate_left"])
def test_a_bundle_is_never_cut(overflow):
    lengths, bundles = np.array([9, 5, 20]), np.array([0, 0, -1])
    with pytest.raises(PlanError, match="never cut"):
        plan(lengths, settings("pack", overflow=overflow, max_tokens=8), seed=0, epoch=0, bundles=bundles)
    planned = plan(lengths, settings("pack", overflow=overflow, max_tokens=9), seed=0, epoch=0, bundles=bundles)
    assert sorted({seq for micro in micros(planned) for seq in micro}) == [0, 1, 2]


def test_a_bundle_drawn_twice_is_there_twice():
    bundles, ids = np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1, 2, 3])
    planned = plan(np.array([5, 6, 7, 8]), settings("pack"), seed=0, epoch=0, seq_ids=ids, bundles=bundles)
    assert sorted(seq for micro in micros(planned) for seq in micro) == ids.tolist()
    assert all(micro.count(0) == micro.count(1) for micro in micros(planned))
