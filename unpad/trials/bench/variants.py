"""Variants that `unpad bench` compares: the last stage of a recipe under different batching settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from unpad.batching.batch import RaggedBatch
from unpad.batching.loader import load_steps
from unpad.batching.plan import Plan
from unpad.errors import PlanError, RecipeError
from unpad.interchange.origin import open_recipe
from unpad.nn.native import library
from unpad.nn.precision import DTYPES
from unpad.recipes.recipe import Recipe, ResolvedStage
from unpad.training.reference import log_probabilities_of_pairs
from unpad.training.setup import Setup, prepare_setup
from unpad.training.stage import StageSetup, epoch_plan, make_stage, prepare_model

BATCH_SIZES = (1, 2, 4, 8, 16)


def prepare(recipe: str, overrides: Sequence[str]) -> Setup:
    """Load the recipe's data and build its model, as at the start of a run.

    Raises:
        RecipeError: no stage has data to train on.
    """
    setup = prepare_setup(open_recipe(recipe, overrides), Path(), None)
    last = setup.stages[-1]
    prepare_model(setup.model, last)
    if last.of_pairs and setup.data.replies is not None:
        setup.data.replies.reference[:] = log_probabilities_of_pairs(setup, last, setup.data)
    if not all_data(setup, last.recipe).train_ids.size:
        raise RecipeError("no stage has data to train on", where="stages", fix="set the data that they use")
    return setup


@dataclass(frozen=True)
class BenchVariant:
    """A batching variant: a recipe that differs from the user's only in its plan, and its first epoch."""

    name: str
    setup: Setup
    stage: StageSetup
    plan: Plan


def strategy_variants(setup: Setup) -> list[BenchVariant]:
    """Variants of one sequence per micro-batch, never padded, then of fixed, dynamic, bucket and pack."""
    size = setup.stages[-1].recipe.plan.batch_size
    alone: dict[str, Any] = {"strategy": "pack", "tokens_per_micro": 1}  # a micro-batch holds one sequence at least
    return [
        _variant(setup, "one at a time", **alone, tokens_per_step=1),
        _variant(setup, "one at a time, accumulated", **alone),
        _variant(setup, f"padded to the context, batches of {size}", strategy="fixed"),
        _variant(setup, f"dynamic padding, batches of {size}", strategy="dynamic"),
        _variant(setup, f"buckets, batches of {size}", strategy="bucket"),
        _variant(setup, "packed, no padding", strategy="pack"),
    ]


def size_variants(setup: Setup) -> list[BenchVariant]:
    """Variants of padded batches of every size of `BATCH_SIZES`, one step per batch."""
    fields: dict[str, Any] = {"strategy": "dynamic", "tokens_per_step": 1}
    return [_variant(setup, f"batch size {size}", **fields, batch_size=size) for size in BATCH_SIZES]


def _variant(setup: Setup, name: str, **fields: Any) -> BenchVariant:
    recipe = setup.stages[-1].recipe
    recipe = recipe.model_copy(update={"plan": recipe.plan.model_copy(update={"grow": {}, **fields})})
    stage = all_data(setup, recipe)
    first = epoch_plan(stage, 0)
    if first.num_steps == 0:
        fix = "lower plan.tokens_per_step, or set plan.drop_last=false and plan.overflow=split"
        raise PlanError(f"{name}: the plan drops every token", where="plan", fix=fix)
    return BenchVariant(name, setup, stage, first)


def all_data(setup: Setup, recipe: Recipe) -> StageSetup:
    """A stage with the data of all stages that train like the last, with the settings of `recipe`."""
    of_pairs = setup.stages[-1].of_pairs
    used = {kind for stage in setup.stages for kind in stage.kinds if stage.of_pairs == of_pairs}
    return make_stage(ResolvedStage("bench", tuple(used), recipe), setup.data, setup.model.config.longest)


def every_update(setup: Setup, stage: StageSetup, first_epoch: int = 0) -> Iterator[list[RaggedBatch]]:
    """Yield the micro-batches of one step after the other, epoch after epoch."""
    for epoch in count(first_epoch):
        epoch_steps = epoch_plan(stage, epoch)
        grouped = not library.computes(DTYPES[setup.precision])
        yield from load_steps(setup.data.load, epoch_steps, setup.device, group_lengths=grouped)
