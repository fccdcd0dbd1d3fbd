"""What sections of a recipe say about themselves: growing steps, ramps, pictures of drawn sizes."""

import math

import pytest

from unpad.recipes.data import CHANGES, ImageSettings
from unpad.recipes.training import PlanSettings, Ramp


@pytest.mark.parametrize(
    ("fields", "draws", "augments"),
    [
        ({}, False, False), ({"scale": 0.5}, True, True), ({"scale": 0.5, "size": "square"}, False, True),
        ({"zoom": 0.5}, False, True), ({"flip": 0.5, "size": "square"}, False, True),
    ],
)  # fmt: skip
def test_only_pictures_of_their_own_size_are_drawn_in_other_sizes(fields, draws, augments):
    settings = ImageSettings(**fields)
    assert (settings.draws_sizes, settings.augments) == (draws, augments)
    assert settings.plain() == ImageSettings(**{name: value for name, value in fields.items() if name not in CHANGES})


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_of_a_picture_is_an_augmentation(name):
    assert ImageSettings(**{name: 0.25}).augments
    assert ImageSettings(**{name: 0.25}).identity() != ImageSettings().identity()
    assert ImageSettings(cache_mib=3).identity() == ImageSettings().identity(), "memory changes no pixel"


def test_steps_grow_by_epoch_or_within_one():
    epochs = PlanSettings(tokens_per_step=100, grow={6: 800, 3: 400})
    told = [[(steps, part.tokens_per_step, part.grow) for steps, part in epochs.parts(n, 50)] for n in range(7)]
    assert told == [[(None, size, {})] for size in (100, 100, 400, 400, 400, 800, 800)]
    steps = PlanSettings(tokens_per_step=100, grow={3: 400, 6: 800}, grow_per="step")
    told = [[(num, part.tokens_per_step, part.grow) for num, part in steps.parts(9, first)] for first in (0, 2, 4, 5)]
    assert told == [
        [(2, 100, {}), (3, 400, {}), (None, 800, {})],
        [(3, 400, {}), (None, 800, {})],
        [(1, 400, {}), (None, 800, {})],
        [(None, 800, {})],
    ]


def test_a_ramp_leads_from_its_start_to_its_end_and_stays_there():
    linear, share = Ramp(start=1.0, end=3.0, steps=4), Ramp(start=1.0, end=3.0, share=0.5)
    assert [linear.at(step, 100) for step in range(6)] == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0]
    assert [share.at(step, 8) for step in range(6)] == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0]
    cosine = Ramp(end=2.0, steps=4, shape="cosine")
    assert [cosine.at(step, 4) for step in range(6)] == pytest.approx(
        [0, 1 - math.sqrt(0.5), 1, 1 + math.sqrt(0.5), 2, 2]
    )
    assert share.at(0, 0) == 3.0, "a stage without steps"
