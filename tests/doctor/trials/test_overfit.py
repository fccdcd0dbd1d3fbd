"""A batch that the recipe's optimizer does not learn, and the setting that is to blame."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import families
from unpad.doctor.subject import TimeBudget, open_subject
from unpad.doctor.trials import overfit
from unpad.doctor.trials.sweep import Sweep
from unpad.doctor.words import sentences

NO_RANGE = Sweep(np.zeros(0), np.zeros(0), None, None)


@pytest.mark.promise("doctor.findings")
@pytest.mark.parametrize("changed", ["lr=1e-6", "lr_scale=1e-6"])
def test_a_rate_that_alone_was_changed_is_named_with_its_default(
    tmp_path: Path, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps in ("STEPS", "LEAST_STEPS"):
        monkeypatch.setattr(overfit, steps, 12)
    monkeypatch.setattr(overfit, "SEQUENCES", 4)
    recipe = families.images(tmp_path, num=24, train={"threads": 1})
    subject = open_subject(str(recipe), [f"optim.{changed}"], TimeBudget(600.0, time.process_time))
    name = changed.partition("=")[0]
    [found] = overfit.judge(subject, overfit.overfit_batch(subject, NO_RANGE, 300.0), NO_RANGE)
    assert (found.code, found.fields) == ("setting", (f"optim.{name}",))
    default = {"lr": "0.001", "lr_scale": "1.0"}[name]
    assert sentences(found, "en")[1] == f"set optim.{name}={default}, its default"
