"""What trials and the load of the machine are judged by."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unpad.doctor.examine import short
from unpad.doctor.trials import Carry, Overfit, Sweep, System, by_heart, labels_random, threads
from unpad.machine import Load

WHOLE = Sweep(np.ones(100), np.ones(100), 1e-3, 1e-2)


@pytest.mark.promise("doctor.cut-short")
def test_the_trial_that_was_cut_short_most_says_so_and_how_much_time_it_takes():
    cut = Sweep(np.zeros(0), np.zeros(0), None, None, short=3)
    labels = Carry(30, 30, None, 1.0, 0.9, 0.0, steps=240, is_short=True)
    (found,) = short(20.0, cut, Overfit(4, 12, 5.0, 4.9, None), labels)
    assert (found.severity, found.fields) == ("note", ("--seconds",))
    reason, advice = found.sentences("en")
    assert reason.startswith("Only 3 of at least 24 learning rates could be tried")
    assert advice.endswith("--seconds 240")
    (found,) = short(20.0, WHOLE, Overfit(60, 12, 5.0, 0.1, None), labels)
    assert found.sentences("en")[0].startswith("Only 240 of at least 360 steps on labelled sequences")


def test_trials_that_were_learnt_or_ended_by_themselves_are_judged():
    for overfit in (Overfit(4, 12, 5.0, 0.9, None), Overfit(4, 12, 5.0, 9.0, None, is_lost=True)):
        assert short(20.0, WHOLE, overfit, None) == []


def test_a_batch_that_is_not_learnt_names_the_data_or_the_settings():
    subject: Any = SimpleNamespace(field=lambda name: name)
    assert by_heart(subject, Overfit(4, 60, 5.0, 1.0, None), WHOLE) == []
    for plain, field in ((4.9, "data"), (1.0, "optim")):
        (found,) = by_heart(subject, Overfit(4, 60, 5.0, 4.9, plain), WHOLE)
        assert (found.code, found.fields[0]) == ("by_heart", field)


@pytest.mark.promise("doctor.threads")
@pytest.mark.promise("doctor.machine")
@pytest.mark.parametrize(
    ("load", "few"), [(Load(1.0, 0.0), True), (Load(1.0, 0.3), False), (Load(1.0, 0.9), False), (None, False)]
)
def test_more_threads_are_never_advised_while_others_use_the_cores_or_nobody_knows(load, few):
    setup = SimpleNamespace(device=SimpleNamespace(type="cpu"), recipe=SimpleNamespace(profile="standard"))
    subject: Any = SimpleNamespace(setup=setup)
    readings = System(cores=lambda: 2, quota=lambda: None, threads=lambda: 1)
    assert bool(threads(subject, readings, load)) is few


@pytest.mark.parametrize("flip", [0.0, 0.5])
def test_labels_beside_mirrored_pictures_name_the_field_that_mirrors_and_weak_ones_are_a_note(flip):
    recipe = SimpleNamespace(images=SimpleNamespace(flip=flip))
    data = SimpleNamespace(label_fields=(), kinds=("images",), augmentation="images")
    subject: Any = SimpleNamespace(data=data, setup=SimpleNamespace(recipe=recipe))
    for errors, rarer, severity in ((1.2, None, "warning"), (1.2, 14, "note"), (-2.9, 14, "warning")):
        (found,) = labels_random(subject, Carry(256, 64, rarer, 1.0, 0.1, errors, 120, by_heart=True))
        assert (found.severity, found.fields[0]) == (severity, "images.flip" if flip else "data.images")
    assert labels_random(subject, Carry(256, 64, None, 1.0, 0.1, 3.0, 120, by_heart=True)) == []
