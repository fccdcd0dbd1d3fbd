"""Intervals of a small simulation hold the truth about as often as they say."""

import runpy
from pathlib import Path
from typing import Any

import pytest

COVERAGE: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "coverage.py"))
CASES = {case.name: case for case in (*COVERAGE["OF_GROUPS"], *COVERAGE["OF_PEOPLE"])}


@pytest.mark.nightly
@pytest.mark.promise("data.holdout")
@pytest.mark.parametrize(
    ("name", "num"), [("share of rows", 5), ("AUROC", 35), ("calibration slope", 35), ("Brier score, 1/3 censored", 60)]
)
def test_intervals_hold_the_truth_where_percentiles_miss_it(name, num):
    ours, percentiles = COVERAGE["covered"](CASES[name], num, 80)
    assert ours > 0.88
    assert ours >= percentiles
