"""`unpad replay`: recompute one step of a run with the training code and compare it with the recorded metrics."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from unpad.batching.plan import Micro
from unpad.data.family import Data, RowSpan, family_of
from unpad.data.sources.example import place_of
from unpad.errors import CheckpointError, CollapseError, NonFiniteError, RecipeError, ResumeError
from unpad.processes.sums import sum_kind
from unpad.receipts import starts
from unpad.receipts.starts import Cut, Session, StartingPoint
from unpad.recipes.recipe import Recipe
from unpad.run.checkpoint import State
from unpad.run.folder import find_run
from unpad.run.kept import REFERENCE, open_files, read_reference
from unpad.run.monitor import StepRecord, silent_monitor, train_row
from unpad.run.timers import Timers
from unpad.storage import finite
from unpad.terminal.progress import progress as shown_progress
from unpad.terminal.table import described, number_of, text_table
from unpad.training.context import RunContext, Signals
from unpad.training.parallel.divisions import parallelism_class
from unpad.training.progress import (
    DECIDE_BITS,
    OTHER_DRAWS,
    SHARDED_AMONG,
    UPDATE_RULE,
    Progress,
    recorded_precision,
    refuse_changes,
)
from unpad.training.setup import Setup, prepare_setup, resolved
from unpad.training.stage import RunLength, epoch_plan, with_recipe
from unpad.training.stage_loop import repeat_steps

# Columns of a step in the order in which one follows from the others: the first difference is the one to explain.
ORDER = (
    *("rows", "stage", "epoch", "sequences", "tokens", "padded_tokens", "targets"),
    *("lr", "values", "loss", "grad_norm"),
)


Column = tuple[str, Any, Any]  # of a step: name, recorded value, recomputed value; None for a missing number


def compare(recorded: dict[str, Any], computed: dict[str, Any] | None) -> list[Column]:
    """Columns that the run recorded, in the order in which they follow from each other; JSON keeps every bit.

    Args:
        computed: None for a step that could not be computed.
    """
    given = computed or {}
    names = [*(name for name in ORDER if recorded.get(name) is not None)]
    names += [name for name, value in recorded.items() if name not in names and value is not None]
    columns: list[Column] = []
    for name in names:
        if name == "values" and isinstance(recorded[name], dict):
            before, now = recorded[name], given.get(name) or {}
            columns += [(term, before.get(term), now.get(term)) for term in dict.fromkeys([*before, *now])]
        else:
            columns.append((name, recorded[name], given.get(name)))
    return columns


def differing(columns: Sequence[Column]) -> list[Column]:
    """Those that differ in any bit."""
    return [column for column in columns if column[1] != column[2]]


def of_memory(
    session: Session, cuts: Sequence[Cut], after: int, most_tokens: int | None, newest: State | None
) -> list[str]:
    """Likely reasons for a different cut of micro-batches into parts, each a sentence.

    Args:
        session: that took the step.
        cuts: until the step, as the log has them.
        after: step that the computation began after.
        most_tokens: most tokens of a pass at the end of the computation.
        newest: a checkpoint of the run.
    """
    other = "parts have other last bits"
    if most_tokens is not None and (not cuts or most_tokens < cuts[-1].tokens):
        return [f"memory did not hold micro-batches here, computed in parts of at most {most_tokens:,} tokens: {other}"]
    processes = session.environment.get("processes", 1)
    if cuts and cuts[-1].step > after and processes != 1:
        began = f"memory ended in step {cuts[-1].step:,}"
        return [f"{began}, which {processes} processes cut each in its own parts: {other}"]
    saved = newest.values.get("progress", {}).get("most_tokens") if newest is not None else None
    if saved is not None and not cuts:
        return [f"the run computed micro-batches in parts, from a step on that its log does not name: {other}"]
    return []


def reasons(
    session: Session, setup: Setup, newest: State | None, in_parts: list[str], *, from_scratch: bool
) -> list[str]:
    """Likely reasons for a difference, each a sentence.

    Args:
        session: that took the step.
        setup: of the steps that were computed again.
        newest: a checkpoint of the run.
        in_parts: those of `of_memory`.
        from_scratch: whether they began from the weights that the run began with.
    """
    found, values = list[str](), newest.values if newest is not None else {}
    was = session.environment or values.get("environment", {})
    for key in (*DECIDE_BITS, "version"):
        if key in was and was[key] != setup.environment.get(key):
            name = "version of unpad" if key == "version" else key
            found.append(f"{name} is {setup.environment.get(key)}, was {was[key]}")
    if newest is not None and values["update_rule"] != UPDATE_RULE:
        found.append(OTHER_DRAWS)
    processes = was.get("processes", 1)
    if processes > 1 and sum_kind(session.recipe.train.sums, was["device"], processes) == "fast":
        found.append(f"{processes} processes trained with train.sums=fast: the bits depend on their number")
    if values.get(SHARDED_AMONG, 1) != 1:
        found.append(f"the model was divided among {values[SHARDED_AMONG]} processes")
    found += in_parts
    if session.undescribed:
        what = "a later resume changed the recipe, and the log does not keep what was before"
        found.append(f"{what}: {session.undescribed}")
    if from_scratch and session.recipe.train.init_from and setup.base is None:
        found.append(f"{session.recipe.train.init_from} may hold other weights than when the run began")
    if not found:
        what = "nothing that the run records has changed"
        found.append(f"{what}: a checkpoint or a row of metrics.jsonl was altered, or the code was")
    return found


MOST_ROWS = 40  # of a step that are printed
SHOWN = 28  # characters of a number
IMPLIED = ("step", "stage", "kind", "epoch", "perplexity", "pad_share", "skipped")  # not shown unless they differ


@dataclass(frozen=True)
class Receipt:
    """A recomputed step of a run.

    Args:
        start: where the computation began; num_computed: steps that it took, this one included.
        seconds: that it took, reading the data included.
        epoch_step: number of the step within its epoch, from 1, of `epoch_steps`, which is 0 where these are not known
            as the epoch has several windows; 0 if it could not be taken.
        columns: the step's, compared; first_differing: first computed step that differs, None without one.
        failure: reason why the step could not be recomputed; "" if it could.
        why: likely reasons for a difference.
        damages: checkpoints that could not be read.
        micros: the rows of every micro-batch of the step, in the order of the batch.
        units: names of a row's length, plural.
        by_plan_alone: whether the run recorded no rows, and the plan alone tells them.
        is_checked: whether a checkpoint confirmed that the data is the run's.
        cut: the last step up to this one that ran out of memory; larger micro-batches were computed in parts from then
            on, as they are here. None without one.
    """

    folder: Path
    step: int
    stage: str
    epoch: int
    epoch_step: int
    epoch_steps: int
    start: StartingPoint
    num_computed: int
    seconds: float
    columns: list[Column]
    first_differing: int | None
    failure: str
    why: list[str]
    damages: list[str]
    micros: list[list[RowSpan]]
    units: str
    by_plan_alone: bool
    is_checked: bool
    cut: Cut | None

    @property
    def equal(self) -> bool:
        """True if the step equals the recorded one to the bit."""
        return not self.differing and not self.failure

    @property
    def differing(self) -> list[Column]:
        """Columns of the step that differ in any bit; the first is the one to explain."""
        return differing(self.columns)

    def lines(self) -> list[str]:
        """The receipt for a terminal."""
        verdict = "equal to the bit" if self.equal else "differs"
        return [
            f"step {self.step:,} of {self.folder}: {verdict}",
            "",
            *described(*zip(*self._facts(), strict=True)),
            "",
            *self._numbers(),
            "",
            *self._rows(),
        ]

    def _facts(self) -> list[tuple[str, str]]:
        taken = "this step alone" if self.num_computed == 1 else f"{self.num_computed:,} steps"
        place = f"{self.stage}, epoch {self.epoch}"
        if self.epoch_step:
            of = f" of {self.epoch_steps:,}" if self.epoch_steps else ""
            place += f", step {self.epoch_step:,}{of} of the epoch"
        facts = [("stage", place), ("began from", self.start.name)]
        facts += [("", damage) for damage in self.damages]
        facts.append(("computed", f"{taken}, in {self.seconds:.1f} s"))
        if self.cut is not None:
            told = f"micro-batches of more than {self.cut.tokens:,} tokens, as memory ended in step {self.cut.step:,}"
            facts.append(("in parts", told))
        if not self.is_checked:
            facts.append(("data", "no checkpoint is left that tells whether it is the run's"))
        if self.failure:
            facts.append(("failed", self.failure))
        if self.first_differing is not None and self.first_differing < self.step:
            facts.append(("first", f"step {self.first_differing:,} is the first of these that differs"))
        if not self.failure and self.differing:
            more = f" and {len(self.differing) - 1} more" if len(self.differing) > 1 else ""
            facts.append(("differs in", f"{self.differing[0][0]}{more}"))
        facts += [("likely" if index == 0 else "", reason) for index, reason in enumerate(self.why)]
        return facts

    def _numbers(self) -> list[str]:
        shown = [column for column in self.columns if column[0] not in IMPLIED or column[1] != column[2]]
        rows = [(name, _shown(old), "the same" if old == new else _shown(new)) for name, old, new in shown]
        return text_table(("", "recorded", "computed again"), rows)

    def _rows(self) -> list[str]:
        if not self.micros:
            return []
        num = sum(map(len, self.micros))
        source = "; which ones is by the plan alone, as the run recorded none" if self.by_plan_alone else ""
        micros = number_of(len(self.micros), "micro-batches")
        lines, left = [f"learnt from {number_of(num, 'rows')} in {micros}{source}"], MOST_ROWS
        for number, rows in enumerate(self.micros, start=1):
            lines += row_lines(f"micro-batch {number}", rows[:left], self.units)
            left -= min(left, len(rows))
        return lines + ([f"and {number_of(num - MOST_ROWS, 'more rows')}: --json has all"] if num > MOST_ROWS else [])

    def to_json(self) -> dict[str, Any]:
        """The receipt as JSON values, with every row."""
        return {
            "run": str(self.folder),
            "step": self.step,
            "verdict": "equal" if self.equal else "differs",
            "stage": self.stage,
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "start": {"after": self.start.after, "name": self.start.name},
            "steps_computed": self.num_computed,
            "seconds": self.seconds,
            "columns": [
                {"name": name, "recorded": recorded, "computed": computed, "equal": recorded == computed}
                for name, recorded, computed in self.columns
            ],
            "first_differing_step": self.first_differing,
            "failure": self.failure,
            "likely_reasons": self.why,
            "damaged_checkpoints": self.damages,
            "rows_recorded": not self.by_plan_alone,
            "data_checked": self.is_checked,
            "cut": None if self.cut is None else self.cut._asdict(),
            "micro_batches": [[asdict(row) for row in rows] for rows in self.micros],
        }


def learnt(data: Data, micros: Sequence[Micro]) -> list[list[RowSpan]]:
    """Rows of the micro-batches of a step."""
    return [[row for piece in _pieces(micro) for row in data.row_spans(*piece)] for micro in micros]


def _pieces(micro: Micro) -> list[tuple[int, int, int, int]]:
    columns = (micro.seq_ids, micro.starts, micro.stops, micro.first_target)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def row_lines(title: str, rows: Sequence[RowSpan], units: str) -> list[str]:
    """Tables of the rows of a micro-batch, one per file, or per folder of pictures."""
    by_file: dict[str, list[tuple[str, str, str]]] = {}
    for row in rows:
        place = place_of(row.where)
        file, name = (place.file, place.item + place.rest) if place.item else os.path.split(row.where)
        by_file.setdefault(file, []).append((name, f"{row.start}-{row.stop}", str(row.targets)))
    lines = []
    for file, cells in by_file.items():
        lines += ["", f"{title}: {file}", *text_table(("row", units, "targets"), cells)]
    return lines


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)[:SHOWN]


# --------------------------------------------------------------------------- a step, taken again


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
        what = f"the run has no record of step {step:,}; its last one is {max(stages[-1].rows):,}"
        raise RecipeError(what, where=str(folder), fix="choose a step with --step, or leave it out")
    session, newest = starts.session_of(sessions, step), next(starts.readable_states(folder), None)
    # Gradients of a sharded model are sums that one process cannot reproduce bit for bit.
    if (what := parallelism_class(session.recipe).unequal) and session.environment.get("processes") != 1:
        raise ResumeError(what, where=str(folder), fix="`unpad trace` tells which rows a run learnt from")
    with _threads_of(session, newest), starts.advising(f"unpad replay {run}", sessions[-1].recipe):
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
    start, progress, state, damages = starts.put_start(setup, [one for one in every if one.after < step])
    found, failure = Rows(), ""
    with _apart(setup, steps.name) as setup:
        try:
            _repeat(setup, progress, state, _segments(sessions, start.after, step), found)
        except (NonFiniteError, CollapseError) as error:
            failure = f"{error.what}, where the run went on"
    others = [one for one, row in found.items() if one in steps.rows and differing(compare(steps.rows[one], row))]
    columns = compare(steps.rows[step], found.get(step))
    plan = epoch_plan(setup.stages[steps.index], progress.epoch, progress.window)
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
        epoch_steps=plan.num_steps if setup.stages[steps.index].windows == 1 else 0,
        start=start,
        num_computed=step - start.after,
        seconds=perf_counter() - began,
        columns=columns,
        first_differing=min(others, default=None),
        failure=failure,
        why=why,
        damages=damages,
        micros=learnt(setup.data, plan.step(progress.window_step - 1)) if is_taken else [],
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
