"""Recipes that pipeline stages fit."""

from __future__ import annotations

from unpad.errors import RecipeError
from unpad.processes.group import Group
from unpad.recipes.recipe import Recipe, stages_of

FIELD = "train.pipeline_stages"


def check_pipeline(recipe: Recipe, group: Group) -> None:
    """Refuse a recipe with pipeline stages that do not fit its processes, its model or its training.

    Args:
        recipe: with its model section written out.

    Raises:
        RecipeError: names the field that does not fit.
    """
    num = recipe.train.pipeline_stages
    if num == 1:
        return
    kind, blocks, stages = recipe.model["kind"], recipe.model.get("blocks", 0), stages_of(recipe)
    settings = [stage.recipe for stage in stages]
    without = f"train with {FIELD}=1"
    if kind != "decoder":
        raise RecipeError(f"pipeline stages are of a decoder; model.kind is {kind}", where=FIELD, fix=without)
    if blocks < num:
        what = f"{num} pipeline stages need as many blocks, and the model has {blocks}"
        raise RecipeError(what, where=FIELD, fix=f"lower it to {blocks} or less, or raise model.blocks")
    if recipe.lora is not None:
        raise RecipeError("pipeline stages train whole weights, and lora trains adapters", where="lora", fix=without)
    if any(stage.of_pairs for stage in stages):
        what = "pipeline stages learn to predict tokens, and data.pairs teaches preferences"
        raise RecipeError(what, where="data.pairs", fix=without)
    if any(one.train.freeze for one in settings):
        raise RecipeError("pipeline stages train every weight", where="train.freeze", fix=f"leave it out, or {without}")
    if any(part.clip is not None for one in settings for part in one.optim.groups):
        what = "pipeline stages clip the gradients of all weights together, and a group has a clip of its own"
        raise RecipeError(what, where="optim.groups", fix=f"leave out its clip, or {without}")
    if recipe.train.shard != "none":
        what = "pipeline stages hold whole weights, and train.shard divides them"
        raise RecipeError(what, where="train.shard", fix=f"set train.shard=none, or {without}")
    if group.size != num:
        processes = f"{group.size} process{'es' * (group.size > 1)}"
        fix = f"start one for each stage: --processes {num}; or {without}"
        raise RecipeError(f"there are {num} pipeline stages and {processes}", where=FIELD, fix=fix)
