"""The way of dividing a model that a recipe asks for, and what follows from it."""

from __future__ import annotations

from typing import Any

import pytest

from unpad.processes.group import ALONE, Group
from unpad.recipes.recipe import Recipe
from unpad.training.memory import Room
from unpad.training.parallel.divisions import alone, asked, parallelism_of
from unpad.training.parallel.parallelism import Parallelism, Replicas
from unpad.training.parallel.pipeline_stages import PipelineStages
from unpad.training.parallel.sharding import Sharding

TWO = Group(size=2)


def recipe_of(**train: Any) -> Recipe:
    return Recipe(model={"kind": "decoder"}, train=train)


@pytest.mark.parametrize(
    ("train", "division"),
    [
        ({}, Replicas),
        ({"shard": "full"}, Sharding),
        ({"pipeline_stages": 2}, PipelineStages),
        ({"shard": "full", "pipeline_stages": 2}, PipelineStages),
    ],
)
def test_several_processes_divide_a_model_as_the_recipe_asks_and_one_holds_the_whole(
    train: dict[str, Any], division: type[Parallelism]
) -> None:
    recipe = recipe_of(max_steps=7, **train)
    assert (asked(recipe), parallelism_of(recipe, TWO)) == (division, division)
    assert parallelism_of(recipe, ALONE) is Replicas
    assert alone(recipe).train == recipe_of(max_steps=7).train
    assert asked(alone(recipe)) is Replicas


def test_micro_batches_are_cut_where_no_other_process_waits_for_their_passes() -> None:
    for kind in ("exact", "fast"):
        assert Replicas(ALONE).room(kind, 7) == Room(7)
    assert Replicas(TWO).room("exact", 7) == Room(7)
    assert Replicas(TWO).room("fast", 7) is None
