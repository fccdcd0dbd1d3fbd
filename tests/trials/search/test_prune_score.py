"""The combined score is its formula, and orders models as one would."""

from __future__ import annotations

import pytest

from unpad.trials.search.search import prune_score


@pytest.mark.promise("vqa.search")
@pytest.mark.parametrize(
    ("origin", "accuracy", "keep", "wanted"),
    [
        (0.80, 0.80, 0.30, -0.03),
        (0.80, 0.78, 0.30, -0.02 * 2 - 0.03),  # a drop of 0.02 counts twice
        (0.80, 0.60, 0.30, -0.20 * 11 - 0.03),
        (0.80, 0.85, 0.30, 0.05 - 0.03),
        (0.80, 0.80, 0.60, -0.06),
        (0.80, 0.80, 0.70, -1.0),
        (0.80, 0.80, 0.04, -0.6),
        (0.80, 0.80, 0.10, -0.01),
        (0.80, 0.80, 1.00, -4.0),
    ],
)  # fmt: skip
def test_the_score_is_its_formula(origin: float, accuracy: float, keep: float, wanted: float) -> None:
    assert prune_score(origin, accuracy, keep) == pytest.approx(wanted, abs=1e-12)


def test_fewer_tokens_and_more_right_answers_are_better() -> None:
    assert prune_score(0.8, 0.8, 0.2) > prune_score(0.8, 0.8, 0.5) > prune_score(0.8, 0.8, 0.9)
    assert prune_score(0.8, 0.79, 0.3) > prune_score(0.8, 0.7, 0.2)
