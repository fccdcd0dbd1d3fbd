"""Needs of a recipe's training, measured in a separate process that reads the data and takes a few steps."""

from __future__ import annotations

import copy
import hashlib
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from unpad.interchange.origin import open_recipe
from unpad.machine.memory import process_memory
from unpad.models.adapters import kept_weights
from unpad.training.auto_size import StageMemory
from unpad.training.optim import optimizer_tensors
from unpad.training.rehearsal import Rehearsal
from unpad.training.setup import Setup, check_stages, prepare_setup
from unpad.training.stage import StageSetup, epoch_plan, prepare_model, run_length

GRADIENT_BYTES, MOMENT_BYTES = 4, 8  # of a parameter that trains
REPEATS = 3  # number of updates that must be equal
CHECKPOINT_COPIES = 2  # of weights and moments, while they are saved
OTHER_BYTES = 160 << 20  # of evaluation, logs and the page


@dataclass(frozen=True)
class Read:
    """Facts known after reading the data and building the model.

    Args:
        seconds: spent on this.
        precision: chosen for this machine.
        private: whether the data is about people.
        stages: their names.
        steps: of the whole run.
        weights_bytes: in a checkpoint; checkpoint_bytes: with the optimizer's moments.
        least_memory: bytes of weights, gradients and moments, plus current use of the process.
        evaluation: largest ratio over stages of held-out tokens to the tokens of a step.
    """

    seconds: float
    precision: str
    private: bool
    stages: tuple[str, ...]
    steps: int
    weights_bytes: int
    checkpoint_bytes: int
    least_memory: int
    evaluation: float


@dataclass(frozen=True)
class Stepped:
    """Needs of a step, in the most demanding stage.

    Args:
        peak_bytes: memory of the process in the largest micro-batch, or while saving a checkpoint, plus a margin.
        seconds: of an update.
        checkpoint_bytes: counted from the optimizer's state.
        open_files: of the process.
        predicted_bytes: `peak_bytes` as predicted from small passes.
    """

    peak_bytes: int
    seconds: float
    checkpoint_bytes: int
    open_files: int
    predicted_bytes: int


@dataclass(frozen=True)
class Repeated:
    """Digests of the weights after one update, repeated from the same weights."""

    digests: tuple[str, ...]
    device: str


def probe(recipe: Path, told: Connection) -> None:
    """Send a `Read`; once answered a `Stepped`, and then a `Repeated`.

    Raises:
        UnpadError: the recipe or its data cannot be trained.
    """
    began = time.perf_counter()
    setup = prepare_setup(open_recipe(str(recipe)), Path(), None)
    check_stages(setup)
    told.send(_read(setup, time.perf_counter() - began))
    told.recv()
    stages = [stage for stage in setup.stages if stage.train_ids.size]
    told.send(_largest([_stepped(setup, stage) for stage in stages]))
    told.send(Repeated(tuple(_digests(setup, stages[0])), setup.device.type))


def _read(setup: Setup, seconds: float) -> Read:
    weights = _size(kept_weights(setup.model))
    trained, ratios = 0, []
    for stage in setup.stages:
        if stage.train_ids.size:
            prepare_model(setup.model, stage)
            trained = max(trained, sum(p.numel() for p in setup.model.parameters() if p.requires_grad))
            positions, first = setup.data.table.positions, epoch_plan(stage, 0)
            tokens = positions[stage.train_ids].sum() / max(first.num_steps, 1)
            ratios.append(float(positions[stage.held_out_ids].sum() / max(tokens, 1)))
    return Read(
        seconds=seconds,
        precision=setup.precision,
        private=setup.data.private,
        stages=tuple(stage.name for stage in setup.stages),
        steps=run_length(setup.stages).last(0, 0).step,
        weights_bytes=weights,
        checkpoint_bytes=weights + MOMENT_BYTES * trained,
        least_memory=process_memory() + (GRADIENT_BYTES + MOMENT_BYTES) * trained,
        evaluation=max(ratios, default=0.0),
    )


def _size(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _stepped(setup: Setup, stage: StageSetup) -> Stepped:
    """Predict and measure the memory of a stage's largest micro-batch, and measure the time of its first step."""
    made = epoch_plan(stage, 0)
    memory = StageMemory.measured(stage, setup.model, setup.device, setup.precision)
    predicted = process_memory() + memory.needed(made)
    rehearsal = Rehearsal(setup, stage, copies=False)
    cost = rehearsal.cost(made)
    saved = _size(kept_weights(rehearsal.model)) + _size(optimizer_tensors(rehearsal.model, rehearsal.optimizer))
    saving, open_files = process_memory() + CHECKPOINT_COPIES * saved, 0
    with suppress(OSError):
        open_files = len(os.listdir("/proc/self/fd"))
    peak, foretold = (max(step, saving) + OTHER_BYTES for step in (cost.peak_bytes, predicted))
    return Stepped(peak, cost.seconds, saved, open_files, foretold)


def _largest(stages: list[Stepped]) -> Stepped:
    return Stepped(
        max(stage.peak_bytes for stage in stages),
        max(stage.seconds for stage in stages),
        max(stage.checkpoint_bytes for stage in stages),
        max(stage.open_files for stage in stages),
        max(stage.predicted_bytes for stage in stages),
    )


def _digests(setup: Setup, stage: StageSetup) -> list[str]:
    """Take the first update of a stage several times from the same weights and the same draws."""
    planned, initial, found = epoch_plan(stage, 0).step(0), copy.deepcopy(setup.model.state_dict()), []
    for _ in range(REPEATS):
        setup.model.load_state_dict(initial)
        rehearsal = Rehearsal(setup, stage, copies=False)
        torch.manual_seed(stage.recipe.train.seed)
        rehearsal.step(rehearsal.load(planned))
        digest = hashlib.sha256()
        for tensor in setup.model.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        found.append(digest.hexdigest())
    return found
