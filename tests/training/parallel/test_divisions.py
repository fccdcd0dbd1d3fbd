"""The way of dividing a model that a recipe asks for, and what follows from it."""

from typing import Any

import pytest

from unpad.errors import RecipeError
from unpad.processes.group import ALONE, Group
from unpad.processes.sums import sum_kind
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe
from unpad.run.folder import RECIPE, run_recipe
from unpad.training.memory import Room
from unpad.training.parallel.divisions import alone, parallelism_class, parallelism_of
from unpad.training.parallel.parallelism import Replicas
from unpad.training.parallel.sharding import Sharding

TWO = Group(size=2)


def recipe_of(**train: Any) -> Recipe:
    return Recipe(model={"kind": "decoder"}, train=train)


@pytest.mark.parametrize(("train", "division"), [({}, Replicas), ({"shard": "full"}, Sharding)])
def test_several_processes_divide_a_model_as_the_recipe_asks_and_one_holds_the_whole(train, division):
    recipe = recipe_of(max_steps=7, **train)
    assert (parallelism_class(recipe), parallelism_of(recipe, TWO)) == (division, division)
    assert parallelism_of(recipe, ALONE) is Replicas
    assert alone(recipe).train == recipe_of(max_steps=7).train
    assert parallelism_class(alone(recipe)) is Replicas


def test_pipeline_stages_are_refused_with_what_takes_their_place_and_old_runs_are_read(tmp_path):
    with pytest.raises(RecipeError, match=r"train\.pipeline_stages") as caught:
        load_recipe("zh_chat", ["train.pipeline_stages=2"])
    assert "train.shard=full" in caught.value.fix
    (tmp_path / RECIPE).write_text("model: {kind: decoder}\ntrain: {pipeline_stages: 2, max_steps: 7}\n")
    assert run_recipe(tmp_path).train.max_steps == 7


def test_micro_batches_are_cut_where_no_other_process_waits_for_their_passes():
    for kind in ("exact", "fast"):
        assert Replicas(ALONE).room(kind, 7) == Room(7)
    assert Replicas(TWO).room("exact", 7) == Room(7)
    assert Replicas(TWO).room("fast", 7) is None


def test_sums_are_fast_on_several_gpus_and_exact_elsewhere_but_for_a_recipe_that_says_so():
    asked = recipe_of().train.sums
    assert [sum_kind(asked, *of) for of in (("cuda", 2), ("cuda", 1), ("cpu", 2))] == ["fast", "exact", "exact"]
    assert [sum_kind(asked, "cuda", 2) for asked in ("exact", "fast")] == ["exact", "fast"]
