"""What a run is made of before its first step: data, tokenizer, model, precision, and the plan of an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unpad.batching.mix import draw_sequences
from unpad.batching.plan import Plan, plan
from unpad.data.family import Data, open_data
from unpad.data.sources.split import Split
from unpad.errors import PlanError, RecipeError
from unpad.models import build_model, model_config
from unpad.models.contract import Model
from unpad.models.objective import Objective
from unpad.nn.kernel import runs_native
from unpad.nn.native import library
from unpad.nn.precision import choose_precision
from unpad.recipes.recipe import Recipe, Stage
from unpad.recipes.training import PlanSettings
from unpad.run.folder import find_run
from unpad.run.kept import open_files
from unpad.run.timers import Timers
from unpad.training.memory import choose_allocator
from unpad.training.optim import Epochs, Schedule, freeze, make_optimizer


@dataclass(frozen=True)
class Setup:
    """What stays the same during a run."""

    recipe: Recipe
    folder: Path
    stages: list[Stage]
    data: Data
    model: Model
    device: torch.device
    precision: str
    environment: dict[str, Any]


def stages_of(recipe: Recipe) -> list[Stage]:
    """The recipe's stages, or the one stage of a recipe without."""
    return recipe.stages or [Stage(name="train")]


def prepare_setup(recipe: Recipe, folder: Path, files: dict[str, bytes] | None, timers: Timers | None = None) -> Setup:
    """Read the data, build the model. Nothing is written to the run directory yet.

    Args:
        files: what the run kept of its data when it began; None for a new run.
        timers: gets the seconds of reading and building.
    """
    timers = timers or Timers()
    config = model_config(recipe.model)
    for stage in stages_of(recipe):
        _check_lengths_given(recipe.for_stage(stage), stage)
    low_power = recipe.profile == "low_power"
    torch.set_num_threads(1 if low_power else recipe.train.threads or torch.get_num_threads())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision, reason = choose_precision("fp32" if low_power else recipe.precision, device)
    may_keep = device.type == "cpu" and not low_power
    allocator, allocator_reason = choose_allocator(recipe.train.allocator, may_keep=may_keep)
    if recipe.train.init_from and files is None:
        files = open_files(recipe, find_run(recipe.train.init_from))
    with timers("read"):
        data = open_data(recipe, files)
    torch.manual_seed(recipe.train.seed)
    with timers("build"):
        model = build_model(config, data.num_outputs)
        data.initialize(model)
    environment = {
        "version": version("unpad"), "torch": torch.__version__, "threads": torch.get_num_threads(),
        "device": str(device), "precision": precision, "precision_reason": reason,
        "matmul": "oneDNN" if torch.backends.mkldnn.is_available() else "plain", "blas": _blas(),
        "kernels": _kernels(device, precision, model.head_dim or 0),
        "allocator": allocator, "allocator_reason": allocator_reason,
    }  # fmt: skip
    return Setup(recipe, folder, stages_of(recipe), data, model.to(device), device, precision, environment)


def _kernels(device: torch.device, precision: str, head_dim: int) -> str:
    """Which kernels training will run, and why not the native ones where it will not."""
    if device.type != "cpu":
        return "torch kernels"
    if library.enabled() and precision != "bf16":
        return "torch kernels (native ones compute in bf16)"
    attention = library.enabled() and head_dim > 0 and not runs_native(torch.bfloat16, device, head_dim)
    return library.describe() + (f", attention through torch for heads of {head_dim}" if attention else "")


def _blas() -> str:
    config = torch.__config__.show()
    names = ("MKL", "OpenBLAS", "Accelerate")
    return next((name for name in names if f"BLAS_INFO={name.lower()}" in config), "built in")


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with every field of its model section spelled out, so that a run keeps it when a default changes.

    Raises:
        RecipeError: the model section does not fit.
    """
    return recipe.model_copy(update={"model": model_config(recipe.model).model_dump(mode="json")})


def check_stages(setup: Setup) -> None:
    """Refuse now what a later stage would refuse after hours.

    Raises:
        RecipeError: freezing, losses, parameter groups, schedule or patience of a stage do not fit; PlanError: its plan
            has no step.
    """
    before = 0
    for stage in setup.stages:
        recipe = setup.recipe.for_stage(stage)
        if stage_sequences(setup, stage, Split.TRAIN).size == 0 or recipe.train.max_epochs == 0:
            continue
        freeze(setup.model, recipe.train.freeze)
        Objective.of(setup.model, recipe.losses)
        make_optimizer(setup.model, recipe.optim)
        if recipe.train.patience is not None and stage_sequences(setup, stage, Split.HOLDOUT).size == 0:
            fix = "set data.holdout above 0, or train.patience=null"
            raise RecipeError(
                f"stage {stage.name} has patience but nothing is held out", where="train.patience", fix=fix
            )
        epochs = stage_epochs(setup, stage, epoch_plan(setup, stage, 0))
        if 0 in epochs.steps:
            fix = "lower plan.tokens_per_step, or set plan.drop_last=false and plan.overflow=split"
            begin = epochs.first[epochs.steps.index(0)]
            what = f"stage {stage.name} has no step" + (f" from epoch {begin + 1} on" if begin else "")
            raise PlanError(f"{what}: the plan drops every token", where="plan", fix=fix)
        last = last_step(recipe, before, epochs)
        if last > before:
            Schedule(recipe.optim, epochs, last - before).check()
        before = max(last, before)


def last_step(recipe: Recipe, before: int, epochs: Epochs) -> int:
    """The last step of a stage that begins after step `before` of the run, by its recipe and the length of epochs."""
    train = recipe.train
    by_epochs = None if train.max_epochs is None else before + epochs.steps_before(train.max_epochs)
    return min(end for end in (by_epochs, train.max_steps) if end is not None)


def _check_lengths_given(recipe: Recipe, stage: Stage) -> None:
    if recipe.train.max_epochs is None and recipe.train.max_steps is None:
        raise RecipeError(
            f"stage {stage.name} has no end", where="train.max_epochs", fix="set train.max_epochs or train.max_steps"
        )


def stage_sequences(setup: Setup, stage: Stage, split: Split) -> np.ndarray:
    """Ids of the sequences of one split that a stage uses, (n,) int64."""
    data = setup.data
    kinds = [data.kinds.index(kind) for kind in stage.use or data.kinds]
    return np.flatnonzero(np.isin(data.table.kind, kinds) & (data.table.split == split))


def epoch_plan(setup: Setup, stage: Stage, epoch: int) -> Plan:
    """The plan of one epoch: a pure function of the data, the recipe and the epoch."""
    lengths, settings, known = plan_inputs(setup, stage, epoch)
    return plan(lengths, settings, epoch=epoch, **known)


def stage_epochs(setup: Setup, stage: Stage, first: Plan) -> Epochs:
    """How many updates the epochs of a stage have, of which each size of update is planned once.

    Epochs of one size may differ by a few, as each is shuffled anew; schedules count as if they did not.

    Args:
        first: the plan of epoch 0.
    """
    recipe = setup.recipe.for_stage(stage)
    last = recipe.train.max_epochs
    begins = [epoch - 1 for epoch in sorted(recipe.plan.grow) if last is None or epoch <= last]
    steps = [epoch_plan(setup, stage, epoch).num_steps for epoch in begins]
    return Epochs((0, *begins), (first.num_steps, *steps))


def plan_inputs(setup: Setup, stage: Stage, epoch: int) -> tuple[np.ndarray, PlanSettings, dict[str, Any]]:
    """What the planner is given for one epoch: positions per sequence, settings, and its other arguments."""
    recipe = setup.recipe.for_stage(stage)
    ids = stage_sequences(setup, stage, Split.TRAIN)
    weights = setup.data.table.weights
    if any(weight != 1 for weight in weights):
        ids = ids[draw_sequences(setup.data.table.source[ids], weights, recipe.train.seed, epoch)]
    settings = recipe.plan
    if recipe.profile == "low_power":
        settings = settings.model_copy(update={"tokens_per_micro": min(settings.tokens_per_micro, 512)})
    lengths = setup.data.lengths((recipe.train.seed, epoch))
    longest = setup.model.config.longest
    if setup.data.table.attended is not None:  # the context is a mere bound, and padding up to it would fill the memory
        longest = min(longest, max(int(lengths.max(initial=1)), 1))
    known = {
        "seed": recipe.train.seed,
        "max_tokens": longest,
        "seq_ids": ids,
        "targets": setup.data.count_targets,
    }
    return lengths, settings, known


def describe(setup: Setup) -> list[str]:
    """What a run prints before it starts: the data, and the choices it made and why."""
    environment = setup.environment
    parameters = sum(p.numel() for p in setup.model.parameters())
    return [
        *setup.data.lines(),
        f"model {setup.recipe.model.get('preset') or setup.recipe.model['kind']}: {parameters:,} parameters, "
        f"{setup.data.describe_outputs()}, context {setup.model.config.longest}",
        f"computing in {environment['precision']} ({environment['precision_reason']}), weights and optimizer in fp32; "
        f"{environment['device']}, {environment['threads']} threads, "
        f"{environment['matmul']} and {environment['blas']}, "
        f"{environment['kernels']}",
        f"freed memory: {environment['allocator']} ({environment['allocator_reason']})",
    ]
