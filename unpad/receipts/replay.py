"""`unpad replay`: recompute one step of a run with the training code and compare it with the recorded metrics."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from unpad.data.family import family_of
from unpad.errors import CheckpointError, CollapseError, NonFiniteError, RecipeError, ResumeError
from unpad.receipts import starts
from unpad.receipts.receipt import Receipt, compare, differing, learnt, of_memory, reasons
from unpad.recipes.recipe import Recipe
from unpad.run.checkpoint import State
from unpad.run.folder import find_run
from unpad.run.kept import REFERENCE, open_files, read_reference
from unpad.run.monitor import StepRecord, silent_monitor, train_row
from unpad.run.timers import Timers
from unpad.storage import finite
from unpad.terminal.progress import progress as shown_progress
from unpad.training.context import RunContext, Signals
from unpad.training.parallel.divisions import parallelism_class
from unpad.training.progress import Progress, recorded_precision, refuse_changes
from unpad.training.setup import Setup, prepare_setup, resolved
from unpad.training.stage import RunLength, epoch_plan, with_recipe
from unpad.training.stage_loop import repeat_steps

# Steps up to the last of them that one recipe trained, in passes of at most so many tokens according to the log.
_Segment = tuple[Recipe, int, int | None]
Rows = dict[int, dict[str, Any]]  # of metrics, by step


def replay(run: str | Path, step: int | None = None, overrides: Sequence[str] = ()) -> Receipt:
    """Recompute a step of a run from its plan, its data and a checkpoint, and compare it with the recorded metrics.

    Steps are computed as in training on one process, with the run's number of threads and precision. Nothing is written
    to its directory.

    Args:
        run: directory, or name under runs/.
        step: by default the last one directly after a checkpoint or the beginning of a stage, which needs no other step
            before it.
        overrides: new paths of moved data, such as "data.text=NEW".

    Raises:
        RecipeError: the run has not recorded the step, or was not trained.
        ResumeError: the data changed since the run began, or the model was divided among processes.
        CheckpointError, SourceError: no starting point is left, or a file cannot be used.
    """
    folder = find_run(run)
    starts.refuse_untrained(folder)
    kept = starts.read_sessions(folder)
    sessions = [replace(one, recipe=resolved(starts.relocated(one.recipe, overrides))) for one in kept]
    stages = starts.recorded_steps(folder, sessions[-1].recipe)
    step = _default_step(folder, stages, sessions) if step is None else step
    stage = next((one for one in stages if step in one.rows), None)
    if stage is None:
        last = max(stages[-1].rows)
        what = f"the run has no record of step {step:,}; its last one is {last:,}"
        raise RecipeError(what, where=str(folder), fix="choose a step with --step, or leave it out")
    _refuse_divided(starts.session_of(sessions, step), folder)
    newest = next(starts.readable_states(folder), None)
    with (
        _threads_of(starts.session_of(sessions, step), newest),
        starts.advising(f"unpad replay {run}", sessions[-1].recipe),
    ):
        return _replay(folder, stage, step, sessions, newest)


def _replay(
    folder: Path, steps: starts.StageSteps, step: int, sessions: Sequence[starts.Session], newest: State | None
) -> Receipt:
    session, began = starts.session_of(sessions, step), perf_counter()
    recipe, precision = session.recipe, recorded_precision(folder)
    setup = prepare_setup(recipe, folder, open_files(recipe, folder), compare=False, recorded=precision)
    if newest is not None:
        refuse_changes(setup, newest)
    every = starts.starts(folder, recipe, steps, needs_scale=precision == "fp16")
    possible = [one for one in every if one.after < step]
    start, progress, state, damages = starts.put_start(setup, possible)
    found, failure = Rows(), ""
    with _apart(setup, steps.name) as setup:
        try:
            _repeat(setup, progress, state, _segments(sessions, start.after, step), found)
        except (NonFiniteError, CollapseError) as error:
            failure = f"{error.what}, where the run went on"
    others = [one for one, row in found.items() if one in steps.rows and differing(compare(steps.rows[one], row))]
    columns = compare(steps.rows[step], found.get(step))
    plan = epoch_plan(setup.stages[steps.index], progress.epoch)
    is_taken = step in found
    cuts = starts.cuts_until(sessions, step)
    why = []
    if differing(columns):
        in_parts = of_memory(session, cuts, start.after, progress.most_tokens, newest)
        why = reasons(session, setup, newest, in_parts, from_scratch=start.path is None)
    return Receipt(
        folder=folder,
        step=step,
        stage=steps.name,
        epoch=steps.rows[step]["epoch"],
        epoch_step=progress.epoch_step if is_taken else 0,
        epoch_steps=plan.num_steps,
        start=start,
        num_computed=step - start.after,
        seconds=perf_counter() - began,
        columns=columns,
        first_differing=min(others, default=None),
        failure=failure,
        why=why,
        damages=damages,
        micros=learnt(setup.data, plan.step(progress.epoch_step - 1)) if is_taken else [],
        units=family_of(recipe).UNITS[1],
        by_plan_alone=steps.rows[step]["rows"] is None,
        is_checked=newest is not None,
        cut=cuts[-1] if cuts else None,
    )


def _default_step(folder: Path, stages: Sequence[starts.StageSteps], sessions: Sequence[starts.Session]) -> int:
    """The last step directly after a checkpoint or the beginning of a stage; the very last if there is none."""
    recipe = sessions[-1].recipe
    near = [
        one.after + 1 for stage in stages for one in starts.starts(folder, recipe, stage) if one.after + 1 in stage.rows
    ]
    return max(near, default=max(stages[-1].rows))


def _refuse_divided(session: starts.Session, folder: Path) -> None:
    """Refuse steps of a sharded model with gradients that one process cannot reproduce bit for bit.

    Raises:
        ResumeError: always for such steps.
    """
    if (what := parallelism_class(session.recipe).unequal) and session.environment.get("processes") != 1:
        raise ResumeError(what, where=str(folder), fix="`unpad trace` tells which rows a run learnt from")


@contextmanager
def _threads_of(session: starts.Session, newest: State | None) -> Iterator[None]:
    """Compute with as many threads as the run did."""
    before = torch.get_num_threads()
    was = session.environment or (newest.values["environment"] if newest is not None else {})
    threads = was.get("threads")
    try:
        if type(threads) is int and threads > 0:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _apart(setup: Setup, stage: str) -> Iterator[Setup]:
    """The set-up with a temporary run directory. It gets the log-probabilities of pairs if the run kept those of this
    stage; those of an earlier stage are computed again."""
    with TemporaryDirectory(prefix="unpad-replay-") as place:
        with suppress(CheckpointError):
            if read_reference(setup.folder)[0].stage == stage:
                shutil.copyfile(setup.folder / REFERENCE, Path(place) / REFERENCE)
        yield replace(setup, folder=Path(place))


def _segments(sessions: Sequence[starts.Session], after: int, last: int) -> list[_Segment]:
    """Steps from `after` + 1 to `last`, by the recipe that trained them and the parts that they were computed in."""

    def of(step: int) -> tuple[Recipe, int | None]:
        cuts = starts.cuts_until(sessions, step)
        return starts.session_of(sessions, step).recipe, cuts[-1].tokens if cuts else None

    parts = groupby(range(after + 1, last + 1), of)
    return [(recipe, max(steps), most_tokens) for (recipe, most_tokens), steps in parts]


def _repeat(setup: Setup, progress: Progress, state: State | None, segments: Sequence[_Segment], found: Rows) -> None:
    """Take the steps of the segments, and put their rows into `found`."""
    with shown_progress("computing", segments[-1][1] - progress.step, "steps") as bar:

        def take(record: StepRecord) -> None:
            found[record.step] = finite(train_row(record))
            bar.advance()

        for place, (recipe, last, most_tokens) in enumerate(segments, 1):
            stages = with_recipe(setup.stages, recipe)
            of_segment = replace(setup, recipe=recipe, stages=stages)
            if most_tokens is not None:
                progress.most_tokens = most_tokens
            run = RunContext(of_segment, progress, silent_monitor(take), Timers(), Signals(), RunLength([]), None)
            state = repeat_steps(run, stages[progress.stage], state, last, goes_on=place < len(segments))
