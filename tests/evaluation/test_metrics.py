"""Every metric of every family says whether more or less of it is better."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch

from tests.helpers.untrained_patients import CODES, Guess, draw
from unpad.errors import RecipeError
from unpad.evaluation import images, patients, sets, text, vqa_kept
from unpad.evaluation.binary import mean, measured
from unpad.evaluation.metrics import known_metrics, mean_of
from unpad.inference.patients import predict
from unpad.recipes.training import PlanSettings
from unpad.trials.search.metric import direction

# Parts of names by which a search told more from less before families declared it.
MORE = ("accuracy", "auroc", "average_precision", "concordance", "keywords", "recall", "score")
LESS = ("loss", "perplexity", "bits_per", "brier", "calibration_error", "reconstruction", "made_code")


def undeclared(family: str, metrics: Iterable[str]) -> list[str]:
    """Metrics that do not match exactly one pattern of their family."""
    patterns = known_metrics(family)
    return [name for name in metrics if sum(fnmatchcase(name, pattern) for pattern in patterns) != 1]


def of_text() -> list[str]:
    sums = text.DocumentSums(*(np.ones(3) for _ in range(4)))
    names = list(text.summarise(sums))
    return [*(kind + name for kind in ("", "text_", "chat_") for name in names), "keywords_trained", "keywords_heldout"]


def of_images() -> list[str]:
    classes = ("loss", "brier", "a*b", "[c]", "冰", "e", "g")
    scores = np.log(np.random.default_rng(0).dirichlet(np.ones(7), 21))
    return list(images.summarise(images.ImagePredictions(scores, np.arange(21) % 7), classes))


def of_vqa() -> list[str]:
    kept = vqa_kept.kept_metrics(np.array([8, 8]), np.array([4, 4]), np.array([[4, 2], [4, 2]]))
    modes = vqa_kept.mode_metrics({mode: np.ones(2) for mode in ("origin", "merge_only", "soft", "hard")})
    return ["loss", "perplexity", "accuracy", "caption_accuracy", "accuracy: 什么颜色？", *modes, *kept]


def of_patients() -> list[str]:
    settings, device = PlanSettings(tokens_per_micro=300), torch.device("cpu")
    found = predict(Guess(), draw(), np.arange(40), settings, device)
    scores = sets.score_sets(Guess(), draw(), np.arange(40), settings, device, True, True)
    return [*patients.summarise(found, True, True), *sets.summarise_sets(scores, CODES)]


FAMILIES = {"text": of_text, "images": of_images, "vqa": of_vqa, "patients": of_patients}


def guessed(metric: str) -> int | None:
    """The direction of a metric by parts of its name; None where that was refused."""
    if any(part in metric for part in MORE):
        return -1
    return 1 if any(part in metric for part in LESS) else None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_metric_matches_one_declaration_and_none_is_idle(family: str) -> None:
    names = FAMILIES[family]()
    assert undeclared(family, names) == []
    assert [p for p in known_metrics(family) if not any(fnmatchcase(name, p) for name in names)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_directions_are_those_that_were_guessed_from_names(family: str) -> None:
    for name in [*FAMILIES[family](), "score"]:
        try:
            declared: int | None = direction(name, family)
        except RecipeError:
            declared = None
        assert declared == guessed(name), name


def test_a_name_of_the_data_does_not_turn_a_metric_round() -> None:
    assert direction("made_code: recall", "patients") == 1
    assert direction("accuracy_loss", "images") == -1


def test_a_metric_of_another_family_or_without_a_direction_is_refused_with_those_that_fit() -> None:
    for name in ("auroc", "speed", "prevalence"):
        with pytest.raises(RecipeError, match="better is not known") as caught:
            direction(name, "text")
        assert "keywords_NAME" in caught.value.fix
    with pytest.raises(RecipeError, match="better is not known"):
        direction("prevalence", "patients")


def test_an_interval_is_of_ninety_five_percent_and_of_no_other_share() -> None:
    values = np.random.default_rng(0).normal(3, 0.5, 4000)
    error = values.std() / math.sqrt(len(values))
    for metric in (mean_of(values), measured(lambda w: mean(values, w), len(values))):
        reach = (metric.high - metric.low) / 2 / error  # 1.645 of 90 %, 1.96 of 95 %, 2.576 of 99 %
        assert reach == pytest.approx(1.96, abs=0.12)


@pytest.mark.parametrize(("num", "limit"), [(1, 0.025), (10, 0.6915), (15, 0.7820), (50, 0.9289), (100, 0.9638)])
def test_all_or_none_right_has_the_exact_interval(num: int, limit: float) -> None:
    # Limits of Clopper and Pearson for n of n, as tables have them.
    right = mean_of(np.ones(num), share=True)
    assert (right.value, right.high) == (1, 1)
    assert right.low == pytest.approx(limit, abs=1e-4)
    wrong = mean_of(np.zeros(num), share=True)
    assert (wrong.value, wrong.low) == (0, 0)
    assert wrong.high == pytest.approx(1 - limit, abs=1e-4)
    some = measured(lambda w: mean(np.ones(num), w), num, share=True)
    assert some.low == pytest.approx(limit, abs=1e-4)


def test_intervals_count_groups_and_not_their_members() -> None:
    values = np.random.default_rng(0).normal(size=100)
    groups = np.arange(100)
    alone, copied = mean_of(values, groups), mean_of(np.repeat(values, 20), np.repeat(groups, 20))
    assert (copied.value, copied.low, copied.high) == pytest.approx((alone.value, alone.low, alone.high))
    assert (alone.num, alone.num_groups, copied.num, copied.num_groups) == (100, None, 2000, 100)
    assert mean_of(np.repeat(values, 20)).high < alone.high
    right = mean_of(np.ones(60), np.repeat(np.arange(15), 4), share=True)
    assert right.low == pytest.approx(0.7820, abs=1e-4)
