"""Training of a recipe into a run directory: data, resume, stages in turn, files of the run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from unpad import storage
from unpad.errors import DiskError, UnpadError
from unpad.evaluation.family import TrainedModel, keepsakes
from unpad.interchange.origin import is_folder, keep_origin, open_recipe, starting_weights
from unpad.models.contract import Model
from unpad.processes import own_log
from unpad.processes.group import ALONE, Group
from unpad.recipes.recipe import Recipe, differences
from unpad.run.checkpoint import State, put_weights
from unpad.run.folder import CHECKPOINTS, holds_run, new_id, read_command, refuse_new_run, run_id, run_recipe
from unpad.run.kept import open_files
from unpad.run.loggers import check_loggers
from unpad.run.monitor import Monitor, silent_monitor
from unpad.run.screen import open_console
from unpad.run.timers import StepShare, Timers, Timing, covered_steps
from unpad.training.alike import check_alike, check_folder, check_recipe, check_weights
from unpad.training.context import AfterEvaluation, RunContext
from unpad.training.fit import share_out
from unpad.training.parallel.divisions import asked, parallelism_of
from unpad.training.progress import (
    Progress,
    describe_changes,
    recorded_precision,
    restore,
    resumed_recipe,
    save_best,
    write_run_files,
)
from unpad.training.setup import Setup, check_stages, describe, divide, prepare_setup, resolved
from unpad.training.signals import Signals
from unpad.training.stage import StageSetup, run_length
from unpad.training.stage_loop import run_stage


@dataclass(frozen=True)
class Result:
    """Outcome of a run.

    Args:
        after_step: the step that the run was resumed at; 0 for a new run. Times are those of later steps.
        timings: wall time of this process by activity.
        waited_share: share of the time of its steps spent waiting for the loader.
    """

    folder: Path
    step: int
    epochs: int
    heldout_loss: float | None
    after_step: int
    timings: list[Timing]
    waited_share: float

    def time_lines(self) -> list[str]:
        """Times of this process as a table, and the steps that they cover if it resumed the run."""
        lines = [f"{part['name']:<12}{part['seconds']:8.1f} s {part['share']:6.1%}" for part in self.timings]
        lines.append(f"steps waited for the loader {self.waited_share:.2%} of their time")
        if self.after_step:
            lines.append(f"times are of this process, which {covered_steps(self.after_step, self.step)}")
        return lines


def train(
    recipe: str | None,
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    console: Console | None = None,
    verbose: bool = False,
    after_evaluation: AfterEvaluation | None = None,
    group: Group = ALONE,
    fit_processes: bool = False,
) -> Result:
    """Train a recipe into a run directory, or continue a run.

    Args:
        recipe: packaged recipe or YAML file; None continues a run with its saved recipe.
        folder: the run directory; must not hold a run unless `resume`.
        overrides: `key=value` changes.
        group: the processes that train together; all of them call this with equal arguments.
        fit_processes: in a new run, set `plan.tokens_per_micro` so that every process has work.

    Raises:
        UnpadError: with the exit code of its kind; Stopped if `after_evaluation` ended the run. The directory then
            holds everything up to that point.
    """
    timers, began = Timers(), time.perf_counter()
    with group.together():
        # A run goes on without the model that it began from.
        known = run_recipe(folder) if resume and holds_run(folder) else None
        from_run = recipe is None
        recipe = read_command(folder)["recipe"] if recipe is None else recipe
        settings = resolved(run_recipe(folder, overrides) if from_run else open_recipe(recipe, overrides, known=known))
    with ExitStack() as telling, ExitStack() as stack:
        with group.together():
            locked = folder.exists()  # a new one is made once the data has been read
            if locked and group.leads:
                stack.enter_context(storage.RunLock(folder))
            exists = _holds_run(folder, resume)
            notes = [] if exists or not resume else ["no run to resume here: this is a new run"]
            if exists:
                overrides, settings, saved = resumed_recipe(None if from_run else recipe, overrides, folder)
            check_loggers(settings.log)
        division = parallelism_of(settings, group)
        telling.enter_context(division.telling(group))
        group.limit(settings.train.timeout)
        check_recipe(group, folder, settings, exists=exists)
        with group.together():
            setup = _prepare(settings, folder, timers, group, exists=exists)
            with timers("plan"):
                setup, changes, advice = share_out(setup, overrides, fit=fit_processes and not exists)
                overrides, advice = [*overrides, *changes], [*([setup.auto.line] if setup.auto else []), *advice]
                length = run_length(setup.stages)
            if exists and fit_processes:
                advice.append("--fit-processes is for new runs; this one keeps its micro-batches")
        check_alike(setup)
        with group.together():
            if group.leads:
                _take_folder(folder, locked, stack, private=setup.data.private)
        check_folder(group, folder, settings.train.timeout)
        setup = replace(setup, run_id=group.of_leader(lambda: (exists and run_id(folder)) or new_id()))
        with group.together():
            own_log.keep(folder, private=setup.data.private)
        with timers("build"):
            if not division.replicates:
                check_weights(setup, 0)  # later no process holds them whole
            setup = divide(setup)
        progress, state, warnings = restore(setup) if exists else (Progress(), None, [])
        notes += describe_changes(setup, saved, progress) if exists else []
        changed = differences(saved, settings) if exists else {}
        with group.together():
            if state is None and settings.train.init_from and setup.base is None:
                notes.append(start_from(setup, settings.train.init_from))
            with timers("save"):
                if group.leads and not exists:  # first: a run with a recipe resumes without the model
                    keep_origin(settings.train.init_from, folder)
                write_run_files(setup, recipe, overrides)
        check_weights(setup, progress.step)
        last = length.last(progress.stage, progress.step - progress.stage_step).step
        monitor = _open_monitor(setup, console, last, verbose=verbose)
        monitor.send_to(setup.recipe.log, setup.recipe.model_dump(mode="json"))
        try:
            _log_start(monitor, exists, progress, notes, warnings, changed)
            for message in advice:
                monitor.notice("note", message=message)
            run = RunContext(setup, progress, monitor, timers, Signals(group), length, after_evaluation)
            return _run_stages(run, state, began)
        except UnpadError as error:
            with suppress(DiskError):  # report only what ended the run
                monitor.log("stopped", message=error.what, exit_code=error.exit_code)
            raise
        finally:
            monitor.close()


def _prepare(settings: Recipe, folder: Path, timers: Timers, group: Group, *, exists: bool) -> Setup:
    """Read the data, build the model and check every stage; `exists` means that a run continues."""
    files, recorded = (open_files(settings, folder), recorded_precision(folder)) if exists else (None, None)
    setup = prepare_setup(settings, folder, files, timers, recorded=recorded, group=group)
    with timers("build"):
        check_stages(setup)
        asked(settings).check_model(settings, setup.model, group.size, goes_on=exists)
    return setup


def _open_monitor(setup: Setup, console: Console | None, last: int, *, verbose: bool) -> Monitor:
    """Open the metric files and the screen of a run that ends at step `last`, in the leading process."""
    train = setup.recipe.train
    if not setup.group.leads:
        return silent_monitor()
    on_cores = setup.device.type == "cpu"
    return Monitor(
        setup.folder,
        log_every=train.log_every,
        grad_norm_warning=train.grad_norm_warning,
        console=console or open_console(),
        total_steps=last,
        verbose=verbose,
        share=StepShare(setup.environment["threads"]) if on_cores else None,
    )


def _holds_run(folder: Path, resume: bool) -> bool:
    """Return whether the directory holds a run; refuse one that a new run would overwrite."""
    if not resume:
        refuse_new_run(folder)
    return holds_run(folder)


def _take_folder(folder: Path, locked: bool, stack: ExitStack, *, private: bool) -> None:
    """Make and lock the directory of a new run until the stack ends; delete partial files left by a killed run.

    Args:
        private: whether only the owner may enter it.
    """
    storage.make_folder(folder.parent)
    storage.make_folder(folder, private=private)
    if not locked:
        stack.enter_context(storage.RunLock(folder))
        _holds_run(folder, resume=False)  # another process may have started a run there meanwhile
    if private:
        storage.make_private(folder)
    for path in (folder, folder / CHECKPOINTS):
        if path.is_dir():
            storage.clean_leftovers(path, alone=path != folder)  # `unpad eval` writes beside the checkpoints


def start_from(setup: Setup, start: str) -> str:
    """Load another model's weights and return a log message. Parameters that it lacks keep their initial values."""
    weights, where = starting_weights(start)
    missing = put_weights(setup.model, weights, where, setup.model.additions)
    parts = ", ".join(sorted({name.partition(".")[0] for name in missing}))
    lacking = f"as that {'folder' if is_folder(start) else 'run'} lacks them"
    return f"from the weights of {where}" + (f"; initialized, {lacking}: {parts}" if missing else "")


def _log_start(
    monitor: Monitor,
    exists: bool,
    progress: Progress,
    notes: list[str],
    warnings: list[str],
    changed: dict[str, tuple[Any, Any]],
) -> None:
    """Truncate the metric files to the resume point and log how the run started.

    Args:
        changed: fields of the recipe that a resume changes, old and new; with them the log tells the recipe of every
            step.
    """
    if exists:
        monitor.resume(progress.step, progress.epoch_step)
    for message in warnings:
        monitor.log("warning", message=message)
    if exists:
        message = "; ".join([f"at step {progress.step}", *notes])
        monitor.log("resumed", step=progress.step, message=message, changed=changed)
    else:
        (monitor.notice if notes else monitor.log)("started", message="; ".join(notes) or "a new run")


def _run_stages(run: RunContext, state: State | None, began: float) -> Result:
    """Train all stages from where the progress is; `state` is the checkpoint that a run resumes from."""
    setup, progress, monitor, timers = run.setup, run.progress, run.monitor, run.timers
    with timers("log"):
        monitor.log("environment", **setup.environment, processes=setup.group.size)
        if facts := setup.data.facts():
            monitor.log("data", **facts)
        monitor.start(
            setup.group.of_leader(lambda: describe(setup, verbose=monitor.verbose))
        )  # pictures are compared for it
    heldout, epochs, has_best, trained = progress.best, progress.epoch, False, list[StageSetup]()
    start = progress.step
    with run.signals.listen():
        while progress.stage < len(setup.stages):
            stage = setup.stages[progress.stage]
            has_best = _has_work(run, stage)
            if has_best:
                epochs, heldout = run_stage(run, stage, state)
                trained.append(stage)
            state = None
            progress.next_stage()
    if not has_best:  # the last stage had nothing to do: save the weights as they are
        save_best(setup, progress)
    if trained:
        model = setup.parallelism.whole_model(setup.model)
        if model is not None and setup.group.leads:
            _keep_samples(run, model, trained[-1].kinds, anew=progress.step > start)
    timings = timers.summary(time.perf_counter() - began)
    monitor.log("timers", rows=timings, after_step=start, step=progress.step)
    monitor.log("finished", step=progress.step, heldout_loss=heldout)
    monitor.close()
    return Result(setup.folder, progress.step, epochs, heldout, start, timings, monitor.waited_share)


def _keep_samples(run: RunContext, model: Model, kinds: tuple[str, ...], *, anew: bool) -> None:
    """Save the samples of the final weights for the page, by the family's function; `anew` as in `TrainedModel`."""
    setup = run.setup
    with run.timers("samples"):
        ended = TrainedModel(model, setup.data, setup.recipe, kinds, setup.folder, run.progress.step, anew)
        keepsakes(ended)


def _has_work(run: RunContext, stage: StageSetup) -> bool:
    """Return whether a stage has data, epochs and steps left; log the reason if not."""
    progress, train = run.progress, stage.recipe.train
    if stage.train_ids.size == 0:
        reason = "no data to train on in " + " and ".join(f"data.{kind}" for kind in stage.kinds)
    elif train.max_epochs == 0:
        reason = "max_epochs is 0"
    elif train.max_steps is not None and progress.step >= train.max_steps and progress.stage_step == 0:
        reason = f"the run's steps are done, {train.max_steps}"
    else:
        return True
    run.monitor.log("stage_skipped", message=f"{stage.name}: {reason}", name=stage.name)
    return False
