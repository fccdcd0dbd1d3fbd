"""When questions about pictures are judged, and what is said of labels of which nothing holds for others."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from unpad.data.images import ImageData
from unpad.doctor.trials import carry
from unpad.doctor.trials.carry import Carry, judge_carry

LEARNT, JUDGED = np.arange(30), np.arange(30, 60)


@pytest.mark.promise("doctor.questions")
@pytest.mark.parametrize(
    ("ours", "theirs", "is_judged"),
    [
        ((0.5, 0.05), (0.0, 0.02), True),  # nothing holds for others, as far as that can be seen
        ((0.5, 0.05), (0.4, 0.2), True),  # it holds
        ((0.5, 0.05), (0.0, 0.2), False),  # too few others to see it
        ((0.03, 0.005), (0.0, 0.001), False),  # hardly any help: the answers were learnt without pictures
        ((0.5, 0.2), (0.0, 0.02), False),  # a chance of many looks
        ((math.inf, 1.0), (0.0, 0.02), False),  # too few questions
    ],
)
def test_questions_are_judged_only_where_pictures_help_what_was_learnt_and_the_others_could_show_it(
    monkeypatch: pytest.MonkeyPatch, ours: tuple[float, float], theirs: tuple[float, float], is_judged: bool
) -> None:
    monkeypatch.setattr(carry, "_help_of_pictures", lambda data, trial, ids: ours if ids[0] == 0 else theirs)
    assert carry._pictures_are_seen(cast(Any, None), cast(Any, None), LEARNT, JUDGED) is is_judged


@pytest.mark.parametrize(("flip", "code"), [(0.0, "labels_random"), (0.5, "labels_flipped")])
def test_labels_beside_mirrored_pictures_name_the_field_that_mirrors(flip: float, code: str) -> None:
    recipe = SimpleNamespace(images=SimpleNamespace(flip=flip))
    data = object.__new__(ImageData)
    vars(data).update(labels=np.zeros(2, np.int64), classes=("dark", "light"))
    subject = SimpleNamespace(data=data, setup=SimpleNamespace(recipe=recipe))
    # Weak labels of few look like none.
    for errors, rarer, severity in (
        (1.2, None, "warning"),
        (1.2, 32, "warning"),
        (1.2, 14, "note"),
        (-2.9, 14, "warning"),
    ):
        (found,) = judge_carry(cast(Any, subject), Carry(256, 64, rarer, 1.0, 0.1, errors, 120, by_heart=True))
        assert (found.code, found.fields[0]) == (code, "images.flip" if flip else "data.images")
        assert found.severity == severity
