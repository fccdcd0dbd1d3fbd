"""Updates of an epoch: the micro-batches that each process loads, and the agreement of processes before they
compute."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from unpad.batching.batch import RaggedBatch
from unpad.batching.loader import load_steps
from unpad.batching.plan import Micro, Plan
from unpad.errors import CheckpointError, needs_memory
from unpad.nn.block import Attention
from unpad.nn.draws import seed_generator
from unpad.nn.kernel import card_version, takes_flash
from unpad.nn.native import library
from unpad.nn.precision import DTYPES
from unpad.run.folder import STATE
from unpad.training.context import StageRun
from unpad.training.optim import forget, set_rate
from unpad.training.parallel.share import Share, counts_of_all, counts_to_json, own_numbers, step_seed
from unpad.training.setup import Setup


@dataclass(frozen=True)
class LoadedUpdate:
    """One update, loaded.

    Args:
        planned: its micro-batches, as the plan has them.
        micros: micro-batches that this process computes; share: their places.
        waited: seconds spent waiting for them.
        is_saved: whether a checkpoint follows, by the clock of the first process.
        weights: of the loss terms that train in it.
        rate: learning rate.
    """

    planned: list[Micro]
    micros: list[RaggedBatch]
    share: Share
    waited: float
    is_saved: bool
    weights: dict[str, float]
    rate: float


@dataclass(frozen=True)
class Loaded:
    """Message of a process to the others once it has loaded its micro-batches of an update.

    Args:
        received: signal that asked it to stop.
        has_saved: whether it has written its part of a checkpoint.
        is_due: whether its clock asks for a checkpoint; is_late: for the end of the training.
        counts: of its micro-batches, as `counts_to_json`.
    """

    received: int | None
    has_saved: bool
    is_due: bool
    is_late: bool
    counts: dict[int, dict[str, Any]]


def epoch_updates(stage: StageRun, plan: Plan) -> Iterator[LoadedUpdate]:
    """Yield the rest of the updates of an epoch or its window; model and optimizer are prepared for each.

    Raises:
        CheckpointError: the checkpoint lies at the end of the plan; a valid one would name the next.
    """
    run, setup, first = stage.run, stage.run.setup, stage.run.progress.window_step
    if first and not 0 <= first < plan.num_steps:
        what = f'{STATE} is not that of this training: progress: "epoch_step" is {first} of {plan.num_steps}'
        fix = "use another copy of the run, or start a new one with --out"
        raise CheckpointError(what, where=str(setup.folder), fix=fix)
    ratio, attended = stage.cells_per_token, setup.data.table.attended
    choose = partial(own_numbers, group=setup.group, cells_per_token=ratio, attended=attended)
    steps = load_steps(setup.data.load, plan, setup.device, first, group_lengths=takes_groups(setup), own=choose)
    with closing(steps):
        for step in range(first, plan.num_steps):
            weights, rate = _begin_step(stage)  # a model counts the targets of the terms that train
            began, planned = time.perf_counter(), plan.step(step)
            numbers = choose(planned)
            with setup.group.together() as talk:
                with run.timers("wait"), needs_memory("the next batch", "lower plan.tokens_per_step"):
                    micros = next(steps)
                talk.own = asdict(_loaded(stage, micros, numbers))
            of_processes = [Loaded(**values) for values in talk.told]
            run.signals.agree([loaded.received for loaded in of_processes])
            run.deadline.reached |= of_processes[0].is_late
            if all(loaded.has_saved for loaded in of_processes):
                with run.timers("save"):
                    run.saver.finish()
            share = _share(stage, len(planned), numbers, of_processes)
            waited = time.perf_counter() - began
            yield LoadedUpdate(planned, micros, share, waited, of_processes[0].is_due, weights, rate)


def takes_groups(setup: Setup) -> bool:
    """True if attention takes the length groups of layouts, which then come with the batches: later, they would have to
    be read back from the device."""
    dtype = DTYPES[setup.precision]
    if setup.device.type == "cpu":
        return not library.computes(dtype)
    parts = [part for part in setup.model.modules() if isinstance(part, Attention)]
    return any(part.dropout or not takes_flash(dtype, part.head_dim, card_version(setup.device)) for part in parts)


def _loaded(stage: StageRun, micros: Sequence[RaggedBatch], numbers: Sequence[int]) -> Loaded:
    """Message of this process about its micro-batches, at places `numbers`."""
    run = stage.run
    counts = counts_to_json(run.setup.model, micros, numbers)
    return Loaded(run.signals.received, run.saver.has_written, stage.clock.due(), run.deadline.due(), counts)


def _share(stage: StageRun, num_micros: int, numbers: Sequence[int], of_processes: Sequence[Loaded]) -> Share:
    """This process's share of an update of `num_micros` micro-batches; its own have the places `numbers`."""
    run, parallelism = stage.run, stage.run.setup.parallelism
    counts = counts_of_all([loaded.counts for loaded in of_processes])
    assert len(counts) == num_micros == sum(len(loaded.counts) for loaded in of_processes), "each has been counted once"
    seed = (stage.setup.recipe.train.seed, run.progress.step)
    sums = stage.sums if parallelism.group.size > 1 or num_micros > 1 else None
    lockstep = parallelism.lockstep(max(len(loaded.counts) for loaded in of_processes))
    return Share(numbers, counts, seed, parallelism, sums, lockstep, stage.room)


def _begin_step(stage: StageRun) -> tuple[dict[str, float], float]:
    """Prepare model and optimizer for the next step; return the weights of the loss terms and the learning rate."""
    run, setup, recipe, progress = stage.run, stage.run.setup, stage.setup.recipe, stage.run.progress
    rate = stage.schedule.rate(progress.stage_step, progress.epoch)
    set_rate(stage.optimizer, rate)
    # Draws have the seed of (seed, step): a resumed run drops the same values, with any number of processes.
    seed_generator(step_seed(recipe.train.seed, progress.step))
    setup.model.train()
    weights, fresh = stage.objective.begin(setup.model, progress.stage_step, stage.schedule.num_steps)
    forget(stage.optimizer, fresh)
    if fresh:
        run.monitor.log("drawn_anew", step=progress.step + 1, num_tensors=len(fresh))
    for watch in stage.watches:
        weights = watch.scaled(weights)
    return weights, rate
