"""Training of a recipe into a run directory: data, resume, stages in turn, files of the run."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from unpad.errors import DiskError, UnpadError
from unpad.evaluation.family import TrainedModel, keepsakes
from unpad.processes.group import ALONE, Group
from unpad.run.checkpoint import State
from unpad.run.monitor import Monitor, silent_monitor
from unpad.run.screen import open_console
from unpad.run.timers import StepShare, Timers, Timing, covered_steps
from unpad.training.context import AfterEvaluation, Deadline, RunContext, Signals
from unpad.training.progress import save_best
from unpad.training.setup import Setup, describe
from unpad.training.stage import StageSetup, run_length
from unpad.training.stage_loop import run_stage
from unpad.training.start import RunFolder


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
    with RunFolder.opened(recipe, folder, overrides, timers, group, resume=resume) as place:
        setup = place.take(place.prepare(fit=fit_processes))
        progress, state = place.begin(setup)
        with timers("plan"):
            length, start = run_length(setup.stages), progress.step
        last = length.last(progress.stage, start - progress.stage_step).step
        with _open_monitor(setup, console, last, verbose=verbose) as monitor:
            place.describe(monitor, progress)
            deadline = Deadline(setup.recipe.train.max_minutes)
            run = RunContext(setup, progress, monitor, timers, Signals(group), length, after_evaluation, deadline)
            _describe_run(run)
            epochs, heldout, trained = _run_stages(run, state)
            if trained is not None:
                _keep_samples(run, trained.kinds, anew=progress.step > start)
            timings = timers.summary(time.perf_counter() - began)
            monitor.log("timers", rows=timings, after_step=start, step=progress.step)
            monitor.log("finished", step=progress.step, heldout_loss=heldout)
    return Result(folder, progress.step, epochs, heldout, start, timings, monitor.waited_share)


@contextmanager
def _open_monitor(setup: Setup, console: Console | None, last: int, *, verbose: bool) -> Iterator[Monitor]:
    """Open the metric files and the screen of a run that ends at step `last`, in the leading process; the log keeps the
    error that the block ends with."""
    if not setup.group.leads:
        yield silent_monitor()
        return
    train = setup.recipe.train
    monitor = Monitor(
        setup.folder,
        log_every=train.log_every,
        grad_norm_warning=train.grad_norm_warning,
        console=console or open_console(),
        total_steps=last,
        verbose=verbose,
        share=StepShare(setup.environment["threads"]) if setup.device.type == "cpu" else None,
    )
    try:
        monitor.send_to(setup.recipe.log, setup.recipe.model_dump(mode="json"))
        yield monitor
    except UnpadError as error:
        with suppress(DiskError):  # report only what ended the run
            monitor.log("stopped", message=error.what, exit_code=error.exit_code)
        raise
    finally:
        monitor.close()


def _describe_run(run: RunContext) -> None:
    """Log the environment and the data, show what is trained, and keep the first sequences."""
    from unpad.training.show import keep_first

    setup, monitor = run.setup, run.monitor
    with run.timers("log"):
        monitor.log("environment", **setup.environment, processes=setup.group.size)
        if facts := setup.data.facts():
            monitor.log("data", **facts)
        # Pictures are compared for it.
        monitor.start(setup.group.of_leader(lambda: describe(setup, verbose=monitor.verbose)))
        if setup.group.leads:
            keep_first(setup)


def _run_stages(run: RunContext, state: State | None) -> tuple[int, float | None, StageSetup | None]:
    """Train all stages from where the progress is.

    Args:
        state: the checkpoint that the run resumes from.

    Returns:
        Epochs and best held-out loss of the last stage that had work, and that stage; None if none had.
    """
    setup, progress = run.setup, run.progress
    epochs, heldout, trained, has_best = progress.epoch, progress.best, None, False
    with run.signals.listen(), run.saver:
        while progress.stage < len(setup.stages):
            stage = setup.stages[progress.stage]
            has_best = _has_work(run, stage)
            if has_best:
                epochs, heldout = run_stage(run, stage, state)
                trained = stage
            state = None
            progress.next_stage()
    if not has_best:  # the last stage had nothing to do: save the weights as they are
        save_best(setup, progress)
    return epochs, heldout, trained


def _keep_samples(run: RunContext, kinds: tuple[str, ...], *, anew: bool) -> None:
    """Save the samples of the final weights for the page, by the family's function; `anew` as in `TrainedModel`."""
    setup = run.setup
    model = setup.parallelism.whole_model(setup.model)
    if model is not None and setup.group.leads:
        with run.timers("samples"):
            keepsakes(TrainedModel(model, setup.data, setup.recipe, kinds, setup.folder, run.progress.step, anew))


def _has_work(run: RunContext, stage: StageSetup) -> bool:
    """Return whether a stage has data, epochs and steps left; log the reason if not."""
    progress, train = run.progress, stage.recipe.train
    if stage.train_ids.size == 0:
        reason = "no data to train on in " + " and ".join(f"data.{kind}" for kind in stage.kinds)
    elif train.max_epochs == 0:
        reason = "max_epochs is 0"
    elif train.max_steps is not None and progress.step >= train.max_steps and progress.stage_step == 0:
        reason = f"the run's steps are done, {train.max_steps}"
    elif run.deadline.reached:
        reason = f"the minutes of train.max_minutes={run.deadline.minutes:g} are over"
    else:
        return True
    run.monitor.log("stage_skipped", message=f"{stage.name}: {reason}", name=stage.name)
    return False
