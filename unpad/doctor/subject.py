"""The subject of an examination: a recipe or a run, opened as training opens it, and copies of its model to try."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

import numpy as np
import torch
from typing_extensions import TypeVar

from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Micro, Plan
from unpad.data.family import Data, check_near_duplicates, family_of
from unpad.errors import RecipeError, needs_memory
from unpad.interchange.origin import open_named, starting_weights
from unpad.models import lower_sizes
from unpad.models.contract import Model
from unpad.recipes.recipe import Recipe
from unpad.run.base import run_weights
from unpad.run.checkpoint import put_weights
from unpad.run.kept import open_files
from unpad.training.rehearsal import Rehearsal
from unpad.training.setup import Setup, prepare_setup, resolved
from unpad.training.stage import StageSetup, epoch_plan, last_step, stage_epochs

DataType = TypeVar("DataType", bound=Data, covariant=True, default=Data)


class TimeBudget:
    """Time for the whole examination."""

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        """Args:
        seconds: for all of it; now: reads a clock.
        """
        self.seconds, self.now, self.began = seconds, now, now()

    @property
    def spent(self) -> float:
        return self.now() - self.began

    def share(self, share: float) -> float:
        """Seconds that a check may take: a share of what is left, so that none leaves nothing to the others."""
        return max(self.seconds - self.spent, 0.0) * share


@dataclass(frozen=True)
class Subject(Generic[DataType]):
    """A recipe or run. A check of what one family has takes a subject of its data, such as `Subject[ImageData]`.

    Args:
        name: as the user gave it.
        folder: of the run; None for a recipe.
        step: of the run's checkpoint; 0 for a recipe.
        setup: its model has the weights that training starts from; data: its sequences.
        model: with the weights of the checkpoint; of a recipe that of `setup`.
        stage: whose steps are tried, the first that trains on anything but pairs, or else the first of pairs, of which
            no steps are tried; plan: of its first epoch.
        num_steps: of the stage.
        clock: time left.
    """

    name: str
    folder: Path | None
    step: int
    setup: Setup
    data: DataType
    model: Model
    stage: StageSetup
    plan: Plan
    num_steps: int
    clock: TimeBudget

    @property
    def recipe(self) -> Recipe:
        """The recipe with the fields of the stage."""
        return self.stage.recipe

    @property
    def rate(self) -> float:
        """Peak learning rate of the stage."""
        return self.recipe.optim.lr * self.recipe.optim.lr_scale

    @property
    def other_stages(self) -> list[str]:
        """Names of the stages after the one that is tried, which train on anything but pairs."""
        names = [one.name for one in self.setup.stages if one.train_ids.size and not one.of_pairs]
        return [] if self.stage.of_pairs else names[names.index(self.stage.name) + 1 :]

    def field(self, name: str) -> str:
        """Name of a field as an override gives it: of the stage, where the stage sets it itself."""
        return self.setup.recipe.field_of(self.stage.name, name)

    @property
    def units(self) -> tuple[str, str]:
        """Names of a sequence and of a unit of its length, plural."""
        sequences, tokens = family_of(self.setup.recipe).UNITS
        return self.data.unit or sequences, tokens

    def load(self, micro: Micro) -> RaggedBatch:
        return self.setup.data.load(micro).to(self.setup.device)

    def rehearsal(
        self, *, drops: bool = True, model: Model | None = None, recipe: Recipe | None = None, **changes: Any
    ) -> Rehearsal:
        """A copy of the model that training starts from, to train for a few steps; arguments as for `Rehearsal`.

        Args:
            model: to copy in its place; recipe: in place of the stage's.
        """
        stage = replace(self.stage, recipe=recipe or self.recipe)
        torch.manual_seed(stage.recipe.train.seed)
        return Rehearsal(self.setup, stage, model=model, drops=drops, **changes)

    def small_batch(self, most_sequences: int, most_tokens: int, first: int = 0) -> RaggedBatch:
        """The first sequences of a step as one batch, without padding.

        Args:
            first: step of the plan, counted around.
        """
        (micro, *_) = self.plan.step(first % self.plan.num_steps)
        sizes = np.cumsum(micro.stops - micro.starts)
        num = max(1, min(most_sequences, int(np.searchsorted(sizes, most_tokens, side="right"))))
        cut = (micro.seq_ids[:num], micro.starts[:num], micro.stops[:num], micro.first_target[:num])
        return self.load(Micro(*cut, 0, 0, micro.epoch_seed))


def open_subject(name: str, overrides: Sequence[str], clock: TimeBudget) -> Subject:
    """Open a run by its directory or name, or a recipe, and read its data.

    Raises:
        RecipeError, SourceError, CheckpointError: it cannot be trained or used; or nothing of it can be examined.
    """
    opened, folder = open_named(name, overrides, f"examine it on yours: unpad doctor {name} data.KIND=FILE")
    recipe = resolved(opened)
    if folder is None:
        setup = prepare_setup(recipe, Path(), None)
    else:
        setup = prepare_setup(recipe, folder, open_files(recipe, folder), compare=False)
    check_near_duplicates(recipe, setup.data)
    model, step = setup.model, 0
    if recipe.train.init_from is not None and setup.base is None:
        weights, where = starting_weights(recipe.train.init_from, recipe.train.new_head)
        put_weights(setup.model, weights, where, setup.model.additions)
    if folder is not None and setup.base is None:
        weights, state = run_weights(folder)
        with needs_memory("a copy of the model", lower_sizes(setup.model.config)):
            model, step = copy.deepcopy(setup.model), state.step
        put_weights(model, weights, str(folder))
    return _at_stage(name, folder, step, setup, model, clock)


def _at_stage(name: str, folder: Path | None, step: int, setup: Setup, model: Model, clock: TimeBudget) -> Subject:
    for stage in sorted(setup.stages, key=lambda one: one.of_pairs):
        if stage.train_ids.size == 0 or stage.recipe.train.max_epochs == 0:
            continue
        plan = epoch_plan(stage, 0)
        if plan.num_steps:
            num_steps = last_step(stage, 0, stage_epochs(stage))
            return Subject(name, folder, step, setup, setup.data, model, stage, plan, num_steps, clock)
    fix = "give data to train on; `unpad plan` counts what a plan leaves out"
    raise RecipeError("no stage has a step", where="stages", fix=fix)
