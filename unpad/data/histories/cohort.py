"""Cohort: the examples of a run, each a patient at a landmark, with a label and a side of the split, and how a user
names a patient.

The landmark separates history (events until then) from the outcome (after it). `choose` takes the label of a patient
from the table of labels (`labels.py`): its column `label`, or, with `event`, `duration` and a horizon, 1 if the outcome
came within the horizon, 0 if the patient was observed for longer or a competing event came first, and none if the
patient is censored before it.

A patient is one example, or, with a list of landmarks or several rows in the table of labels, several, of later and
later landmarks, all of them on one side of the split. Van Houwelingen (2007), "Dynamic prediction by landmarking in
event history analysis".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unpad.data.histories.columns import WRITE_ZONES
from unpad.data.histories.event_files import Sides
from unpad.data.histories.event_rows import EventRows, EventTable, join, read_source
from unpad.data.histories.labels import LabelTable, TimeUnit, clock_of, read_labels
from unpad.data.histories.tables import Table
from unpad.data.sources.example import BadRow, Place, file_test
from unpad.data.sources.files import resolve_path
from unpad.data.sources.split import Split, Wanted, divide, taken, text_key
from unpad.errors import RecipeError, SourceError
from unpad.models.set_sequence.event_sets import OUTCOME
from unpad.recipes.data import EventLabels, EventSettings
from unpad.recipes.recipe import Recipe, stages_of
from unpad.terminal.table import number_of

TEST_PART = "as the test part"  # why patients of it are left out while a run learns


@dataclass(frozen=True, eq=False)
class Cohort:
    """Examples of a run: patients, each at a landmark, those of a patient side by side in the order of landmarks.

    Args:
        person: (num_examples,) int64, index into `EventRows.patients`.
        landmark: (num_examples,) float64, days on the clock of the events.
        label: (num_examples,) int64, 0, 1, or the place of one of several classes, or -1 if unknown; None if the recipe
            has no labels.
        classes: names of several classes; () for an outcome that comes or does not.
        duration: (num_examples,) float64, days from the landmark to the end of observation, 0 if unknown; None if the
            recipe has no durations.
        cause: (num_examples,) int64, what ended observation, as in `EventSets`; None with `duration`.
        split: (num_examples,) uint8 of `Split`.
        label_row: (num_examples,) int64, index into the table of labels, -1 without a row.
        left_out: reason for leaving out examples -> their number.
        bad: patients and rows of events that are refused.
        refused: (num_events,) bool, the refused rows of events.
        several: whether a patient may be several examples, which their landmarks tell apart.
        num_test: examples of the test part, which are left out of a cohort to learn from.
        unreached: times of a list of landmarks at which there is no example.
    """

    person: np.ndarray
    landmark: np.ndarray
    label: np.ndarray | None
    duration: np.ndarray | None
    cause: np.ndarray | None
    split: np.ndarray
    label_row: np.ndarray
    left_out: dict[str, int]
    bad: list[BadRow]
    refused: np.ndarray
    several: bool
    num_test: int = 0
    classes: tuple[str, ...] = ()
    unreached: tuple[float, ...] = ()

    @property
    def patient(self) -> np.ndarray:
        """Number of the patient of every example, (num_examples,) int64 from 0, rising."""
        return np.asarray(np.cumsum(np.diff(self.person, prepend=-1) != 0) - 1)

    def take(self, index: np.ndarray, **changes: Any) -> "Cohort":
        """These examples, (num,) int64, with other values of some fields that are not by example."""
        names = ("person", "landmark", "label", "duration", "cause", "split", "label_row")
        by_example = {name: values[index] for name in names if (values := getattr(self, name)) is not None}
        return replace(self, **by_example, **changes)

    def describe(self) -> str:
        """Number of patients, and of examples where a patient may be several."""
        patients = number_of(len(np.unique(self.person)), "patients")
        return f"{number_of(len(self.person), 'examples')} of {patients}" if self.several else patients


class _Choice:
    """Examples to choose from, those that are still in, and the numbers of the others by reason.

    Args:
        person: (num_examples,) int64, index into `EventRows.patients`.
        row: (num_examples,) int64, index into the table of labels, -1 without a row.
        left_out: of an earlier choice.
    """

    def __init__(self, person: np.ndarray, row: np.ndarray, left_out: dict[str, int]) -> None:
        self.person, self.row, self.left_out = person, row, dict(left_out)
        self.taking = np.ones(len(person), np.bool_)

    def values(self, of_rows: np.ndarray | None, fill: float = np.nan) -> np.ndarray:
        """Values of rows of labels, one per example, (num_examples,) float64."""
        spread = np.full(len(self.row), fill)
        if of_rows is not None:
            spread[self.row >= 0] = of_rows[self.row[self.row >= 0]]
        return spread

    def leave(self, gone: np.ndarray, why: str) -> None:
        number = int((gone & self.taking).sum())
        if number:
            self.left_out[why] = self.left_out.get(why, 0) + number
        self.taking &= ~gone


@dataclass(frozen=True, eq=False)
class PatientTables:
    """The tables of a recipe, and the cohort that they define; `labels` is None where the recipe has none."""

    rows: EventRows
    labels: LabelTable | None
    cohort: Cohort
    clock: TimeUnit

    @cached_property
    def tables(self) -> list[tuple[Table, list[BadRow]]]:
        """Every table once with its bad rows, each with its first fault: a file may hold facts and labels."""
        read = [(part.table, part.bad) for part in self.rows.parts]
        read += [(self.labels.table, self.labels.bad)] if self.labels else []
        by_files: dict[tuple[Path, ...], tuple[Table, dict[str, BadRow]]] = {}
        for table, bad in read:
            chosen, first = by_files.setdefault(tuple(file.path.resolve() for file in table.files), (table, {}))
            for name in chosen.unread.counts.keys() - table.unread.counts:
                del chosen.unread.counts[name]  # which the other reading of the file reads
            for row in bad:
                first.setdefault(row.where, row)
        return [(table, list(first.values())) for table, first in by_files.values()]

    @cached_property
    def refused(self) -> list[BadRow]:
        """Patients who are refused, and rows of theirs that have no other fault."""
        places = {row.where for _, bad in self.tables for row in bad}
        return [row for row in self.cohort.bad if row.where not in places]

    @property
    def bad(self) -> list[BadRow]:
        """Rows that cannot be used, and patients who are refused."""
        return [*(row for _, bad in self.tables for row in bad), *self.refused]

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks of all tables, and on landmarks without an example."""
        own = tuple(note for part in self.rows.parts for note in part.notes)
        empty = ", ".join(f"{time:,.10g}" for time in self.cohort.unreached)
        told = f"events.landmark: there is no example at {empty} {self.clock.unit}"
        return (*own, told) if empty else own

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return sum(len(table) + len(table.bad) for table, _ in self.tables)


def read_cohort(recipe: Recipe, wanted: Wanted = Wanted.LEARNING) -> PatientTables:
    """Read the tables of a recipe and choose its cohort: the patients that `wanted` asks for.

    Raises:
        SourceError: a table is missing or unusable, or no patient of the events is in the table of labels.
        RecipeError: settings do not fit the tables, or an outcome is among the facts.
    """
    _refuse_outcomes(recipe)
    settings, resolve = recipe.events, partial(resolve_path, recipe.data)
    with_split = recipe.data.split_version > 1
    parts = [read_source(source, settings, resolve, with_split) for source in recipe.data.events]
    clock = clock_of(parts, settings)
    labels = read_labels(resolve(settings.labels.path), settings, clock, with_split) if settings.labels else None
    _refuse_zones([*parts, *([labels] if labels else [])])
    nobody = pa.array([], pa.string())
    fixed = Sides.of_table(resolve(settings.split)) if settings.split is not None else None
    rows, persons = join(parts, [labels.ids if labels else nobody, fixed.ids if fixed else nobody])
    if labels is not None and len(rows.person) and len(persons[0]) and not np.isin(persons[0], rows.person).any():
        fix = "write the ids alike in both; columns of numbers lose leading zeros, and 007 and 7 are two patients"
        what = "E_LABEL no id of the events is in the table of labels"
        raise SourceError(what, where=f"{rows.where(0)} and {labels.where(0)}", fix=fix)
    cohort = choose(rows, labels, persons[0], settings, clock, has_bins=recipe.model.get("bins") is not None)
    sides = fixed or _declared_sides(rows, labels)
    cohort = split_patients(rows, cohort, sides.of(rows.patients), recipe, wanted)
    return PatientTables(rows, labels, cohort, clock)


def _refuse_outcomes(recipe: Recipe) -> None:
    """Refuse static facts that contain the outcome: columns of the table of labels that define the labels."""
    labels = recipe.events.labels
    if labels is None:
        return
    outcomes = {labels.label, labels.time, labels.event, labels.duration} - {None}
    for source in recipe.data.events:
        same = resolve_path(recipe.data, source.path).resolve() == resolve_path(recipe.data, labels.path).resolve()
        leaks = [name for name in source.static if same and name in outcomes]
        if leaks:
            what = f'E_LEAK the column "{leaks[0]}" is the outcome, and also a fact about the patient'
            raise RecipeError(what, where="data.events: static", fix="remove it from static")


def _refuse_zones(tables: Sequence[EventTable | LabelTable]) -> None:
    """Refuse times with a zone beside times without one, which may be hours apart from what they say.

    Raises:
        SourceError: names both columns.
    """
    columns = {zoned: f'"{name}" of {table.table.files[0].shown}' for table in tables
               for name, zoned in table.zones.items()}  # fmt: skip
    if len(columns) == 2:
        what = f"E_UNIT the times of {columns[True]} have a zone, and those of {columns[False]} have none"
        raise SourceError(what, where="data.events and events.labels", fix=WRITE_ZONES)


def refuse_unlearnable(recipe: Recipe, cohort: Cohort) -> None:
    """Refuse to train on a cohort from which the outcome cannot be learned.

    Raises:
        RecipeError: there are times to an outcome, but neither a horizon for labels nor bins.
        SourceError: no patient is left to train on, or all have one label and the recipe trains to classify.
    """
    labels = recipe.events.labels
    if labels is not None and labels.event is not None and labels.horizon is None and recipe.model.get("bins") is None:
        fix = "set events.labels.horizon to predict whether the outcome comes within it, or model.bins to predict when"
        raise RecipeError("nothing learns the outcome", where="events.labels", fix=fix)
    if not (cohort.split == Split.TRAIN).any():
        refuse_nobody(recipe, cohort)
    stages = [stage.recipe for stage in stages_of(recipe)]
    if labels is None or cohort.label is None or not any(stage.losses.get("classification", 1.0) for stage in stages):
        return
    known = np.unique(cohort.label[(cohort.split == Split.TRAIN) & (cohort.label >= 0)])
    if len(known) == 1:
        fix = "check the labels, the horizon and the split; losses.classification=0 trains without them"
        label = cohort.classes[known[0]] if cohort.classes else known[0]
        what = f"all training patients with a known label have label {label}, so there is nothing to classify"
        raise SourceError(what, where=labels.path, fix=fix)


def refuse_nobody(recipe: Recipe, cohort: Cohort) -> None:
    """Refuse a cohort without patients to train on, with the reasons.

    Raises:
        SourceError: always.
    """
    why = ", ".join(f"{number:,} {reason}" for reason, number in cohort.left_out.items())
    why = why or ("all are held out" if len(cohort.person) else "the tables name no patient")
    where = "data.events" if recipe.events.labels is None else recipe.events.labels.path
    fix = "check events.labels, events.landmark and events.split"
    raise SourceError(f"no patient is left to train on: {why}", where=where, fix=fix)


def choose(
    rows: EventRows,
    labels: LabelTable | None,
    persons: np.ndarray,
    settings: EventSettings,
    clock: TimeUnit,
    has_bins: bool,
) -> Cohort:
    """Choose the examples of a run, their landmarks and labels; all are on the training side until `split_patients`.

    Args:
        persons: (num_rows of labels,) int64, person of each row of the table of labels.
        has_bins: whether the model learns times to the outcome, of censored patients too.
    """
    person, row = _examples(len(rows.patients), persons, settings)
    choice = _Choice(person, row, {})
    label, end = choice.values(labels.label if labels else None), choice.values(labels.end if labels else None)
    has_event = np.bincount(rows.person, minlength=len(rows.patients)) > 0
    bad, refused = [], np.zeros(len(rows.person), np.bool_)
    if labels is None:
        bad += _without_events(rows, ~has_event)
        choice.leave(~has_event[person], "without any event")
    else:
        assert settings.labels is not None
        choice.leave(~has_event[person] & (row < 0), "in no table of events or labels")
        choice.leave(choice.values(~labels.usable, fill=0).astype(np.bool_), "whose row of labels is quarantined")
        unlabelled, endless = np.isnan(label), np.isnan(end) & (settings.labels.duration is not None)
        both = unlabelled & endless & (row >= 0)
        for what, unknown in (("label and duration", both), ("label", unlabelled), ("duration", endless)):
            bad += _missing(rows, labels, choice, unknown, settings.labels, what)
        label = np.where(endless, np.nan, label)
        if settings.landmark is None:
            refused = rows.days > end[rows.person]  # every person is one example
            what = "the event is after the outcome that is to be predicted"
            fix = "set events.landmark, or remove the row"
            bad += [rows.bad(event, "E_LEAK", what, fix) for event in np.flatnonzero(refused).tolist()]
    given = choice.values(None if labels is None else labels.landmark)
    landmark = _landmarks(rows, refused, choice, given, settings, clock)
    duration = None
    if labels is not None and settings.labels is not None and settings.labels.duration is not None:
        duration, cause = end - landmark, label
        choice.leave(duration < 0, "whose observation ended before the landmark")
        label = _within(duration, cause, choice, settings.labels, clock, has_bins)
    chosen = np.flatnonzero(choice.taking)
    rank = np.empty(len(rows.patients), np.int64)
    rank[_in_order(rows.patients)] = np.arange(len(rank))
    chosen = chosen[np.lexsort((landmark[chosen], rank[person[chosen]]))]
    reached = set(landmark[chosen].tolist())
    has_labels = settings.labels is not None and (settings.labels.label or settings.labels.horizon)
    return Cohort(
        person=person[chosen],
        landmark=landmark[chosen],
        label=np.where(np.isnan(label), -1, label)[chosen].astype(np.int64) if has_labels else None,
        duration=None if duration is None else np.nan_to_num(duration[chosen]),
        cause=None if duration is None else np.nan_to_num(cause[chosen]).astype(np.int64),
        split=np.zeros(len(chosen), np.uint8),
        label_row=row[chosen],
        left_out=choice.left_out,
        bad=bad,
        refused=refused,
        several=isinstance(settings.landmark, list)
        or (isinstance(settings.landmark, str) and len(np.unique(persons)) < len(persons)),
        classes=settings.labels.several if settings.labels is not None else (),
        unreached=tuple(time for time in settings.landmarks if reached and time / clock.per_day not in reached),
    )


def _examples(num_persons: int, persons: np.ndarray, settings: EventSettings) -> tuple[np.ndarray, np.ndarray]:
    """Person of every possible example, and its row in the table of labels, -1 without one; (num_examples,) int64 each,
    those of a person side by side.

    Args:
        persons: as of `choose`.
    """
    if isinstance(settings.landmark, str):
        without = np.setdiff1d(np.arange(num_persons), persons)
        person = np.concatenate([persons, without])
        order = np.argsort(person, kind="stable")
        return person[order], np.append(np.arange(len(persons)), np.full(len(without), -1))[order]
    row = np.full(num_persons, -1, np.int64)
    row[persons] = np.arange(len(persons))
    times = max(len(settings.landmarks), 1)
    return np.repeat(np.arange(num_persons), times), np.repeat(row, times)


def _in_order(patients: pa.Array) -> np.ndarray:
    """Sort ids independently of the tables' order: shorter ids first, as numbers count; return their indices."""
    keys = pa.table({"length": pc.binary_length(patients), "id": patients})
    return np.asarray(pc.sort_indices(keys, [("length", "ascending"), ("id", "ascending")])).astype(np.int64)


def _without_events(rows: EventRows, empty: np.ndarray) -> list[BadRow]:
    """Report files of patients without a row, and rows of facts that are all empty."""
    if not empty.any():
        return []
    files = {file.owner: file.shown for part in rows.parts for file in part.table.files}
    fix = "remove it, or give the patient a label in events.labels"
    bad = []
    for person in np.flatnonzero(empty).tolist():
        where = files.get(rows.patients[person].as_py(), rows.parts[0].table.files[0].shown)
        bad.append(BadRow(where, "E_EMPTY", f"patient {rows.alias(person)} has no event", fix))
    return bad


def _missing(
    rows: EventRows, labels: LabelTable, choice: _Choice, unknown: np.ndarray, settings: EventLabels, what: str
) -> list[BadRow]:
    """Treat examples without `what`, such as a label, as the recipe says."""
    unknown = unknown & choice.taking
    if settings.missing == "keep" or not unknown.any():
        return []
    choice.leave(unknown, f"without a {what}")
    if settings.missing == "exclude":
        return []
    people, events = np.unique(rows.person, return_index=True)
    first = dict(zip(people.tolist(), events.tolist(), strict=True))
    fix = f"add the {what}, or set events.labels.missing to exclude or keep"
    bad = []
    for one, of in dict.fromkeys(zip(choice.person[unknown].tolist(), choice.row[unknown].tolist(), strict=True)):
        where = labels.where(of) if of >= 0 else rows.where(first[one])
        has = f"an empty {what}" if of >= 0 else "events and no label"
        bad.append(BadRow(where, "E_LABEL", f"patient {rows.alias(one)} has {has}", fix))
    return bad


def _landmarks(
    rows: EventRows, refused: np.ndarray, choice: _Choice, given: np.ndarray, settings: EventSettings, clock: TimeUnit
) -> np.ndarray:
    """The landmark of every example, (num_examples,) float64, in days; `given` are those of the table of labels."""
    if settings.landmarks:
        return np.tile(np.array(settings.landmarks) / clock.per_day, len(given) // len(settings.landmarks))
    if settings.landmark is not None:
        choice.leave(np.isnan(given), "without a landmark")
        return given
    last = np.full(len(given), -np.inf)  # every person is one example
    timed = ~np.isnan(rows.days) & ~refused
    np.maximum.at(last, rows.person[timed], rows.days[timed])
    return np.where(np.isfinite(last), last, 0.0)


def _within(
    duration: np.ndarray, cause: np.ndarray, choice: _Choice, settings: EventLabels, clock: TimeUnit, has_bins: bool
) -> np.ndarray:
    """Labels by the horizon, (num_examples,) float64, nan for censored patients and without a horizon.

    Who had a competing event by then has no outcome any more: the label is 0, and not unknown.
    """
    horizon = clock.horizon(settings)
    if horizon is None:
        return np.full(len(duration), np.nan)
    ended = (cause > 0) & (duration <= horizon)
    known = ended | (duration >= horizon)
    if settings.censored == "exclude" or (settings.censored == "auto" and not has_bins):
        choice.leave(~known & ~np.isnan(duration), "censored before the horizon")
    return np.where(known, ended & (cause == OUTCOME), np.nan)


# --------------------------------------------------------------------------- sides of the split


def split_patients(rows: EventRows, cohort: Cohort, side: np.ndarray, recipe: Recipe, wanted: Wanted) -> Cohort:
    """Give every patient a part, in every class of label its share; leave out those that `wanted` does not ask for and
    those missing in a table of splits.

    A patient counts once, with the largest label of its examples, and all of these get its part.

    Args:
        side: (num_persons,) int8 of `Split` that the tables declare.
    """
    choice = _Choice(cohort.person, cohort.label_row, cohort.left_out)
    mine = side[cohort.person]
    if recipe.events.split is not None:
        choice.leave(mine == Split.UNDECLARED, "in no part of events.split")
    split = np.full(len(mine), Split.TRAIN, np.uint8)
    here = np.flatnonzero(choice.taking)
    _, first, patient = np.unique(cohort.patient[here], return_index=True, return_inverse=True)
    ids = rows.patients.take(pa.array(cohort.person[here[first]])).to_pylist()
    keys = np.array([text_key(patient_id) for patient_id in ids], np.uint64)
    classes = None
    if cohort.label is not None:
        classes = np.full(len(first), -1)
        np.maximum.at(classes, patient, cohort.label[here])
    parts = divide(keys, mine[here[first]], recipe.data, recipe.train.seed, wanted, classes=classes)
    split[here] = parts[patient]
    choice.leave(~taken(split, wanted), TEST_PART if wanted is Wanted.LEARNING else "of other parts")
    num_test = int((split[here] == Split.TEST).sum()) if wanted is Wanted.LEARNING else 0
    rest = np.flatnonzero(choice.taking)
    return replace(cohort, split=split).take(rest, left_out=choice.left_out, num_test=num_test)


def _declared_sides(rows: EventRows, labels: LabelTable | None) -> Sides:
    """Parts that the tables declare.

    Raises:
        SourceError: they declare two parts for a patient.
    """
    declared = [part.declared for part in rows.parts]
    if labels is not None and labels.split is not None:
        declared.append(Sides.of_rows(labels.ids, labels.split))
    sides = Sides.joined(declared)
    sides.refuse_two("data.events")
    return sides


@dataclass(frozen=True, eq=False)
class PatientRow:
    """A row of a table, or a patient by id or file.

    Args:
        where: its place, without an id.
        person: index into `EventRows.patients`; -1 for a row of nobody.
        events: (n,) int64, its events among all; none for a label or a patient.
    """

    where: str
    person: int
    events: np.ndarray


def find_row(tables: PatientTables, place: Place, given: str) -> PatientRow | None:
    """Find a patient by id or by the file of all events, or the row at a place.

    Args:
        given: as the user wrote it, perhaps an id.
    """
    rows, nothing = tables.rows, np.zeros(0, np.int64)
    is_it = file_test(place.file)
    owners = [file.owner for part in rows.parts for file in part.table.files if file.owner and is_it(str(file.path))]
    patients = rows.patients.to_pylist()
    wanted = owners[0] if owners and not place.item else given
    if wanted in patients:
        person = patients.index(wanted)
        return PatientRow(f"patient {rows.alias(person)}", person, nothing)
    if place.line is None:
        return None
    for number, part in enumerate(rows.parts):
        row = _table_row(part.table, place)
        if row is not None:
            events = np.flatnonzero((rows.source == number) & (rows.origin == row))
            return PatientRow(part.table.where(row), int(rows.person[events[0]]) if len(events) else -1, events)
    labels = tables.labels
    if labels is None or (row := _table_row(labels.table, place)) is None:
        return None
    person = tables.cohort.person[np.isin(tables.cohort.label_row, np.flatnonzero(labels.origin == row))]
    return PatientRow(labels.table.where(row), int(person[0]) if len(person) else -1, nothing)


def _table_row(table: Table, place: Place) -> int | None:
    """Index of the row at a place; None if the table does not have it."""
    is_it = file_test(place.file)
    files = [number for number, file in enumerate(table.files) if is_it(str(file.path)) or file.shown == place.file]
    matches = np.flatnonzero(np.isin(table.file_of, files) & (table.row == place.line))
    return int(matches[0]) if len(matches) else None
