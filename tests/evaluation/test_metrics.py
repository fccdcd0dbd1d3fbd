"""Metrics have the intervals that their groups allow, and say what is missing."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from unpad.evaluation import vqa
from unpad.evaluation.metrics import EXTREMES, Metric, mean_of, measured, metric_lines, ratio, student, too_good


@pytest.mark.promise("data.holdout")
def test_an_interval_is_of_ninety_five_percent_and_of_no_other_share():
    values = np.random.default_rng(0).normal(3, 0.5, 4000)
    error = values.std() / math.sqrt(len(values))
    for metric in (mean_of(values), measured(lambda w: ratio(values, None, w), len(values))):
        reach = (metric.high - metric.low) / 2 / error  # 1.645 of 90 %, 1.96 of 95 %, 2.576 of 99 %
        assert reach == pytest.approx(1.96, abs=0.12)


@pytest.mark.parametrize(("degrees", "quantile"), [(2, 4.303), (4, 2.776), (7, 2.365), (29, 2.045), (9999, 1.960)])
def test_the_quantile_is_that_of_students_tables(degrees, quantile):
    assert student(degrees) == pytest.approx(quantile, rel=0.008 if degrees == 2 else 3e-4)


@pytest.mark.promise("data.holdout")
@pytest.mark.parametrize(("num", "limit"), [(1, 0.025), (10, 0.6915), (15, 0.7820), (50, 0.9289), (100, 0.9638)])
def test_all_or_none_right_has_the_exact_interval(num, limit):
    # Limits of Clopper and Pearson for n of n, as tables have them.
    right = mean_of(np.ones(num), share=True)
    assert (right.value, right.high) == (1, 1)
    assert right.low == pytest.approx(limit, abs=1e-4)
    wrong = mean_of(np.zeros(num), share=True)
    assert (wrong.value, wrong.low) == (0, 0)
    assert wrong.high == pytest.approx(1 - limit, abs=1e-4)
    some = measured(lambda w: ratio(np.ones(num), None, w), num, share=True)
    assert some.low == pytest.approx(limit, abs=1e-4)


@pytest.mark.parametrize(
    ("value", "low", "num", "others", "says"),
    [
        (0.995, 0.98, 30, {}, True),
        (0.995, 0.98, 29, {}, False),
        (0.995, 0.95, 100, {}, False),
        (0.989, 0.98, 100, {}, False),
        (1.0, math.nan, 100, {}, False),
        (1.0, 0.96, 100, {"margin": 1.0}, False),
        (0.995, 0.98, 100, {"commonest_class": 0.96}, False),
        (0.995, 0.98, 100, {"commonest_class": 0.9}, True),
    ],
)
def test_a_figure_that_is_too_good_is_said_where_its_interval_and_guessing_allow(value, low, num, others, says):
    metrics = {name: Metric(other, other, other, num) for name, other in others.items()}
    said = too_good({"loss": Metric(1, 1, 1, num), "accuracy": Metric(value, low, 1, num), **metrics})
    assert bool(said) == says
    limits = (0.79, 0.81)  # a perfect AUROC of 16 and of 18 rows with the outcome
    assert [bool(too_good({"auroc": Metric(1, low, 1, 60)})) for low in limits] == [False, True]


def test_intervals_count_groups_and_not_their_members():
    values = np.random.default_rng(0).normal(size=100)
    groups = np.arange(100)
    alone, copied = mean_of(values, groups), mean_of(np.repeat(values, 20), np.repeat(groups, 20))
    assert (copied.value, copied.low, copied.high) == pytest.approx((alone.value, alone.low, alone.high))
    assert (alone.num, alone.num_groups, copied.num, copied.num_groups) == (100, None, 2000, 100)
    assert mean_of(np.repeat(values, 20)).high < alone.high
    right = mean_of(np.ones(60), np.repeat(np.arange(15), 4), share=True)
    assert right.low == pytest.approx(0.7820, abs=1e-4)


def test_a_table_says_of_each_metric_its_interval_its_rows_and_its_units():
    nan = math.nan
    metrics = {
        "loss": Metric(2.5, 2.0, 3.0, 12, num_groups=4, part="valid", best_of=3),
        "auroc": Metric(nan, nan, nan, 12, part="valid", best_of=3),
        "bits": Metric(nan, nan, nan, 12, "too many are lost", part="valid", best_of=3),
        "kept": Metric(2.0, 1.0, 3.0, 12, EXTREMES, part="valid"),
    }
    assert metric_lines(metrics) == [
        "loss       2.5000   2.0000 to 3.0000   of 12 valid, 4 groups",
        "auroc           -   - to -   of 12 valid",
        "bits            -   too many are lost   of 12 valid",
        "kept       2.0000   least 1.0000, most 3.0000   of 12 valid",
        "valid chose the weights: its figures are the best of 3 checks of the same rows,",
        "and those of a test part would be a little worse",
    ]
    name = "x" * 60
    assert metric_lines({name: metrics["loss"]})[:2] == [
        name,
        "      2.5000   2.0000 to 3.0000   of 12 valid, 4 groups",
    ]
    assert metric_lines({}) == []


@pytest.mark.promise("data.parts")
def test_a_table_has_a_line_per_metric_within_80_columns_and_says_once_what_most_are_of():
    of = {"num_groups": 41, "part": "/data/of/the/other/hospital/measurements", "best_of": None}
    names = ["loss", "balanced_accuracy", "accuracy_of_all_applications"]
    metrics = {name: Metric(0.4146, 0.2764, 0.5530, 123, **of) for name in names}
    told = metric_lines(metrics)
    assert told[-1] == "of 123 /data/of/the/other/hospital/measurements, 41 groups"
    assert told[0] == f"{'loss':<28}      0.4146   0.2764 to 0.5530"
    assert len(told) == 4
    others = {"kept": replace(metrics["loss"], num=9), "all": Metric(0.5, 0.4, 0.6, 8, part="train")}
    told = metric_lines({**metrics, **others})
    assert told[3].endswith("0.5530   of 9, 41 groups")
    assert told[4].endswith("0.6000   of 8 train")
    assert " ".join(told[5:]) == f"of 123 {of['part']}, 41 groups, unless the line says otherwise"
    assert all(len(line) <= 80 for line in told)


@pytest.mark.promise("data.holdout")
def test_a_metric_of_one_group_or_of_equal_ones_has_no_interval_and_says_so():
    values, one = np.array([1.0, 2.0, 4.0]), np.zeros(3)
    for metric, told in (
        (mean_of(values, one), "no interval: one group   of 3, 1 group"),
        (mean_of(values[:1]), "no interval: one group   of 1"),
        (mean_of(np.array([0.0, 1.0, 1.0]), one, share=True), "no interval: one group   of 3, 1 group"),
        (mean_of(np.full(8, 0.1)), "no interval: the same in every group   of 8"),
        (measured(lambda w: ratio(values[:1], None, w), 1), "no interval: one group   of 1"),
    ):
        assert metric_lines({"loss": metric}) == [f"loss  {metric.value:>10.4f}   {told}"]
        found = metric.to_json()
        assert (found["low"], found["high"]) == (None, None)
        assert str(found["reason"]).startswith("no interval")
        assert json.loads(json.dumps(found, allow_nan=False)) == found
    kept = vqa.mode_metrics({"soft": np.ones(2), "hard": np.ones(2)}, np.zeros(2))
    assert (kept["accuracy_soft"].low, kept["accuracy_soft"].high) == (0.025, 1)
    assert (kept["soft_to_hard_gap"].low, kept["soft_to_hard_gap"].high) == (-0.975, 0.975)


def test_metrics_are_json_with_every_field():
    of = {"num": 12, "num_groups": 4, "num_censored": None, "part": "test", "best_of": None}
    metric = Metric(2.5, 2.0, 3.0, 12, num_groups=4, part="test")
    assert metric.to_json() == {"value": 2.5, "low": 2.0, "high": 3.0, **of}
    nothing = {"value": None, "low": None, "high": None}
    refused = Metric(math.nan, math.nan, math.nan, 12, "lost", num_groups=4, part="test")
    assert refused.to_json() == {**nothing, "reason": "lost", **of}
