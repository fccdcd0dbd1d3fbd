"""Codes are numbered by how often they occur, and values scaled by those of training patients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unpad.data.histories.assemble import FARTHEST, UNKNOWN, Events, learn_codes, number_codes
from unpad.recipes.data import EventSettings


def events(code: list[int], value: list[float]) -> Events:
    zeros = np.zeros(len(code), np.int64)
    return Events(zeros, np.arange(len(code)) * 1.0, zeros, np.array(code), np.array(value, np.float64), zeros)


def test_codes_of_equal_number_are_in_the_order_of_their_names() -> None:
    names = ["zebra", "mouse", "apple"]
    found = learn_codes(events([0, 1, 1, 2], [np.nan] * 4), names, np.ones(4, np.bool_), EventSettings())
    assert found.names == (UNKNOWN, "mouse", "apple", "zebra")
    assert found.counts.tolist() == [0, 2, 1, 1]


def test_a_value_far_outside_of_training_is_held_at_a_distance() -> None:
    names, settings = ["dose"], EventSettings()
    codes = learn_codes(events([0, 0, 0], [1.0, 2.0, 3.0]), names, np.ones(3, np.bool_), settings)
    rows: Any = SimpleNamespace(names=names)
    numbered, _, unknown = number_codes(events([0, 0, 0], [2.0, 1e12, -1e12]), rows, codes, settings)
    assert numbered.value.tolist() == pytest.approx([0.0, FARTHEST, -FARTHEST])
    assert unknown == {}
