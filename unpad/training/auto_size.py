"""The largest `plan.tokens_per_micro` that fits into memory, determined before the first step of a new run."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from unpad.batching.balance import micro_costs
from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Plan
from unpad.errors import RecipeError
from unpad.machine import available_memory
from unpad.models.contract import Model
from unpad.nn.precision import Precision
from unpad.processes.group import Group
from unpad.recipes.recipe import Recipe, stages_of
from unpad.recipes.training import AUTO
from unpad.training.memory import Footprint, cells_of, fit, peak_of, process_bytes, state_bytes
from unpad.training.parallel.divisions import parallelism_of
from unpad.training.stage import StageSetup, prepare_model, replanned, with_recipe
from unpad.training.step import accumulate

FIELD = "plan.tokens_per_micro"
SHARE = 0.8  # share of the free memory that training may use
PROBES = (256, 1024)  # tokens of the passes that are measured
LEAST = 64  # tokens of a micro-batch, however little memory there is
SIZED = ("pack", "rows", "budget")  # strategies that limit micro-batches in tokens


@dataclass(frozen=True)
class AutoSize:
    """The number that was found for `auto`, and why.

    Args:
        tokens: of a micro-batch.
        is_whole: whether whole updates fit, so that memory cuts nothing.
        peak_bytes: predicted use of training beside the weights, with micro-batches of `tokens` tokens.
        free_bytes: free memory before, in the process with the least of all `processes`.
    """

    tokens: int
    is_whole: bool
    peak_bytes: int
    free_bytes: int
    processes: int

    @property
    def line(self) -> str:
        """The number with its reason, for the log and `unpad plan`."""
        of = f", of the process with least of {self.processes}" if self.processes > 1 else ""
        return (
            f"{FIELD}={self.tokens} (auto: {'a whole update' if self.is_whole else 'the most'} that fits into "
            f"{SHARE:.0%} of {self.free_bytes / 2**30:.1f} GiB of free memory{of}; "
            f"predicted peak {self.peak_bytes / 2**30:.2f} GiB)"
        )


def asks(recipe: Recipe) -> bool:
    """True if the run or a stage has `plan.tokens_per_micro: auto`."""
    return any(stage.recipe.plan.tokens_per_micro == AUTO for stage in stages_of(recipe))


def resolved_size(
    recipe: Recipe, stages: Sequence[StageSetup], model: Model, device: torch.device, precision: Precision, group: Group
) -> tuple[Recipe, list[StageSetup], AutoSize]:
    """Replace `auto` by a number, the same for all stages and processes, so that all have the same bits.

    Args:
        group: the processes; the one with the least memory decides.

    Returns:
        The recipe, its stages, and the size with its reasons.

    Raises:
        RecipeError: the model is divided among processes, and none can measure it.
    """
    if not parallelism_of(recipe, group).replicates:
        what = "auto measures a whole model, and this one is divided among processes"
        raise RecipeError(what, where=FIELD, fix="give the number of tokens")
    asking = [stage for stage in stages if stage.train_ids.size and stage.recipe.plan.tokens_per_micro == AUTO]
    memories = [StageMemory.measured(stage, model, device, precision, group.size) for stage in asking]
    free = free_memory(device)  # after the first passes: libraries have loaded what they need
    sizes = [memory.largest(int(SHARE * free)) for memory in memories]
    of_processes = group.exchange(min((size for size in sizes if size is not None), default=None))
    cut = [size for size in of_processes if size is not None]
    tokens = min(cut) if cut else max((largest_update(stage) for stage in asking), default=LEAST)
    needed = max((memory.needed_with(tokens) for memory in memories), default=0)
    peak, least = max(group.exchange(needed)), min(group.exchange(free))
    auto = AutoSize(tokens, not cut, peak, least, group.size)
    changed = with_size(recipe, tokens)
    return changed, with_recipe(stages, changed), auto


def with_size(recipe: Recipe, tokens: int) -> Recipe:
    """The recipe with this number wherever it says auto."""
    sizes = {f"stages.{stage.name}.{FIELD}": stage.plan.get("tokens_per_micro") for stage in recipe.stages}
    sizes[FIELD] = recipe.plan.tokens_per_micro
    return with_sizes(recipe, {field: tokens for field, size in sizes.items() if size == AUTO})


def with_sizes(recipe: Recipe, sizes: Mapping[str, int]) -> Recipe:
    """The recipe with these sizes of micro-batches: the run's by `FIELD`, those of stages by `stages.NAME.FIELD`."""
    stages = [
        stage.model_copy(update={"plan": {**stage.plan, "tokens_per_micro": sizes[key]}})
        if (key := f"stages.{stage.name}.{FIELD}") in sizes
        else stage
        for stage in recipe.stages
    ]
    settings = recipe.plan.model_copy(update={"tokens_per_micro": sizes.get(FIELD, recipe.plan.tokens_per_micro)})
    return recipe.model_copy(update={"plan": settings, "stages": stages})


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take of the computing device's memory; processes of a host share it equally."""
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory() // sharing


@dataclass(frozen=True)
class StageMemory:
    """Memory that training a stage takes beside the weights, predicted from small passes of its model.

    Args:
        footprint: of the stage's passes.
        parameters: of the model.
        processes: that share an update.
    """

    stage: StageSetup
    footprint: Footprint
    parameters: Sequence[nn.Parameter]
    processes: int = 1

    @classmethod
    def measured(
        cls, stage: StageSetup, model: Model, device: torch.device, precision: Precision, processes: int = 1
    ) -> "StageMemory":
        """Measure small micro-batches of the stage on its prepared model."""
        weights = prepare_model(model, stage).objective.final(model)
        footprint = measured(model, _probes(stage, device), weights, precision)
        return cls(stage, footprint, list(model.parameters()), processes)

    def needed(self, stage_plan: Plan) -> int:
        """Bytes at the most expensive micro-batch of a plan of the stage, optimizer and gradient sums included."""
        tokens = stage_plan.micro_cells.astype(np.float64)
        cells = micro_costs(stage_plan, 1.0, self.stage.data.table.attended) - tokens
        sizes = zip(tokens.tolist(), cells.tolist(), strict=True)
        peak = max((self.footprint.of(*size) for size in sizes), default=0.0)
        micros = int(np.diff(stage_plan.step_offsets).max(initial=0))
        return int(process_bytes(peak)) + state_bytes(self.parameters, micros=micros, processes=self.processes)

    def needed_with(self, tokens: int) -> int:
        """Bytes with micro-batches of `tokens` tokens."""
        return self.needed(_cut(self.stage, tokens))

    def largest(self, num_bytes: int) -> int | None:
        """Most tokens of a micro-batch that fits into these bytes, LEAST if no size fits; None if whole updates fit."""
        low, high = LEAST, largest_update(self.stage)
        if self.needed_with(high) <= num_bytes:
            return None
        while high > 1.03 * low + 1:
            middle = int((low * high) ** 0.5) + 1
            low, high = (middle, high) if self.needed_with(middle) <= num_bytes else (low, middle)
        return low


def largest_update(stage: StageSetup) -> int:
    """Real tokens of a stage's largest update."""
    settings = stage.recipe.plan
    return max(settings.tokens_per_step, *settings.grow.values(), LEAST)


def measured(
    model: Model, batches: Sequence[RaggedBatch], weights: dict[str, float], precision: Precision
) -> Footprint:
    """Fit the footprint of passes to those over small batches; gradients are cleared, and the generators and the mode
    of the model stay as they are."""
    device = batches[0].position_ids.device
    was_training = model.training
    model.train()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        peaks = [peak_of(partial(_pass, model, batch, weights, precision), device) for batch in batches]
    model.train(was_training)
    return fit([(batch.total_tokens, cells_of(batch)) for batch in batches], peaks)


def _pass(model: Model, batch: RaggedBatch, weights: dict[str, float], precision: Precision) -> None:
    accumulate(model, [batch], weights, precision)
    for parameter in model.parameters():
        parameter.grad = None


def _probes(stage: StageSetup, device: torch.device) -> list[RaggedBatch]:
    """Small micro-batches of the first epoch: for each size the one with most pairs of positions and the one with
    fewest."""
    batches = []
    for size in PROBES:
        cut = _cut(stage, size)
        cells = micro_costs(cut, 1.0, stage.data.table.attended) - cut.micro_cells
        full = np.flatnonzero(cut.micro_cells >= 0.8 * np.median(cut.micro_cells))
        by_cells = full[np.argsort(cells[full], kind="stable")]
        for index in dict.fromkeys((int(by_cells[0]), int(by_cells[-1]))) if len(by_cells) else ():
            batches.append(stage.data.load(cut.micro(index)).to(device))
    return batches


def _cut(stage: StageSetup, tokens: int) -> Plan:
    """The plan of a stage's first epoch with micro-batches of `tokens` tokens; strategies that count sequences are
    replaced by pack, as in evaluations."""
    packed = {"strategy": "pack", "batches_per_step": None} if stage.recipe.plan.strategy not in SIZED else {}
    return replanned(stage, tokens_per_micro=tokens, **packed)
