"""Several examples of a patient: every measure counts them, and no interval takes them for as many patients."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.untrained_patients import Guess, draw
from unpad.data.measuring import Measuring
from unpad.evaluation.binary import exact_auroc, exact_concordance
from unpad.evaluation.metrics import Metric
from unpad.evaluation.paired import paired
from unpad.evaluation.patients import OF_OUTCOME, describe, held_out, outcome_rows
from unpad.evaluation.rows import GROUP, ID, LANDMARK, PART, ExampleRows, objects
from unpad.evaluation.sets import score_sets, summarise_sets
from unpad.inference.patients import PatientPredictions, predict
from unpad.recipes.training import PlanSettings

pytestmark = pytest.mark.promise("patients.landmarks")
PLAN = PlanSettings(tokens_per_micro=300)
TIMES = 3
NUM = 40


@pytest.fixture(scope="module")
def once() -> PatientPredictions:
    return predict(Measuring(Guess(), draw(NUM), np.arange(NUM), PLAN))


def thrice(predictions: PatientPredictions) -> PatientPredictions:
    """The same patients, each as three equal examples."""
    arrays = {name: values for name, values in vars(predictions).items() if isinstance(values, np.ndarray)}
    return replace(predictions, **{name: np.repeat(values, TIMES, 0) for name, values in arrays.items()})


def apart(predictions: PatientPredictions) -> PatientPredictions:
    """The same examples, as if each were of another patient."""
    return replace(predictions, patient=np.arange(len(predictions.patient)))


def bounds(metrics: dict[str, Metric]) -> dict[str, list[float]]:
    return {name: [one.value, one.low, one.high] for name, one in metrics.items()}


def test_intervals_of_patients_with_equal_examples_are_those_of_the_patients(once):
    expected = outcome_rows(once, True, True).metrics()
    told = outcome_rows(thrice(once), True, True).metrics()
    for name, values in bounds(told).items():
        if name != "calibration_error":  # its bins are between other numbers
            assert values == pytest.approx(bounds(expected)[name], nan_ok=True), name
        assert told[name].num == TIMES * expected[name].num
        assert told[name].num_groups == expected[name].num
    assert bounds(told) != bounds(outcome_rows(apart(thrice(once)), True, True).metrics()), (
        "as many patients as examples"
    )


def test_what_does_not_exist_is_of_as_many_patients(once):
    nobody = replace(once, labels=np.minimum(once.labels, 0), cause=np.zeros(NUM, np.int64))
    told = outcome_rows(thrice(nobody), True, True).metrics()
    for name, num in (("auroc", int(once.known.sum())), ("concordance", NUM)):
        assert math.isnan(told[name].value)
        assert (told[name].num, told[name].num_groups) == (TIMES * num, num)


def test_a_patient_in_a_bin_is_one_trial_of_what_is_drawn(once):
    points = describe(thrice(once))["calibration"]
    few, many = points[0], describe(apart(thrice(once)))["calibration"][0]
    assert sum(point["patients"] for point in points) == int(once.known.sum())
    assert many["patients"] == TIMES * few["patients"]
    assert few["high"] - few["low"] > many["high"] - many["low"], "and its interval is no narrower for it"


def test_exact_limits_take_every_patient_into_one_pair():
    labels, groups = np.array([1, 1, 1, 0, 0, 0]), np.array([0, 0, 1, 2, 2, 3])
    perfect = Metric(1.0, 1.0, 1.0, 6)
    assert exact_auroc(perfect, labels, groups).low == exact_auroc(perfect, labels[[0, 2, 3, 5]]).low
    mixed = exact_auroc(perfect, np.array([0, 1] * 3), np.array([0, 0, 1, 1, 2, 2]))
    assert mixed.low == pytest.approx(0.025), "three patients of both labels make one pair"
    waits = np.arange(1.0, 9.0)
    alone = exact_concordance(Metric(1.0, 1.0, 1.0, 8), waits, np.ones(8, bool))
    fewer = exact_concordance(Metric(1.0, 1.0, 1.0, 8), waits, np.ones(8, bool), np.arange(8) // 2)
    assert fewer.low < alone.low


def test_exact_limits_of_equal_examples_are_those_of_the_patients(once):
    place = np.arange(NUM) % 3
    classed = replace(once, labels=place, log_p=np.log(0.1 + 0.7 * np.eye(3)[place]), classes=("a", "b", "c"))
    came = (place == 2).astype(np.int64)
    outcome = replace(
        once, labels=came, log_p=classed.log_p[:, [0, 2]], risk=1.0 * came, durations=2.0 - came, cause=came
    )
    competing = replace(outcome, cause=2 * came, competing=0.1 + 0.5 * came[:, None])
    for told, expected in (
        (outcome_rows(thrice(classed), True, False).metrics(), outcome_rows(classed, True, False).metrics()),
        (outcome_rows(thrice(outcome), True, True).metrics(), outcome_rows(outcome, True, True).metrics()),
        (
            outcome_rows(thrice(competing), False, False, ("x",), 1.0).metrics(),
            outcome_rows(competing, False, False, ("x",), 1.0).metrics(),
        ),
    ):
        perfect = [name for name in told if name.startswith(("auroc", "concordance", "accuracy"))]
        assert {told[name].value for name in perfect} == {1.0}
        for name in perfect:  # a share of pairs is not exactly that of thrice as many
            assert told[name].low == pytest.approx(expected[name].low, abs=0.01 * name.startswith("conc")), name


def test_intervals_over_sets_draw_patients(monkeypatch):
    data = draw(NUM)
    scores = score_sets(Measuring(Guess(), data, np.arange(NUM), PLAN), True, True)
    pairs = np.arange(NUM) // 2
    told, alone = summarise_sets(scores, groups=pairs), summarise_sets(scores)
    assert {name: one.value for name, one in told.items()} == {name: one.value for name, one in alone.items()}
    assert told["reconstruction"].num_groups == NUM // 2
    assert told["reconstruction"].low != alone["reconstruction"].low


@pytest.mark.parametrize("classes", [(), ("home", "moved", "died")])
def test_chance_in_training_is_that_of_as_many_patients(monkeypatch, classes):
    data, num_known = draw(NUM), int((draw(NUM).labels >= 0).sum())
    model = Guess(classes=len(classes) or 2)
    monkeypatch.setitem(vars(data), "classes", classes)
    assert held_out(Measuring(model, data, np.arange(NUM), PLAN)).num_targets == num_known
    table = replace(data.table, group=np.arange(NUM) // 2)
    monkeypatch.setitem(vars(data), "table", table)
    fewer = held_out(Measuring(model, data, np.arange(NUM), PLAN)).num_targets
    assert fewer == len(np.unique(table.group[data.labels >= 0])) < num_known


# --------------------------------------------------------------------------- two runs


def rows_of(ids: list[int], landmarks: list[float], loss: list[float], **columns: Any) -> ExampleRows:
    num = len(ids)
    first = {ID: np.array(ids), LANDMARK: np.array(landmarks), GROUP: np.array(ids), PART: objects(["valid"] * num)}
    known = {"loss": np.array(loss), "num_targets": np.ones(num, np.int64)}
    measures = {name: OF_OUTCOME[name] for name in ("loss", "auroc") if name == "loss" or "label" in columns}
    return ExampleRows({**first, **known, **columns}, measures)


def test_rows_of_two_runs_are_paired_by_id_and_landmark():
    a = rows_of([7, 7, 7, 8], [24, 48, 72, 24], [1.0, 2.0, 3.0, 4.0])
    found = paired("a", "b", [a], [rows_of([8, 7, 7], [24, 72, 24], [4.5, 3.5, 1.5])])
    assert (found.common, found.only_first, found.only_second) == (3, 1, 0)
    assert found.differences["loss"].value == pytest.approx(0.5)
    assert found.differences["loss"].num_groups == 2


def test_ranks_of_two_runs_are_compared_over_patients(once):
    rng, known = np.random.default_rng(0), once.known
    labels, p = once.labels[known], once.p[known]
    num, other = len(labels), np.clip(once.p[known] + rng.normal(0, 0.3, len(labels)), 0.01, 0.99)

    def run(p: np.ndarray, times: int, groups: np.ndarray) -> ExampleRows:
        ids, at = np.repeat(np.arange(num), times), np.tile(np.arange(times), num)
        columns = {"label": np.repeat(labels, times).astype(object), "probability": np.repeat(p, times), GROUP: groups}
        return rows_of(ids.tolist(), at.tolist(), [0.0] * len(ids), **columns)

    alone = paired("a", "b", *([run(one, 1, np.arange(num))] for one in (p, other))).differences["auroc"]
    groups = np.repeat(np.arange(num), TIMES)
    told = paired("a", "b", *([run(one, TIMES, groups)] for one in (p, other))).differences["auroc"]
    assert (told.value, told.low, told.high) == pytest.approx((alone.value, alone.low, alone.high))
    assert (told.num, told.num_groups) == (TIMES * num, num)


def test_intervals_of_several_classes_and_of_competing_events_are_over_patients(once):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(NUM, 3))
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    classed = replace(once, log_p=log_p, labels=rng.integers(0, 3, NUM), classes=("a", "b", "c"))
    competing = replace(once, competing=rng.random((NUM, 1)), cause=rng.integers(0, 3, NUM))
    for expected, told in (
        (outcome_rows(classed, True, False).metrics(), outcome_rows(thrice(classed), True, False).metrics()),
        (
            outcome_rows(competing, False, False, ("other",), 500.0).metrics(),
            outcome_rows(thrice(competing), False, False, ("other",), 500.0).metrics(),
        ),
    ):
        assert set(told) == set(expected) != set()
        for name, values in bounds(told).items():
            if name != "calibration_error":  # its bins are between other numbers
                assert values == pytest.approx(bounds(expected)[name], nan_ok=True), name
            assert (told[name].num, told[name].num_groups) == (TIMES * expected[name].num, expected[name].num)
