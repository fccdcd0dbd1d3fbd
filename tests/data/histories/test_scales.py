"""Scales of values: of training patients alone, monotone, and the same when a run is read again."""

import json
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unpad.data.histories.assemble import Codes, Events, learn_codes, load_codes
from unpad.data.histories.scales import FARTHEST, Kind, RankScale
from unpad.errors import CheckpointError
from unpad.recipes.data import EventSettings

KINDS: tuple[Kind, ...] = ("standard", "log", "rank")
NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


def codes_of(kind: Kind, **values: list[float]) -> Codes:
    """Codes fitted on these values, in the order of the names."""
    code = np.concatenate([np.full(len(one), number) for number, one in enumerate(values.values())]).astype(np.int64)
    value, zeros = (
        np.array([one for part in values.values() for one in part], np.float64),
        np.zeros(len(code), np.int64),
    )
    events = Events(zeros, zeros * 1.0, zeros, code, value, zeros)
    return learn_codes(events, list(values), np.ones(len(code), np.bool_), EventSettings(scale=kind))


def scaled(codes: Codes, name: str, values: list[float]) -> list[float]:
    row = codes.names.index(name)
    found: list[float] = codes.scaled(np.full(len(values), row), np.array(values, np.float64)).tolist()
    return found


def normal_score(values: list[float], value: float) -> float:
    below, equal = sum(one < value for one in values), sum(one == value for one in values)
    return NormalDist().inv_cdf((below + equal / 2) / len(values))


@settings(deadline=None, max_examples=60)
@example([-3.0] * 29 + [0.5] + [7.0] * 30)  # a rank between two knots
@given(st.lists(st.sampled_from([-3.0, 0.0, 0.5, 2.0, 7.0, 1e5]), min_size=1, max_size=60))
def test_ranks_are_normal_scores_with_equal_values_in_the_middle(values):
    codes = codes_of("rank", x=values)
    assert scaled(codes, "x", values) == pytest.approx([normal_score(values, one) for one in values], abs=1e-9)


def test_many_values_have_few_knots_and_nearly_their_scores():
    values = np.exp(np.random.default_rng(0).normal(size=20_000)).tolist()
    codes = codes_of("rank", x=values)
    assert isinstance(codes.scale, RankScale)
    assert len(codes.scale.values[1]) <= 73
    ordered = np.sort(values)
    wanted = [normal_score(values, float(ordered[at])) for at in (0, 10, 500, 10_000, 19_900, 19_999)]
    assert scaled(codes, "x", ordered[[0, 10, 500, 10_000, 19_900, 19_999]].tolist()) == pytest.approx(wanted, abs=0.03)


def test_a_new_value_between_knots_is_between_and_one_beyond_is_held():
    codes = codes_of("rank", x=[1.0, 2.0, 4.0])
    low, middle, high = scaled(codes, "x", [1.0, 2.0, 4.0])
    assert scaled(codes, "x", [-1e9, 1.5, 3.0, 1e9]) == pytest.approx(
        [low, (low + middle) / 2, (middle + high) / 2, high]
    )


def test_a_logarithm_is_standardised_and_codes_with_zeros_have_none():
    codes = codes_of("log", x=[1.0, 10.0, 100.0], y=[0.0, 1.0, 2.0])
    spread = float(np.std(np.log([1.0, 10.0, 100.0])))
    wanted = [-np.log(10) / spread, 0.0, np.log(10) / spread]
    assert scaled(codes, "x", [1.0, 10.0, 100.0]) == pytest.approx(wanted)
    assert scaled(codes, "x", [0.0, -5.0, 0.1]) == pytest.approx([wanted[0]] * 3), "as the least of training"
    assert scaled(codes, "y", [0.0, 1.0, 2.0]) == pytest.approx([-1 / np.std([0, 1, 2]), 0, 1 / np.std([0, 1, 2])])


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(KINDS), st.lists(NUMBERS, min_size=1, max_size=30), st.lists(NUMBERS, min_size=2, max_size=20))
def test_scales_never_fall_and_survive_the_run(kind, values, asked):
    codes = codes_of(kind, x=values)
    found = scaled(codes, "x", sorted(asked))
    assert all(a <= b + 1e-12 for a, b in pairwise(found)), "but for rounding"
    assert max(map(abs, found)) <= FARTHEST
    again = load_codes(codes.to_bytes())
    assert scaled(again, "x", sorted(asked)) == found
    assert again.to_bytes() == codes.to_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_stays_none_and_a_code_without_values_has_no_scale(kind):
    codes = codes_of(kind, x=[1.0, 2.0, 5.0], bare=[np.nan, np.nan])
    assert np.isnan(scaled(codes, "x", [np.nan])).all()
    assert np.isnan(scaled(codes, "bare", [3.0, np.nan])).all()


@pytest.mark.promise("patients.values")
@pytest.mark.parametrize("kind", KINDS)
def test_only_training_patients_count(kind):
    zeros = np.zeros(4, np.int64)
    events = Events(zeros, zeros * 1.0, zeros, zeros, np.array([1.0, 2.0, 3.0, 1e9]), zeros)
    codes = learn_codes(events, ["x"], np.array([True, True, True, False]), EventSettings(scale=kind))
    assert codes.to_bytes() == codes_of(kind, x=[1.0, 2.0, 3.0]).to_bytes()


def test_the_scale_of_standard_deviations_is_kept_as_before():
    assert set(json.loads(codes_of("standard", x=[1.0, 2.0]).to_bytes())) == {
        "codes", "counts", "mean", "std", "quantiles",
    }  # fmt: skip


@pytest.mark.parametrize("part", ["values", "scores"])
@pytest.mark.parametrize("damage", [[[], [3.0, 2.0]], [[], [1.0]], [[]], [[], []]])
def test_damaged_ranks_are_refused(part, damage, tmp_path):
    content = json.loads(codes_of("rank", x=[1.0, 2.0]).to_bytes())
    content["rank"][part] = damage
    with pytest.raises(CheckpointError, match="rank"):
        load_codes(json.dumps(content).encode())
