"""Codes are numbered by how often they occur, and values scaled by those of training patients."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.data.histories.assemble import QUANTILES, UNKNOWN, Events, learn_codes, load_codes
from unpad.recipes.data import EventSettings


def events(code: list[int], value: list[float]) -> Events:
    zeros = np.zeros(len(code), np.int64)
    return Events(
        zeros, np.arange(len(code)) * 1.0, zeros, np.array(code, np.int64), np.array(value, np.float64), zeros
    )


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.booleans(), st.one_of(st.none(), st.sampled_from([-9.0, 0.0, 0.5, 3.0, 40.0]))),
        max_size=40,
    ),
    st.integers(1, 3),
)
def test_counts_and_scales_equal_those_of_each_code_by_itself(drawn, min_count):
    names = ["zebra", UNKNOWN, "apple", "mouse", "bee"]
    value = [np.nan if one is None else one for _, _, one in drawn]
    in_training = np.array([mine for _, mine, _ in drawn], np.bool_)
    own = EventSettings(min_count=min_count, std_floor=0.1)
    found = learn_codes(events([code for code, _, _ in drawn], value), names, in_training, own)
    mine = [(names[code], value) for code, trained, value in drawn if trained]
    occurs = Counter(name for name, _ in mine)
    common = [name for name in sorted(occurs, key=lambda one: (-occurs[one], one)) if occurs[name] >= min_count]
    chosen = [name for name in common if name != UNKNOWN]
    assert found.names == (UNKNOWN, *chosen)
    assert found.counts.tolist() == [len(mine) - sum(occurs[name] for name in chosen), *(occurs[n] for n in chosen)]
    for row, name in enumerate(found.names):
        values = sorted(value for one, value in mine if one == name != UNKNOWN and value is not None)
        mean = sum(values) / max(len(values), 1)
        std = max(float(np.std(values)), 0.1 * abs(mean)) if values else 0.0
        assert (found.mean[row], found.std[row]) == pytest.approx((mean, std or (1.0 if values else 0.0)))
        at = [round(share * (len(values) - 1)) for share in QUANTILES]
        assert found.quantiles[row].tolist() == ([values[one] for one in at] if values else [0.0] * len(QUANTILES))
    again = load_codes(found.to_bytes())
    assert {name: np.asarray(part).tolist() for name, part in vars(again).items()} == {
        name: np.asarray(part).tolist() for name, part in vars(found).items()
    }
