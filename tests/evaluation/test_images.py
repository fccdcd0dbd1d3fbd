"""Measures of image classifiers equal plain loops over the images, also in every resample."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unpad.data.measuring import Measuring
from unpad.evaluation import images
from unpad.evaluation.classes import ClassPredictions
from unpad.evaluation.images import describe, evaluate, summarise
from unpad.evaluation.metrics import draws, student
from unpad.recipes.training import PlanSettings

CLASSES = ("a", "b", "c", "d", "e", "f", "none of these")


def predictions(num: int = 14, seed: int = 3) -> tuple[ClassPredictions, np.ndarray]:
    """Predictions for images of six of the classes, of which d has two and e one, and groups of one to three images."""
    rng = np.random.default_rng(seed)
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 5, 5])[:num]
    logits = rng.normal(size=(num, len(CLASSES))) + 1.5 * np.eye(len(CLASSES))[labels]
    logits[[9, 10], 3] = [5, -5]  # one of d is right
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return ClassPredictions(log_p, labels), np.array([7, 7, 2, 2, 2, 9, 4, 4, 5, 1, 0, 6, 3, 3])[:num]


def by_hand(found: ClassPredictions, items: list[int], classes: list[int]) -> dict[str, float]:
    """Metrics of some images, each as often as it occurs in `items`; not a number for a class without an image."""
    p = np.exp(found.log_p)
    right = {i: p[i].argmax() == found.labels[i] for i in set(items)}
    values = {
        "accuracy": np.mean([right[i] for i in items]),
        "commonest_class": np.mean([found.labels[i] == 0 for i in items]),
        "top5_accuracy": np.mean([sum(p[i] > p[i, found.labels[i]]) < 5 for i in items]),
    }
    recalls = {}
    for c in classes:
        mine = [right[i] for i in items if found.labels[i] == c]
        recalls[f"accuracy_{CLASSES[c]}"] = np.mean(mine) if mine else math.nan
    values["balanced_accuracy"] = np.nanmean(list(recalls.values()))
    values["loss"] = np.mean([-math.log(p[i, found.labels[i]]) for i in items])
    bins = [min(int(p[i].max() * 10), 9) for i in items]
    gaps = [abs(sum(p[i].max() - right[i] for i, b in zip(items, bins, strict=True) if b == one)) for one in set(bins)]
    values["calibration_error"] = sum(gaps) / len(items)
    return {name: float(value) for name, value in (values | recalls).items()}


def logit(share: float) -> float:
    return math.log(share / (1 - share))


def test_values_and_intervals_equal_those_of_plain_loops():
    found, groups = predictions()
    metrics = summarise(found, CLASSES, groups)
    present, names = sorted(set(found.labels.tolist())), sorted(set(groups.tolist()))
    expected = by_hand(found, list(range(14)), present)
    assert list(metrics) == list(expected)
    assert {name: metric.value for name, metric in metrics.items()} == pytest.approx(expected)
    resamples = []
    for times in draws(len(names)):
        drawn = [i for i in range(14) for _ in range(times[names.index(groups[i])])]
        resamples.append(by_hand(found, drawn, present))
    for name, metric in metrics.items():
        of_class = name.removeprefix("accuracy_") if name.startswith("accuracy_") else None
        own = [i for i in range(14) if of_class in (None, CLASSES[found.labels[i]])]
        units = len({groups[i] for i in own})
        assert (metric.num, metric.num_groups) == (len(own), None if units == len(own) else units), name
        if metric.value in (0.0, 1.0):
            limit = 0.025 ** (1 / units)
            assert (metric.low, metric.high) == pytest.approx((limit, 1) if metric.value else (0, 1 - limit)), name
            continue
        spread = [one[name] for one in resamples if not math.isnan(one[name])]
        if name == "calibration_error" or min(spread) == max(spread):
            assert math.isnan(metric.low), name
            continue
        reach = student(units - 1) * np.std(spread) * math.sqrt(units / (units - 1))
        for end, sign in ((metric.low, -1), (metric.high, 1)):  # symmetric in the logit, or in the logarithm
            scale, slope = (
                (math.log, 1 / metric.value) if name == "loss" else (logit, 1 / metric.value / (1 - metric.value))
            )
            assert scale(end) == pytest.approx(scale(metric.value) + sign * reach * slope), name
    assert 0 < metrics["accuracy_d"].value < 1, "a class that some resamples lack"
    assert len(spread) < 1000


def test_each_image_is_a_group_by_default_and_five_classes_have_no_top_five():
    found, _ = predictions(11)
    assert summarise(found, CLASSES) == summarise(found, CLASSES, np.arange(11))
    assert "top5_accuracy" not in summarise(ClassPredictions(found.log_p[:, :5], found.labels), CLASSES[:5])
    assert "top5_accuracy" in summarise(ClassPredictions(found.log_p[:, :6], found.labels), CLASSES[:6])


def test_perfect_balance_is_as_sure_as_its_rarest_class():
    labels = np.array([0] * 30 + [1] * 3)
    sure = ClassPredictions(np.log(np.where(labels[:, None] == [0, 1], 0.9, 0.1)), labels)
    metrics = summarise(sure, ("a", "b"))
    assert metrics["balanced_accuracy"].low == pytest.approx(0.025 ** (1 / 3))
    assert metrics["accuracy"].low == pytest.approx(0.025 ** (1 / 33))


def test_what_the_page_draws_counts_every_image_once():
    p = np.array([[0.95, 0.05], [0.85, 0.15], [0.2, 0.8], [0.1, 0.9], [0.0, 1.0]])
    with np.errstate(divide="ignore"):
        found = ClassPredictions(np.log(p), np.array([0, 1, 1, 1, 0]))
    drawn = describe(found, ("x", "y"))
    assert drawn["classes"] == ["x", "y"]
    assert drawn["confusion"] == [[1, 1], [1, 2]], "rows are the true classes"
    assert drawn["calibration"] == [
        {"confidence": pytest.approx(0.825), "accuracy": 0.5, "images": 2},
        {"confidence": pytest.approx(0.95), "accuracy": pytest.approx(2 / 3), "images": 3},
    ]


def test_an_evaluation_shows_the_surest_mistakes_first(monkeypatch):
    found, groups = predictions()
    asked: list[Any] = []
    monkeypatch.setattr(images, "predict", lambda over: asked.append(over) or found)
    data: Any = SimpleNamespace(
        classes=CLASSES, table=SimpleNamespace(group=np.arange(100, 140)), where=lambda seq: f"image {seq}"
    )
    data.table.group[20:34] = groups
    run: Any = SimpleNamespace()
    over = Measuring[Any](run, data, np.arange(20, 34), PlanSettings())
    made = evaluate(run, over, 2)
    assert asked == [over]
    assert repr(made.metrics) == repr(summarise(found, CLASSES, groups=groups)), "a bound that is nan equals nothing"
    assert made.drawn == describe(found, CLASSES)
    p = np.exp(found.log_p)
    wrong = sorted((i for i in range(14) if not found.right[i]), key=lambda i: -p[i].max())[:2]
    assert made.lines == [
        f"image {20 + i}: {CLASSES[p[i].argmax()]} with {p[i].max():.0%}, it is {CLASSES[found.labels[i]]}"
        for i in wrong
    ]
    assert evaluate(run, over, 0).lines == []
