"""A recipe is shortened to fit the time, and in words that say how."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.toy import write_toy
from unpad.drill.drill import FEWEST, MOST, STAND_IN_STEPS, TrainingCost, bounded, stand_in
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe, stages_of


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    plan = {"tokens_per_step": 3200, "tokens_per_micro": 90, "grow": {2: 6400}}
    stages = [{"name": "one", "plan": {"tokens_per_step": 1600}}, {"name": "two"}]
    limits = {"max_epochs": 3, "shard": "full"}
    path = write_toy(tmp_path, plan=plan, stages=stages, train=limits, checkpoint={"every_seconds": 60})
    return load_recipe(str(path))


@pytest.mark.promise("drill.kills")
@pytest.mark.parametrize(
    ("step", "steps", "tokens", "is_own"),
    [
        (0.01, MOST, (1600, 3200), True),
        (1.0, 22, (1600, 3200), True),
        (5.0, FEWEST, (1600, 1600), True),
        (500.0, STAND_IN_STEPS, None, False),
    ],
)
def test_steps_that_are_slow_are_fewer_then_smaller_then_of_another_recipe(
    recipe: Recipe, step: float, steps: int, tokens: tuple[int, int] | None, is_own: bool
) -> None:
    made = bounded(recipe, TrainingCost(start=1.0, step=step, evaluation=0.5, checkpoint=0.1), "bf16", 150.0, 1000)
    assert (made.recipe.train.max_steps, made.is_own) == (steps, is_own)
    assert (made.recipe.train.shard, made.recipe.checkpoint.every_seconds) == ("none", None)
    assert made.recipe.checkpoint.every == max(steps // 6, 1), "so that a kill falls between two checkpoints"
    if tokens is None:
        assert "zh_chat" in made.notes[0]
        assert "a step 500.0 s" in made.notes[0]
    else:
        assert made.recipe.precision == "bf16"
        assert f"first {steps} steps" in made.notes[0]
        if steps == FEWEST:
            assert {stage.recipe.plan.tokens_per_step for stage in stages_of(made.recipe)} == {1600}
            assert "updates of 1,600 tokens" in made.notes[0]
        else:
            assert tuple(stage.recipe.plan.tokens_per_step for stage in stages_of(made.recipe)) == tokens


def test_a_recipe_of_few_steps_keeps_its_length_and_a_slow_start_is_named(recipe: Recipe) -> None:
    cost = TrainingCost(start=1.0, step=0.01, evaluation=0.1, checkpoint=0.1)
    assert bounded(recipe, cost, "fp32", 150.0, 5).recipe.train.max_steps == 5
    slow = bounded(recipe, TrainingCost(start=100.0, step=0.01, evaluation=0.1, checkpoint=0.1), "fp32", 150.0, 1000)
    assert "a start takes 100 s" in slow.notes[0]
    assert Recipe(**stand_in("why").recipe.model_dump()).train.max_steps == STAND_IN_STEPS
