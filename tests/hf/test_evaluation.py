"""Metrics that count padding are told, and no others; what they keep from call to call stays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from transformers import EvalPrediction

from tests.hf.families import IGNORED
from unpad.hf.evaluation import counted_padding

draw = np.random.default_rng(0)
LABELS = draw.integers(0, 9, (6, 11))
LABELS[::2, 7:] = IGNORED
PREDICTIONS = np.where(draw.random((6, 11)) < 0.5, LABELS, draw.integers(0, 9, (6, 11)))
calls = 0


def over_all(given: Any) -> dict[str, float]:
    return {"accuracy": float((given.predictions == given.label_ids).mean())}


def as_token(given: Any) -> dict[str, float]:
    given.label_ids[given.label_ids == IGNORED] = 0
    return over_all(given)


def of_targets(given: Any, ignored: int = IGNORED) -> dict[str, float]:
    real = given.label_ids != ignored
    return {"accuracy": float((given.predictions == given.label_ids)[real].mean()), "none": float("nan")}


def drawn(given: Any) -> dict[str, float]:
    return {"accuracy": over_all(given)["accuracy"] + np.random.random()}


def raising(given: Any) -> dict[str, float]:
    assert given.label_ids.shape == LABELS.shape
    return over_all(given)


def counting(given: Any) -> dict[str, float]:
    global calls
    calls += 1
    return {**over_all(given), "calls": calls}


class Best:
    """Keeps the best of all calls."""

    def __init__(self) -> None:
        self.best, self.history = 0.0, list[float]()

    def __call__(self, given: Any) -> dict[str, float]:
        self.history.append(over_all(given)["accuracy"])
        self.best = max(self.best, self.history[-1])
        return {"best": self.best}


def predicted(predictions: Any = PREDICTIONS) -> EvalPrediction:
    return EvalPrediction(predictions=predictions.copy(), label_ids=LABELS.copy())


@pytest.mark.parametrize(
    ("compute", "told"),
    [(over_all, True), (as_token, True), (partial(of_targets, ignored=-1), True), (of_targets, False), (drawn, False),
     (raising, False), (counting, False)],
)  # fmt: skip
def test_a_metric_is_told_if_more_padding_changes_it(compute: Callable[[Any], Any], told: bool) -> None:
    try:
        words = counted_padding(compute, predicted())
    except AssertionError:
        words = ""
    assert words.startswith("accuracy is ") == told


def test_what_a_metric_keeps_stays_as_it_was() -> None:
    best, seen = Best(), list[float]()

    def around(given: Any) -> dict[str, float]:
        seen.append(0.5)
        return {"num": len(seen)}

    for compute in (best, best.__call__, around, counting):
        counted_padding(compute, predicted())
    assert (best.best, best.history, seen, calls) == (0.0, [], [], 0)


def test_shifted_predictions_and_numbers_of_rows_are_padded_as_transformers_does() -> None:
    def of_shifted(given: Any) -> dict[str, float]:
        scores, labels = given.predictions, given.label_ids[:, 1:]
        return {"score": float(scores[labels != IGNORED].mean()), "rows": float(len(scores))}

    assert counted_padding(of_shifted, predicted(PREDICTIONS[:, 1:])) == ""
    assert counted_padding(lambda given: {"mean": given.predictions.mean()}, predicted(PREDICTIONS[:, 0])) == ""
