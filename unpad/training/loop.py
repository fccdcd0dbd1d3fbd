"""The training loop: step, log, evaluate, save, stop. One loop for every recipe."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from unpad import storage
from unpad.batching.batch import RaggedBatch
from unpad.batching.loader import load_steps
from unpad.batching.plan import Plan
from unpad.data.sources.split import Split
from unpad.errors import RecipeError, Stopped, UnpadError
from unpad.evaluation.metrics import HeldOut, held_out
from unpad.models.objective import Objective
from unpad.nn.native import library
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe, Stage
from unpad.run.checkpoint import State, newest_weights, put_weights
from unpad.run.folder import CHECKPOINTS, RECIPE, find_run
from unpad.run.kept import open_files
from unpad.run.monitor import Monitor, StepRecord
from unpad.run.timers import Timers, Timing
from unpad.training.collapse import CollapseMonitor
from unpad.training.memory import HeapKeeper
from unpad.training.optim import Schedule, forget, freeze, load_optimizer_tensors, make_optimizer, set_rate
from unpad.training.progress import (
    Progress,
    end_stage,
    keeps_best,
    restore,
    resumed_recipe,
    save_best,
    save_checkpoint,
    write_run_files,
)
from unpad.training.setup import (
    Setup,
    check_stages,
    describe,
    epoch_plan,
    last_step,
    prepare_setup,
    resolved,
    stage_epochs,
    stage_sequences,
)
from unpad.training.signals import Signals
from unpad.training.step import StepResult, non_finite, train_step

# Told of every held-out check: the stage's name, the step, and what was measured; True ends the run there.
AfterCheck = Callable[[str, int, HeldOut], bool]


@dataclass(frozen=True)
class Result:
    """Outcome of a run; `waited_share` is the share of the steps' time spent waiting for the loader."""

    folder: Path
    step: int
    epochs: int
    heldout_loss: float | None
    timings: list[Timing]
    waited_share: float


@dataclass(frozen=True)
class StageRun:
    """One stage on its way: what all its functions work with. `recipe` is the stage's own."""

    setup: Setup
    stage: Stage
    recipe: Recipe
    progress: Progress
    optimizer: torch.optim.Optimizer
    objective: Objective
    schedule: Schedule
    monitor: Monitor
    timers: Timers
    latent: CollapseMonitor | None
    after_check: AfterCheck | None
    heap: HeapKeeper = field(default_factory=HeapKeeper)


# --------------------------------------------------------------------------- the run


def train(
    name: str,
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    console: Console | None = None,
    verbose: bool = False,
    after_check: AfterCheck | None = None,
) -> Result:
    """Train a recipe into a run directory, or continue one.

    Args:
        name: packaged recipe or YAML file.
        folder: the run directory; must not hold a run unless `resume`.
        overrides: `key=value` changes.

    Raises:
        UnpadError: with the exit code of what went wrong, Stopped where `after_check` ended it; the directory then
            holds everything up to there.
    """
    timers, began = Timers(), time.perf_counter()
    recipe = resolved(load_recipe(name, list(overrides)))
    with ExitStack() as stack:
        locked = folder.exists()  # a new one is made when the data has proved sound
        if locked:
            stack.enter_context(storage.RunLock(folder))
        exists = _holds_run(folder, resume)
        notes = [] if exists or not resume else ["there is no run to resume here: this is a new one"]
        if exists:
            overrides, recipe, notes = resumed_recipe(name, list(overrides), folder)
        setup = prepare_setup(recipe, folder, open_files(recipe, folder) if exists else None, timers)
        with timers("build"):
            check_stages(setup)
        _take_folder(folder, locked, stack)
        progress, state, warnings = restore(setup) if exists else (Progress(), None, [])
        if state is None and recipe.train.init_from:
            notes.append(_start_from(setup, find_run(recipe.train.init_from)))
        with timers("save"):
            write_run_files(setup, name, overrides)
        monitor = Monitor(
            folder,
            log_every=recipe.train.log_every,
            grad_norm_warning=recipe.train.grad_norm_warning,
            console=console or Console(),
            total_steps=recipe.train.max_steps,
            verbose=verbose,
        )
        try:
            _tell_beginning(monitor, exists, progress, notes, warnings)
            return _run_stages(setup, progress, state, monitor, timers, began, after_check)
        except UnpadError as error:
            monitor.event("stopped", message=error.what, exit_code=error.exit_code)
            raise
        finally:
            monitor.close()


def _holds_run(folder: Path, resume: bool) -> bool:
    """Whether there is a run in the directory; refused when this is to be a new one."""
    exists = (folder / RECIPE).is_file()
    if exists and not resume:
        fix = "continue it with --resume, or choose another --out"
        raise RecipeError("the directory holds a run already", where=str(folder), fix=fix)
    return exists


def _take_folder(folder: Path, locked: bool, stack: ExitStack) -> None:
    """Make and lock the directory of a new run, for as long as the stack lasts; remove what a killed one left half."""
    if not locked:
        storage.make_folder(folder)
        stack.enter_context(storage.RunLock(folder))
        _holds_run(folder, resume=False)  # another process may have begun one there meanwhile
    for place in (folder, folder / CHECKPOINTS):
        if place.is_dir():
            storage.clean_leftovers(place)


def _start_from(setup: Setup, start: Path) -> str:
    """Take the weights of another run, and say so; what a model adds to what that run had stays as it was drawn."""
    weights, allowed = newest_weights(start)[0], setup.model.additions
    fresh = put_weights(setup.model, weights, str(start), allowed)
    parts = ", ".join(sorted({name.partition(".")[0] for name in fresh}))
    return f"from the weights of {start}" + (f"; drawn anew, as it has none: {parts}" if fresh else "")


def _tell_beginning(monitor: Monitor, exists: bool, progress: Progress, notes: list[str], warnings: list[str]) -> None:
    """Cut the files back to where the run goes on, and write down how it began."""
    if exists:
        monitor.resume(progress.step)
    for message in warnings:
        monitor.event("warning", message=message)
    if exists:
        monitor.event("resumed", step=progress.step, message="; ".join([f"at step {progress.step}", *notes]))
    else:
        monitor.event("started", message="; ".join(notes) or "a new run")


def _run_stages(
    setup: Setup,
    progress: Progress,
    state: State | None,
    monitor: Monitor,
    timers: Timers,
    began: float,
    after_check: AfterCheck | None,
) -> Result:
    with timers("log"):
        monitor.event("environment", **setup.environment)
        monitor.start(describe(setup))
    signals = Signals()
    heldout, epochs, has_best = progress.best, progress.epoch, False
    with signals.listen():
        while progress.stage < len(setup.stages):
            stage = setup.stages[progress.stage]
            has_best = False
            if _has_work(setup, stage, progress, monitor):
                epochs, heldout = _run_stage(setup, stage, progress, state, monitor, timers, signals, after_check)
                has_best = True
            state = None
            progress.next_stage()
    if not has_best:  # the last stage had nothing to do: the weights as they are
        save_best(setup, progress)
    timings = timers.summary(time.perf_counter() - began)
    monitor.event("timers", rows=timings)
    monitor.event("finished", step=progress.step, heldout_loss=heldout)
    monitor.close()
    return Result(setup.folder, progress.step, epochs, heldout, timings, monitor.waited_share)


def _has_work(setup: Setup, stage: Stage, progress: Progress, monitor: Monitor) -> bool:
    """Whether a stage has data, epochs and steps left; says why when not."""
    train = setup.recipe.for_stage(stage).train
    if stage_sequences(setup, stage, Split.TRAIN).size == 0:
        reason = (
            "no data: "
            + " and ".join(f"data.{kind}" for kind in stage.use or setup.data.kinds)
            + " hold nothing to train on"
        )
    elif train.max_epochs == 0:
        reason = "max_epochs is 0"
    elif train.max_steps is not None and progress.step >= train.max_steps and progress.stage_step == 0:
        reason = f"the run's {train.max_steps} steps are done"
    else:
        return True
    monitor.event("stage_skipped", message=f"{stage.name}: {reason}", name=stage.name)
    return False


# --------------------------------------------------------------------------- one stage


def _run_stage(
    setup: Setup,
    stage: Stage,
    progress: Progress,
    state: State | None,
    monitor: Monitor,
    timers: Timers,
    signals: Signals,
    after_check: AfterCheck | None,
) -> tuple[int, float | None]:
    """Train one stage to its end and leave the weights it ends with in the model.

    Returns:
        Epochs run, and the best held-out loss of the stage.
    """
    recipe = setup.recipe.for_stage(stage)
    frozen = freeze(setup.model, recipe.train.freeze)
    setup.model.label_smoothing = recipe.train.label_smoothing
    with timers("build"):
        optimizer = make_optimizer(setup.model, recipe.optim)
    if state is not None:
        load_optimizer_tensors(setup.model, optimizer, state.tensors)
    with timers("plan"):
        first = epoch_plan(setup, stage, 0)
        epochs = stage_epochs(setup, stage, first)  # the schedule counts in these wherever the stage stands
    before = progress.step - progress.stage_step
    last = last_step(recipe, before, epochs)
    objective = Objective.of(setup.model, recipe.losses)
    setup.model.trained = objective.weights
    held_out_ids, train_ids = stage_sequences(setup, stage, Split.HOLDOUT), stage_sequences(setup, stage, Split.TRAIN)
    with timers("latent"):
        latent = CollapseMonitor.begin(
            setup.model, setup.data, held_out_ids, train_ids, recipe, progress.collapse, progress.step,
            {} if state is None else state.tensors,
        )  # fmt: skip
    if latent is not None:
        monitor.event("latent", message=latent.describe())
    course = StageRun(
        setup,
        stage,
        recipe,
        progress,
        optimizer,
        objective,
        Schedule(recipe.optim, epochs, last - before),
        monitor,
        timers,
        latent,
        after_check,
    )
    if _is_over(course):
        message = f"{stage.name}: it ended at step {progress.step}; more epochs, or more steps, would make it go on"
        monitor.event("nothing_to_do", message=message, name=stage.name)
    monitor.stage(stage.name, last, epoch_steps=epochs.steps[0], frozen=frozen, ledger=first.ledger.to_json())
    while not _is_over(course):
        with timers("plan"):
            current = epoch_plan(setup, stage, progress.epoch) if progress.epoch else first
        if current.num_steps == 0:  # weights below 1 may draw nothing for once
            progress.epoch += 1
        for waited, micros in _epoch_steps(course, current):
            _one_step(course, micros, waited)
            _after_step(course, progress.epoch_step == current.num_steps, signals)
            if progress.epoch_step == 0 or _is_over(course):
                break
        signals.raise_if_received(setup.folder)
    end_stage(setup, stage, progress)
    return progress.epoch + (progress.epoch_step > 0), progress.best


def _after_step(course: StageRun, ends_epoch: bool, signals: Signals) -> None:
    """Evaluate, write down and save what is due after an update; stop when a signal has come."""
    recipe, progress, monitor = course.recipe, course.progress, course.monitor
    if ends_epoch:
        progress.epoch, progress.epoch_step = progress.epoch + 1, 0
    _read_latent(course)
    evaluate = _due(recipe.train.eval_every, progress.stage_step, ends_epoch) or _is_over(course)
    improved, stop = _evaluate(course) if evaluate else (False, False)
    if ends_epoch:
        monitor.epoch(progress.step, course.stage.name, progress.epoch)
    stopping = stop or signals.received is not None
    if _due(recipe.checkpoint.every, progress.step, ends_epoch) or improved or stopping or _is_over(course):
        _save(course)
    if improved and keeps_best(
        course.setup, course.stage
    ):  # after the checkpoint, so that what is best is never ahead of where a resume begins
        with course.timers("save"):
            save_best(course.setup, progress)
    signals.raise_if_received(course.setup.folder)
    if stop:
        what = "stopped after a held-out check, as its caller asked; everything up to here is saved"
        raise Stopped(what, where=str(course.setup.folder), fix="continue with --resume")


def _read_latent(course: StageRun) -> None:
    """Read the model's latent where that is due, and do what follows from it."""
    latent, progress, monitor = course.latent, course.progress, course.monitor
    if latent is None or not latent.due(progress.step):
        return
    with course.timers("latent"):
        verdict = latent.check(progress.step)
    with course.timers("log"):
        monitor.row("latent", progress.step, course.stage.name, verdict.to_row())
    if verdict.changed:
        monitor.event("collapse", step=progress.step, light=verdict.light, message=verdict.message)
    if verdict.action == "save":
        with course.timers("save"):
            path = latent.keep_aside(course.setup.folder / CHECKPOINTS)
        monitor.event("checkpoint", step=progress.step, path=path.name)
    elif verdict.action == "recover":
        message = latent.recover(progress.step, course.optimizer)
        monitor.event("collapse", step=progress.step, light="green", message=message)
        # What was best may be the collapsed weights, whose held-out loss can be the lower one.
        progress.best, progress.best_step, progress.checks_without_progress = None, 0, 0
    elif verdict.action == "stop":
        _save(course)
        raise latent.error(verdict)


def _is_over(course: StageRun) -> bool:
    """Whether the stage has had its epochs, the run its steps, or the held-out value its patience."""
    train, progress = course.recipe.train, course.progress
    return (
        (train.max_epochs is not None and progress.epoch >= train.max_epochs)
        or (train.max_steps is not None and progress.step >= train.max_steps)
        or (train.patience is not None and progress.checks_without_progress >= train.patience)
    )


def _due(every: int | None, step: int, at_epoch_end: bool) -> bool:
    return at_epoch_end if every is None else step % every == 0


def _epoch_steps(course: StageRun, current: Plan) -> Iterator[tuple[float, list[RaggedBatch]]]:
    """The rest of an epoch's steps, each with the seconds spent waiting for it."""
    setup = course.setup
    ready, first = not library.enabled(), course.progress.epoch_step
    steps = load_steps(setup.data.load, current, setup.device, first, group_lengths=ready)
    with closing(steps):
        while True:
            began = time.perf_counter()
            with course.timers("wait"):
                micros = next(steps, None)
            if micros is None:
                return
            yield time.perf_counter() - began, micros


def _one_step(course: StageRun, micros: list[RaggedBatch], waited: float) -> None:
    """One update and its record."""
    setup, recipe, progress = course.setup, course.recipe, course.progress
    began = time.perf_counter()
    rate = course.schedule.rate(progress.stage_step, progress.epoch)
    set_rate(course.optimizer, rate)
    # Dropout draws from (seed, step), so a resumed run drops the same values.
    torch.manual_seed(_step_seed(recipe.train.seed, progress.step))
    setup.model.train()
    weights, fresh = course.objective.begin(setup.model, progress.stage_step, course.schedule.num_steps)
    forget(course.optimizer, fresh)
    if fresh:
        course.monitor.event("drawn_anew", step=progress.step + 1, num_tensors=len(fresh))
    weights = progress.collapse.scaled(weights)
    with course.timers("train"):
        result = train_step(
            setup.model, micros, course.optimizer,
            weights=weights, precision=setup.precision, clip=recipe.optim.clip,
            scaler=progress.scaler if setup.precision == "fp16" else None,
        )  # fmt: skip
    if not result.updated:
        _skip_or_stop(course, micros, result)
    progress.step += 1
    progress.stage_step += 1
    progress.epoch_step += 1
    sequences, tokens = _count_real(micros)
    record = StepRecord(
        step=progress.step,
        stage=course.stage.name,
        epoch=progress.epoch + 1,
        micros=len(micros),
        sequences=sequences,
        tokens=tokens,
        padded_tokens=sum(batch.total_tokens for batch in micros),
        targets=result.num_targets,
        loss=result.terms.get("nll", 0.0),
        lr=rate,
        grad_norm=result.grad_norm,
        terms=result.terms,
        weights=weights,
        skipped=not result.updated,
    )
    seconds = time.perf_counter() - began + waited
    with course.timers("log"):
        course.monitor.step(record, seconds=seconds, waited=waited, memory_bytes=course.heap.after_step())


def _count_real(micros: list[RaggedBatch]) -> tuple[int, int]:
    """Sequences of the corpus and their tokens; the filler that completes a row is neither."""
    sequences = tokens = 0
    for batch in micros:
        lengths = batch.layout.lengths()
        real = torch.ones_like(lengths, dtype=torch.bool) if batch.seq_ids is None else batch.seq_ids >= 0
        sequences, tokens = sequences + int(real.sum()), tokens + int(lengths[real].sum())
    return sequences, tokens


def _step_seed(seed: int, step: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed},{step}".encode(), digest_size=7).digest(), "little")


def _skip_or_stop(course: StageRun, micros: list[RaggedBatch], result: StepResult) -> None:
    """A step whose loss or gradient was not finite changed nothing; go on without it, or save and stop."""
    setup, train, progress, monitor = course.setup, course.recipe.train, course.progress, course.monitor
    if setup.precision == "fp16" and progress.scaler.scale > 1:
        message = f"fp16 overflow; loss scale now {progress.scaler.scale:g}"
        monitor.event("skipped_step", step=progress.step + 1, message=message)
        return
    ids = [int(i) for batch in micros if batch.seq_ids is not None for i in batch.seq_ids if i >= 0]
    error = non_finite(result, progress.step + 1, [setup.data.where(i) for i in ids])
    progress.num_skipped += 1
    if train.on_nonfinite == "skip" and progress.num_skipped <= train.max_skips:
        message = f"{error.what}; {progress.num_skipped} skipped so far"
        monitor.event("skipped_step", step=progress.step + 1, message=message)
        return
    _save(course)
    raise error


def _evaluate(course: StageRun) -> tuple[bool, bool]:
    """Measure the held-out loss; whether it is the stage's best so far, and whether the run is to end with it."""
    setup, train, progress, monitor = course.setup, course.recipe.train, course.progress, course.monitor
    ids = stage_sequences(setup, course.stage, Split.HOLDOUT)
    if ids.size == 0:
        return False, False
    with course.timers("evaluate"):
        found = held_out(setup.model, setup.data, ids, course.recipe.plan, setup.device)
    loss = found.loss
    improved = progress.best is None or loss < progress.best - train.min_delta
    if improved:
        progress.best, progress.best_step, progress.checks_without_progress = loss, progress.step, 0
    else:
        progress.checks_without_progress += 1
    with course.timers("log"):
        monitor.evaluation(progress.step, course.stage.name, found.values, found.num_targets, improved)
    if train.patience is not None and progress.checks_without_progress >= train.patience:
        message = (
            f"{course.stage.name}: no progress in {train.patience} checks; best {progress.best:.4f} "
            f"at step {progress.best_step}, stopped at step {progress.step}, after epoch {progress.epoch}"
            + (f" of {train.max_epochs}" if train.max_epochs is not None else "")
        )
        monitor.event("early_stop", message=message, step=progress.step, best_step=progress.best_step)
    return improved, course.after_check is not None and course.after_check(course.stage.name, progress.step, found)


def _save(course: StageRun) -> None:
    with course.timers("save"):
        course.monitor.sync()
        kept = {} if course.latent is None else course.latent.tensors()
        path = save_checkpoint(course.setup, course.progress, course.optimizer, kept)
    course.monitor.event("checkpoint", step=course.progress.step, path=path.name)
