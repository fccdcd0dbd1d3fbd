"""A recipe shortened so that its training can be killed many times, with a description of the changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe
from unpad.training.parallel.divisions import alone

RUNS = 6  # undisturbed runs that fit into the time of a drill
CHECKPOINTS = 6  # of a run
FEWEST, MOST = 8, 60  # steps of a run
LEAST_TOKENS = 64  # of an update
SAVE_RATE = 100e6  # bytes a second, with checksums
FORWARD_SHARE = 1 / 3  # of the time of a step, for as many tokens
STAND_IN, STAND_IN_STEPS = "zh_chat", 20
SMALL = ["model.width=64", "model.blocks=1", "model.heads=2", "model.hidden=128", "plan.tokens_per_step=512"]


@dataclass(frozen=True)
class Bounded:
    """A recipe to train repeatedly; `notes` list the changes."""

    recipe: Recipe
    notes: tuple[str, ...]
    is_own: bool


@dataclass(frozen=True)
class Cost:
    """Seconds per part of a training: its start, a step, an evaluation, a checkpoint."""

    start: float
    step: float
    evaluation: float
    checkpoint: float


def bounded(recipe: Recipe, cost: Cost, precision: str, seconds: float, whole: int) -> Bounded:
    """Shorten a recipe to a share of `seconds`, or replace it by a small packaged recipe.

    Args:
        recipe: the user's.
        precision: fixed, because another process may choose differently by measurement.
        whole: steps of the recipe.
    """
    room = seconds / RUNS - cost.start - 2 * cost.evaluation - (CHECKPOINTS + 2) * cost.checkpoint
    most = int(room / max(cost.step, 1e-3))
    steps = min(max(most, FEWEST), MOST, whole)
    if most >= FEWEST:
        return Bounded(shortened(recipe, steps, precision), (f"killed in its first {steps} steps",), True)
    tokens = int(recipe.plan.tokens_per_step * most / FEWEST)
    if recipe.plan.batches_per_step is None and tokens >= max(LEAST_TOKENS, recipe.plan.tokens_per_step // 64):
        cut = f"killed in its first {steps} steps, with updates of {tokens:,} tokens: one takes {cost.step:.1f} s"
        return Bounded(shortened(recipe, steps, precision, tokens), (cut,), True)
    return stand_in(
        f"a start takes {cost.start:.0f} s, a step {cost.step:.1f} s, an evaluation {cost.evaluation:.0f} s; "
        "--minutes gives more time"
    )


def stand_in(why: str) -> Bounded:
    """The small packaged recipe that replaces the user's."""
    note = f"killed was the packaged recipe {STAND_IN}, made small, in place of yours: {why}"
    return Bounded(shortened(load_recipe(STAND_IN, SMALL), STAND_IN_STEPS, "fp32"), (note,), False)


def shortened(recipe: Recipe, steps: int, precision: str, tokens: int | None = None) -> Recipe:
    """The recipe with fewer steps, in one process.

    Args:
        tokens: of an update; None: as the recipe has them.
    """
    fewer: dict[str, Any] = {} if tokens is None else {"tokens_per_step": tokens, "grow": {}}
    stages = [stage.model_copy(update={"plan": {**stage.plan, **fewer}}) for stage in recipe.stages]
    whole = alone(recipe)
    return whole.model_copy(
        update={
            "plan": recipe.plan.model_copy(update=fewer),
            "stages": stages,
            "train": whole.train.model_copy(update={"max_steps": steps}),
            "checkpoint": recipe.checkpoint.model_copy(
                update={"every": max(steps // CHECKPOINTS, 1), "every_seconds": None}
            ),
            "precision": precision,
        }
    )
