"""`unpad trace`: the steps that trained on a row of the data files, from plans alone, or why none did."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from unpad.batching.plan import Plan
from unpad.data.family import Data, FoundRow, RowSpan, family_of, find_in_all, open_data
from unpad.data.sources.example import place_of
from unpad.data.sources.split import PARTS, Split, Wanted
from unpad.models import model_config
from unpad.receipts import starts
from unpad.recipes.recipe import Recipe, stages_of
from unpad.run.folder import find_run
from unpad.run.kept import open_files
from unpad.terminal.progress import counted
from unpad.terminal.table import text_table, wrapped
from unpad.training.progress import refuse_changed_data
from unpad.training.setup import resolved
from unpad.training.stage import StageSetup, epoch_plan, make_stage, plan_inputs, window_ids

MOST_STEPS = 40  # that are printed


@dataclass(frozen=True)
class Learnt:
    """A piece of the row in a step.

    Args:
        epoch: epoch of the stage, from 1; step: step of the run; micro: micro-batch in the step, from 1.
        start, stop: tokens, patches or events of the row; targets: its labels that count.
        skipped: whether the step was skipped for a non-finite loss or gradient.
    """

    stage: str
    epoch: int
    step: int
    micro: int
    where: str
    start: int
    stop: int
    targets: int
    skipped: bool


@dataclass(frozen=True)
class Trace:
    """Every step that learnt from a row.

    Args:
        row: the row, and the sequences that hold it.
        part: train, valid or test, "" for a row in no sequence.
        steps: of the run so far.
        learnt: in the order of the steps.
        why: reasons why it was not used in a stage or an epoch, with counts.
        units: names of a row's length, plural.
    """

    folder: Path
    row: FoundRow
    part: str
    steps: int
    learnt: list[Learnt]
    why: dict[str, int]
    units: str

    def lines(self) -> list[str]:
        """The trace for a terminal."""
        steps = len({one.step for one in self.learnt})
        counted = f"{steps:,}" if steps else "none"
        lines = [self.row.where, f"learnt from in {counted} of {self.steps:,} steps of {self.folder}"]
        lines += [f"part of the data: {self.part}"] if self.part else []
        lines += wrapped(self.row.remark) if self.row.remark else []
        for reason, times in self.why.items():
            lines += wrapped(f"{reason}, {times:,} times" if times > 1 else reason)
        if self.learnt:
            lines += ["", *self._table()]
        more = len(self.learnt) - MOST_STEPS
        return [*lines, f"and {more:,} more: --json has all"] if more > 0 else lines

    def _table(self) -> list[str]:
        several, cells = len({place_of(one.where).rest for one in self.learnt}) > 1, []
        for one in self.learnt[:MOST_STEPS]:
            rest = place_of(one.where).rest.strip(" ,") if several else ""  # a reply of a pair, or a copy
            remark = " ".join([*([rest] if rest else []), *(["skipped"] if one.skipped else [])])
            span = f"{one.start}-{one.stop}"
            cells.append((one.stage, f"{one.epoch}", f"{one.step:,}", f"{one.micro}", span, f"{one.targets}", remark))
        head = ("stage", "epoch", "step", "micro-batch", self.units, "targets", "")
        return text_table(head, cells, left=(0, 6))

    def to_json(self) -> dict[str, Any]:
        """The trace as JSON values."""
        return {
            "run": str(self.folder),
            "row": self.row.where,
            "remark": self.row.remark,
            "part": self.part or None,
            "steps": self.steps,
            "learnt": [asdict(one) for one in self.learnt],
            "not_learnt": self.why,
        }


@dataclass(frozen=True)
class History:
    """A run's data, and the steps that it has recorded, stage by stage."""

    folder: Path
    recipe: Recipe
    data: Data
    done: Sequence[starts.StageSteps]


@dataclass
class _Tracing:
    """A trace in the making."""

    data: Data
    row: FoundRow
    learnt: list[Learnt] = field(default_factory=list)
    why: Counter[str] = field(default_factory=Counter)


def trace(run: str | Path, given: str, overrides: Sequence[str] = ()) -> Trace:
    """Find the steps in which a run learnt from a row, by the plans of all its epochs; no model is built.

    Args:
        run: directory, or name under runs/.
        given: FILE:LINE, FILE[ELEMENT], the file of a picture, or for patients an id or the place of an event.
        overrides: new paths of moved data, such as "data.text=NEW".

    Raises:
        RecipeError: there is no such run, row or file.
        ResumeError: the data changed since the run began.
        SourceError: a file cannot be used.
    """
    return trace_row(open_history(run, overrides), given)


def open_history(run: str | Path, overrides: Sequence[str] = ()) -> History:
    """Open a run's data and recorded steps; raises as `trace`."""
    folder = find_run(run)
    starts.refuse_untrained(folder)
    recipe = resolved(starts.relocated(starts.read_sessions(folder)[-1].recipe, overrides))
    done = starts.recorded_steps(folder, recipe)
    with starts.advising(f"unpad trace {run} ROW", recipe):
        data = open_data(recipe, open_files(recipe, folder), compare=False)
    newest = next(starts.readable_states(folder), None)
    if newest is not None:
        refuse_changed_data(data, newest, folder)
    return History(folder, recipe, data, done)


def trace_row(history: History, given: str) -> Trace:
    """Find the steps that learnt from a row; arguments and errors as in `trace`."""
    folder, recipe, data, done = history.folder, history.recipe, history.data, history.done
    files = open_files(recipe, folder)
    holding, row = find_in_all(data, given, lambda: open_data(recipe, files, Wanted.TEST, compare=False))
    part = PARTS[Split(int(holding.table.split[row.parts[0][0]]))] if row.parts else ""
    row = row if holding is data else replace(row, parts=[])
    tracing = _Tracing(data, row)
    if part == "train":
        _trace_stages(tracing, recipe, done)
    elif part:
        tracing.why["it is held out: training never reads it" if part == "valid" else "`unpad eval` alone reads it"] = 1
    learnt = sorted(tracing.learnt, key=lambda one: (one.step, one.micro))
    return Trace(folder, row, part, max(done[-1].rows), learnt, dict(tracing.why), family_of(recipe).UNITS[1])


def _trace_stages(tracing: _Tracing, recipe: Recipe, done: Sequence[starts.StageSteps]) -> None:
    """Visit the epochs of every stage with steps."""
    by_index, longest = {steps.index: steps for steps in done}, model_config(recipe.model).longest
    table, kinds = tracing.data.table, tracing.data.kinds
    seq_ids = np.array([part[0] for part in tracing.row.parts])
    for index, resolved_stage in enumerate(stages_of(recipe)):
        stage = make_stage(resolved_stage, tracing.data, longest)
        if not np.isin(seq_ids, stage.train_ids).any():
            tracing.why[f"stage {stage.name} does not use data.{kinds[int(table.kind[seq_ids[0]])]}"] += 1
        elif index not in by_index:
            tracing.why[f"stage {stage.name} has taken no step"] += 1
        else:
            _trace_stage(tracing, stage, by_index[index])


def _trace_stage(tracing: _Tracing, stage: StageSetup, steps: starts.StageSteps) -> None:
    before, num_epochs = steps.before, max(row["epoch"] for row in steps.rows.values())
    for epoch in counted(range(num_epochs), f"planning {stage.name}", num_epochs, "epochs"):
        for window in range(stage.windows):
            plan = epoch_plan(stage, epoch, window)
            _trace_window(tracing, stage, (epoch, window), plan, before, steps.rows)
            before += plan.num_steps


def _trace_window(
    tracing: _Tracing,
    stage: StageSetup,
    place: tuple[int, int],
    plan: Plan,
    before: int,
    taken: Mapping[int, dict[str, Any]],
) -> None:
    """Add the steps of an epoch, or a window of it, that learnt from the row.

    Args:
        place: epoch and window.
        before: steps of the run before it; taken: rows of those of the stage that it took.
    """
    epoch, pieces, found = place[0], plan.pieces, False
    seq_ids = [part[0] for part in tracing.row.parts]
    for at in np.flatnonzero(np.isin(pieces.seq_ids[plan.order], seq_ids)).tolist():
        piece = int(plan.order[at])
        micro = int(np.searchsorted(plan.micro_offsets, at, "right")) - 1
        index = int(np.searchsorted(plan.step_offsets, micro, "right")) - 1
        span = (pieces.seq_ids, pieces.starts, pieces.stops, pieces.first_target)
        rows = _rows_in(tracing, *(int(column[piece]) for column in span))
        found = found or bool(rows)
        step = before + index + 1
        if rows and step > max(taken):
            tracing.why[f"epoch {epoch + 1} of stage {stage.name} has it in a later step than the run took"] = 1
            continue
        number = micro - int(plan.step_offsets[index]) + 1
        skipped = bool(taken.get(step, {}).get("skipped"))
        tracing.learnt += [Learnt(stage.name, epoch + 1, step, number, **asdict(row), skipped=skipped) for row in rows]
    if not found and np.isin(seq_ids, window_ids(stage, *place)).any():
        tracing.why[_reason(tracing, stage, place, plan)] += 1


def _rows_in(tracing: _Tracing, seq_id: int, start: int, stop: int, first_target: int) -> list[RowSpan]:
    """The parts of the row in a piece of a sequence."""
    spans = tracing.data.row_spans(seq_id, start, stop, first_target)
    own = place_of(tracing.row.where)[:2]
    rows: list[RowSpan] = []
    for sequence, begin, end in tracing.row.parts:
        if sequence != seq_id:
            continue
        if begin == 0 and end >= int(tracing.data.table.positions[seq_id]):
            return spans
        rows += [one for one in spans if place_of(one.where)[:2] == own and start < end and stop > begin]
    return rows


def _reason(tracing: _Tracing, stage: StageSetup, place: tuple[int, int], plan: Plan) -> str:
    """The reason why an epoch has no piece of the row; place: as of `_trace_window`."""
    seq_ids, (lengths, settings, known) = [part[0] for part in tracing.row.parts], plan_inputs(stage, *place)
    table = tracing.data.table
    if not np.isin(seq_ids, known["seq_ids"]).any():
        weight = table.weights[int(table.source[seq_ids[0]])]
        return f"an epoch of stage {stage.name} did not draw it, as its source has the weight {weight:g}"
    if np.isin(seq_ids, plan.pieces.seq_ids).any():
        return f"an epoch of stage {stage.name} left out its last step, which was short (plan.drop_last)"
    limit = min(known["max_tokens"], settings.max_tokens or known["max_tokens"])
    if settings.overflow == "drop" and int(lengths[seq_ids].max()) > limit:
        return f"an epoch of stage {stage.name} left it out, as it is longer than {limit:,} (plan.overflow=drop)"
    return f"an epoch of stage {stage.name} left it out, as none of its tokens is a target"
