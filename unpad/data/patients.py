"""Patients as sequences of events, grouped into sets.

A sequence is a patient, or, where the recipe has several landmarks, a patient at one of them; a position is one of the
events until then. A patient without events is a sequence too, with a label or a time to the outcome. Everything is in
memory as flat arrays, so a batch is a few gathers.

The folder `histories/` reads the tables: `event_rows.py` the events, `labels.py` the table of labels, `cohort.py` each
patient's label, landmark and split, `assemble.py` the sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch

from unpad.batching.batch import RaggedBatch, make_batch, required
from unpad.batching.layout import build_layout
from unpad.batching.plan import Micro
from unpad.data import family as families
from unpad.data.histories import assemble
from unpad.data.histories.cohort import Cohort, PatientTables, find_row, read_cohort, refuse_nobody, refuse_unlearnable
from unpad.data.histories.columns import are_whole
from unpad.data.histories.event_rows import EventTable
from unpad.data.histories.leaks import LabelLeak, PatientEvents, worst_leak
from unpad.data.histories.report import PatientsReport
from unpad.data.histories.tables import alias, named_by, names_key
from unpad.data.show import Shown
from unpad.data.sources.bad_rows import apply_policy, refuse_empty
from unpad.data.sources.example import BadRow, Unread, place_of
from unpad.data.sources.files import resolve_path
from unpad.data.sources.split import Split, Wanted
from unpad.errors import RecipeError, SourceError
from unpad.models import model_config
from unpad.models.contract import Model, ModelConfig, PredictsSets, ReadsCodeVectors
from unpad.models.set_sequence.event_sets import EventSets
from unpad.recipes.recipe import Recipe
from unpad.storage import sha256_file
from unpad.terminal.table import number_of

KINDS = ("events",)
UNITS = ("patients", "events")
MOST_PATIENTS = 20_000  # of a regression with which a model begins
FILES = (assemble.CODES,)
NO_TEXT = "this run is one of patients and writes no text", "use `unpad predict {run}`"


@dataclass(frozen=True, eq=False)
class EventData(families.Data):
    """Patients of a run; one of several landmarks is as many sequences, or examples, side by side.

    Args:
        ids: (num_patients,) as the tables have them, int64 or str; never in a message.
        landmarks: (num_patients,) on the clock of the recipe: float64 in `events.unit`, or str for timestamps; None
            where no patient has several.
        known: names and scales of the codes.
        code: (num_events,) int32, row of the code embedding.
        values: (num_events,) float32 on the scale of `events.scale`, nan without a value.
        standard: the same values in standard deviations from the mean of the code.
        sets: starts of patients and sets, and times of sets.
        cohort: labels, landmarks and split of the patients.
        places: (num_patients,) str, a row of each patient.
        code_vectors: (num_codes, dim) float32 from `events.code_embeddings`, or None.
        horizon: days from the landmark within which the outcome makes the label 1; None without such a time.
        names_key: random key of the patients' pseudonyms, of the run or of the process that began it.
        recipe: names the tables.
    """

    table: families.SequenceTable
    ids: np.ndarray
    landmarks: np.ndarray | None
    known: assemble.Codes
    code: np.ndarray
    values: np.ndarray
    standard: np.ndarray
    sets: assemble.Sets
    cohort: Cohort
    places: list[str]
    code_vectors: np.ndarray | None
    report: PatientsReport
    horizon: float | None
    names_key: bytes
    recipe: Recipe
    family: ClassVar[str] = "patients"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    private: ClassVar[bool] = True
    label_fields: ClassVar[tuple[str, ...]] = ("events.labels", "events.landmark")
    least_content: ClassVar[int] = 8

    @property
    def codes(self) -> tuple[str, ...]:
        """Names of the codes, row by row of the code embedding; row 0 is for unknown codes."""
        return self.known.names

    @property
    def labels(self) -> np.ndarray | None:
        """(num_patients,) int64, 0, 1, or the place in `classes`, -1 if unknown; None if the recipe has no labels."""
        return self.cohort.label

    def check_trainable(self) -> None:
        if not self.table.positions[self.table.split == Split.TRAIN].any():
            left_out = ", ".join(f"{number:,} {why}" for why, number in self.report.counts.items() if number)
            what = "no patient to train on has an event" + (f": {left_out}" if left_out else "")
            raise SourceError(what, where="data.events", fix="check the tables, their times, and events.landmark")

    @property
    def unit(self) -> str:
        """Name of the sequences in text, plural."""
        return "patients" if self.landmarks is None else "examples"

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of several classes; () for an outcome that comes or does not."""
        return self.cohort.classes

    @property
    def num_outputs(self) -> int:
        return len(self.codes)

    @property
    def files(self) -> dict[str, bytes]:
        return {assemble.CODES: self.known.to_bytes()}

    @property
    def secrets(self) -> dict[str, bytes]:
        return {families.NAMES_KEY: self.names_key}

    def load(self, micro: Micro) -> RaggedBatch:
        ids = micro.seq_ids
        assert np.array_equal(micro.stops - micro.starts, self.table.positions[ids]), "a patient is never cut"
        sets = self.sets
        events = _ranges(sets.events_of[ids], sets.events_of[ids + 1])
        chosen = _ranges(sets.sets_of[ids], sets.sets_of[ids + 1])
        members, history = np.diff(sets.set_starts)[chosen], np.diff(sets.sets_of)[ids]
        batch = self._batch(ids, events, members, history, sets.times[chosen])
        return batch.pad(pad_to=micro.pad_to) if micro.pad_to else batch

    def alone(self, seq_id: int, start: int, stop: int, first_target: int) -> RaggedBatch:
        sets = self.sets
        first, last = sets.sets_of[seq_id : seq_id + 2].tolist()
        sizes, events = list[int](), list[int]()
        for set_number in range(first, last):
            inside = range(sets.set_starts[set_number], sets.set_starts[set_number + 1])
            sizes.append(len(inside))
            events += inside
        index, members = np.array(events, np.int64), np.array(sizes, np.int64)
        return self._batch(np.array([seq_id]), index, members, np.array([len(sizes)]), sets.times[first:last])

    def show(self, micro: Micro) -> Shown:
        """Its sets in order, with the values as the tables have them and as the model reads them, and what is left
        out."""
        seq_id, batch = int(micro.seq_ids[0]), self.load(micro)
        sets, known, rows = batch.require(EventSets), self.known, list[tuple[str, ...]]()
        first_event, first_set = int(self.sets.events_of[seq_id]), int(self.sets.sets_of[seq_id])
        set_of = np.repeat(np.arange(sets.num_sets), sets.members.lengths().numpy()).tolist()
        for place, (code, number) in enumerate(zip(required(batch.input_ids).tolist(), set_of, strict=True)):
            begins = place == 0 or set_of[place - 1] != number
            day = "" if self.sets.timeless[first_set + number] else f"{float(sets.times[number]):.6g}"
            value = known.mean[code] + known.std[code] * float(self.standard[first_event + place])
            read = (f"{value:.6g}", f"{float(sets.values[place]):+.3f}") if sets.has_value[place] else ("", "")
            rows.append((f"{number + 1}" if begins else "", day if begins else "", known.names[code], *read))
        facts = (*self._outcome(seq_id), self._left_out(seq_id))
        return Shown(self.where(seq_id), facts, heads=("set", "day", "code", "value", "as read"), rows=tuple(rows))

    def _outcome(self, seq_id: int) -> list[str]:
        """Label and time to the outcome of a patient, in words."""
        cohort, facts = self.cohort, list[str]()
        if self.labels is not None:
            label = int(self.labels[seq_id])
            facts.append(f"label {(self.classes or ('0', '1'))[label]}" if label >= 0 else "no label")
        if cohort.duration is not None and cohort.cause is not None:
            causes = ["the end of observation", "the outcome", *self.report.competing]
            facts.append(f"followed for {cohort.duration[seq_id]:,.6g} days, until {causes[int(cohort.cause[seq_id])]}")
        return facts

    def _left_out(self, seq_id: int) -> str:
        """Numbers of a patient's events, of those that the model does not read too."""
        report = self.report
        all_counts = (report.num_read, report.per_source, report.num_late, report.num_strange)
        num_read, num, late, strange = (int(counts[seq_id].sum()) for counts in all_counts)
        skipped = strange if self.recipe.events.unknown_codes == "skip" else 0
        others = {
            "after the landmark": late,
            "of unknown codes": skipped,
            "beyond events.max_events": num_read - num - skipped,
        }
        left = ", ".join(f"{number:,} {why}" for why, number in others.items() if number)
        sets = number_of(int(np.diff(self.sets.sets_of)[seq_id]), "sets")
        return f"{number_of(num, 'events')} in {sets}" + (f"; left out: {left}" if left else "")

    def class_labels(self) -> tuple[np.ndarray, tuple[str, ...]] | None:
        return None if self.labels is None else (self.labels, self.classes or ("0", "1"))

    def identities(self) -> list[str]:
        return [str(patient_id) for patient_id in self.ids.tolist()]

    def where(self, seq_id: int) -> str:
        at = "" if self.landmarks is None else f" at {self.landmarks[seq_id]}"
        return f"{self.places[seq_id]} (patient {alias(str(self.ids[seq_id]), self.names_key)}{at})"

    @property
    def bad_rows(self) -> Sequence[BadRow]:
        return self.report.bad

    def find_otherwise(self, given: str) -> families.FoundRow | None:
        """A patient by id or file, or by the place of an event or a label."""
        with named_by(self.names_key):
            tables = read_cohort(self.recipe)
            row = find_row(tables, place_of(given), given)
            if row is None:
                return None
            patients = np.flatnonzero(tables.cohort.person == row.person).tolist()
            parts = [(patient, 0, int(self.table.positions[patient])) for patient in patients]
            if not parts:
                reasons = ", ".join(f"{number:,} {reason}" for reason, number in tables.cohort.left_out.items())
                remark = "it is of no patient of the cohort" + (f", which leaves out {reasons}" if reasons else "")
                return families.FoundRow(row.where, [], remark)
            if not len(row.events):
                return families.FoundRow(row.where, parts, f"of {self.where(patients[0])}")
            events, *_ = assemble.read_histories(tables, self.recipe.events)
            used_rows = assemble.assemble(tables, events, self.recipe.events, self.known).events.row
        if not np.isin(row.events, used_rows).any():
            remark = "no history has it: it is after the landmark, a duplicate, or beyond events.max_events"
            return families.FoundRow(row.where, [], remark)
        return families.FoundRow(row.where, parts, f"in the history of {self.where(patients[0])}")

    def fingerprint(self) -> str:
        cohort, sets = self.cohort, self.sets
        whole = (self.code, sets.events_of, sets.sets_of, sets.set_starts, cohort.split, cohort.label, cohort.cause)
        numbers = (self.values, sets.times, cohort.duration)
        ids = "".join(f"{patient_id}," for patient_id in self.ids.tolist())
        landmarks = None if self.landmarks is None else repr(self.landmarks.tolist())
        return families.digest_of(self.known.to_bytes(), *whole, *numbers, ids, landmarks)

    def complete(self, config: ModelConfig) -> ModelConfig:
        """Fill in the horizon and the competing events of the hazards, the number of classes, and that last values act
        linearly where their scale suits it."""
        own, section = self.recipe.events, config.model_dump(mode="json")
        if "horizon" in config.decided:
            days = None if section["bins"] is None else self.horizon
            _decide(section, "horizon", days, "have no horizon" if days is None else f"are of day {days:g}")
        if "competing" in config.decided and section["bins"] is not None:
            num = len(own.labels.competing) if own.labels else 0
            _decide(section, "competing", num, f"name {number_of(num, 'competing events')}")
        if "classes" in config.decided and own.labels is not None:
            given, num = section["classes"], len(self.classes) or 2
            _decide(section, "classes", num, f"have {num} classes")
            for field, usual, shown in (("bins", None, "null"), ("positive_weight", 1.0, "1")):
                if num > 2 and section.get(field, usual) != usual:
                    what = f"the labels have {num} classes, and model.{field} is of one outcome"
                    fix = f"set model.{field}={shown}, or leave events.labels.classes out"
                    raise RecipeError(what, where=f"model.{field}", fix=fix)
            section["classes"] = num if num > 2 else given
        if "last_values" in config.decided and section["last_values"] is None:
            section["last_values"] = own.scale != "standard" and own.labels is not None
        return model_config(section)

    def initialize(self, model: Model) -> None:
        """Load the vectors of `events.code_embeddings`.

        Raises:
            RecipeError: their length differs from `model.code_vectors`.
        """
        vector_size = None if self.code_vectors is None else self.code_vectors.shape[1]
        wanted = model.code_vector_size if isinstance(model, ReadsCodeVectors) else None
        if vector_size != wanted:
            what = f"events.code_embeddings gives vectors of length {vector_size}, and the model takes {wanted}"
            raise RecipeError(what, where="model.code_vectors", fix=f"set model.code_vectors={vector_size or 'null'}")
        if self.code_vectors is not None and isinstance(model, ReadsCodeVectors):
            model.load_code_vectors(torch.from_numpy(self.code_vectors))

    def begin(self, model: Model, most: int = MOST_PATIENTS) -> None:
        """Fit the linear path of a new model on training patients, at most so many of them, evenly chosen.

        Every example counts, as in training; its penalty is chosen by leaving out patients with all of theirs.
        """
        ids = np.flatnonzero(self.table.split == Split.TRAIN)
        if isinstance(model, PredictsSets) and len(ids):
            ids = ids[np.linspace(0, len(ids) - 1, min(len(ids), most)).round().astype(np.int64)]
            start, stops = np.zeros(len(ids), np.int32), self.table.positions[ids].astype(np.int32)
            batch = self.load(Micro(ids, start, stops, start, pad_to=0, fill_to=0))
            model.begin(batch, torch.from_numpy(np.unique(self.table.group[ids], return_inverse=True)[1]))

    def facts(self) -> dict[str, Any]:
        return self.report.unread.facts

    def lines(self) -> list[str]:
        return [*self.report.lines(self.cohort, self.known, self.values, self.sets), *self.leak_lines()]

    def leak_lines(self) -> list[str]:
        """A warning of what alone tells the label of the patients to train on."""
        at_last = np.diff(self.table.group, append=-1) != 0  # the landmark of the longest history
        leak = self.worst_leak(self.events_of(np.flatnonzero(at_last & (self.table.split == Split.TRAIN))))
        if leak is None:
            return []
        fix = "if it is known after the prediction alone, leave it out of events and static, or set events.landmark"
        return [f"warning: {leak.what[0]} alone tells label {leak.label}: {fix}"]

    def worst_leak(self, events: PatientEvents) -> LabelLeak | None:
        """What tells the label of these patients, if one thing tells nearly all."""
        return worst_leak(events, None if self.labels is None else self.labels[events.ids], self.classes)

    def events_of(self, ids: np.ndarray) -> PatientEvents:
        """Events of patients, by their sequences `ids`, (num_patients,) int64."""
        starts = self.sets.events_of
        events = _ranges(starts[ids], starts[ids + 1])
        sizes = np.diff(self.sets.set_starts)
        time = np.where(np.repeat(self.sets.timeless, sizes), np.nan, np.repeat(self.sets.times, sizes))
        patient, code = np.repeat(np.arange(len(ids)), np.diff(starts)[ids]), self.code[events].astype(np.int64)
        return PatientEvents(ids, patient, code, self.standard[events], time[events], self.codes)

    def describe_outputs(self) -> str:
        return number_of(len(self.codes), "codes")

    # ----------------------------------------------------------------------- batches

    def _batch(
        self, ids: np.ndarray, events: np.ndarray, members: np.ndarray, history: np.ndarray, times: np.ndarray
    ) -> RaggedBatch:
        """Build a flat batch of patients.

        Args:
            events: (num_events,) int64, events of these patients.
            members: (num_sets,) events of each set; history: (num_seqs,) sets of each patient.
            times: (num_sets,) float32.
        """
        nothing, values = np.zeros(len(events), np.int64), self.values[events]
        has_value = ~np.isnan(values)
        cohort = self.cohort
        batch = make_batch(self.code[events], nothing, nothing.astype(np.bool_), self.table.positions[ids], ids)
        sets = EventSets(
            values=torch.from_numpy(np.where(has_value, values, 0)),
            has_value=torch.from_numpy(has_value),
            members=build_layout(members),
            history=build_layout(history),
            times=torch.from_numpy(times.astype(np.float32)),
            durations=None if cohort.duration is None else torch.from_numpy(cohort.duration[ids].astype(np.float32)),
            cause=None if cohort.cause is None else torch.from_numpy(cohort.cause[ids]),
        )
        labels = None if cohort.label is None else torch.from_numpy(cohort.label[ids])
        return replace(batch, seq_labels=labels, parts=(sets,))


def _decide(section: dict[str, Any], field: str, value: float | None, labels: str) -> None:
    """Fill in a field of a model by what the labels say; refuse another value there."""
    if section[field] not in (None, value):
        what = f"model.{field} is {section[field]:g}, and the labels {labels}"
        raise RecipeError(what, where=f"model.{field}", fix=f"leave it out; events.labels.{field} decides it")
    section[field] = value


def _ranges(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Whole numbers of [start, stop) of every pair, end to end, (sum of lengths,) int64."""
    lengths = stops - starts
    return np.asarray(np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths))


def num_outputs(files: dict[str, bytes]) -> int:
    """Number of codes of a run, the unknown one included."""
    return len(assemble.load_codes(files[assemble.CODES]).names)


def next_command(recipe: Recipe, run: str) -> str:
    """Command that uses a trained run."""
    has_outcome = recipe.events.labels is not None
    return f"unpad predict {run} --out risk.csv" if has_outcome else f"unpad embed {run} --out vectors.parquet"


def near_duplicates(recipe: Recipe) -> list[str]:
    """No lines, as patients are not compared; see `Family`."""
    families.check_near_duplicates(recipe, EventData)
    return []


# --------------------------------------------------------------------------- reading


def open_data(recipe: Recipe, kept: dict[str, bytes] | None, wanted: Wanted = Wanted.LEARNING) -> EventData:
    """Read the patients of a recipe that `wanted` asks for.

    Raises:
        SourceError: a table is missing or unusable, bad rows are refused, or there is no patient to train on.
        RecipeError: settings do not fit the tables, an outcome is among the facts, or the plan would cut a patient.
    """
    key = (kept or {}).get(families.NAMES_KEY) or names_key()  # runs of earlier versions have none
    refuse_empty(len(recipe.data.events), "events", [])
    with named_by(key):
        return open_tables(recipe, read_cohort(recipe, wanted), kept, key)


def open_tables(recipe: Recipe, tables: PatientTables, kept: dict[str, bytes] | None, key: bytes = b"") -> EventData:
    """Make sequences of the tables of a recipe; raises as `open_data`.

    Args:
        key: of the run's names for patients.
    """
    settings = recipe.events
    events, counts, repeated, num_late = assemble.read_histories(tables, settings)
    bad = [*tables.bad, *repeated]
    loses_table = any(0 < len(table) + len(table.bad) <= len(rows) for table, rows in tables.tables)
    apply_policy(bad, tables.num_rows, recipe.data, "RECIPE.yaml", loses_table=loses_table)
    if kept is None:
        refuse_unlearnable(recipe, tables.cohort)
    elif not len(tables.cohort.person):
        refuse_nobody(recipe, tables.cohort)
    known = assemble.load_codes(kept[assemble.CODES]) if kept else None
    histories = assemble.assemble(tables, events, settings, known)
    vectors, without = None, list[str]()
    if settings.code_embeddings is not None:
        path = resolve_path(recipe.data, settings.code_embeddings)
        vectors, without = assemble.read_vectors(path, histories.known.names)
    report = PatientsReport(
        num_rows=tables.num_rows,
        bad=bad,
        num_sorted=sum(part.unsorted for part in tables.rows.parts),
        counts={**counts, **histories.counts},
        unknown=histories.unknown,
        without_vector=without,
        per_source=assemble.per_source(tables, histories.events.patient, histories.events.row),
        num_read=histories.num_read,
        num_strange=histories.num_strange,
        num_late=num_late,
        source_names=tuple(part.name for part in tables.rows.parts),
        has_end=not settings.labels or bool(settings.labels.time) or settings.landmark is not None,
        unread=Unread.of([table.unread for table, _ in tables.tables]),
        notes=(*tables.notes, *histories.notes),
        competing=tuple(settings.labels.competing) if settings.labels else (),
    )
    table = _table(recipe, tables, histories.sets)
    known, code, value = histories.known, histories.events.code, histories.events.value
    standard = known.standardised(code, value).astype(np.float32)
    return EventData(
        table=table,
        ids=_ids(tables),
        landmarks=_landmarks(tables) if tables.cohort.several else None,
        known=known,
        code=code.astype(np.int32),
        values=standard if known.scale is None else known.scaled(code, value).astype(np.float32),
        standard=standard,
        sets=histories.sets,
        cohort=tables.cohort,
        places=_places(tables, histories),
        code_vectors=vectors,
        report=report,
        horizon=tables.clock.horizon(settings.labels),
        names_key=key,
        recipe=recipe,
    )


def _table(recipe: Recipe, tables: PatientTables, sets: assemble.Sets) -> families.SequenceTable:
    table = families.sequence_table(
        np.diff(sets.events_of),
        tables.cohort.split,
        num_targets=_count_targets(sets, tables.cohort),
        file_hashes=_hashes(recipe, tables.rows.parts),
        num_test=tables.cohort.num_test,
        attended=np.diff(sets.sets_of) + 1,  # sets and one readout
        group=tables.cohort.patient,
    )
    most, what = int(table.positions.max(initial=0)), "a patient has {} events"
    families.refuse_cuts(recipe, most, what, "a plan would cut through a set", "set events.max_events={}")
    return table


def _ids(tables: PatientTables) -> np.ndarray:
    """Ids of the patients as the tables have them, (num_patients,) int64 or str."""
    ids: np.ndarray = tables.rows.patients.take(pa.array(tables.cohort.person)).to_numpy(zero_copy_only=False)
    # Ids of the table of labels may be other than whole numbers.
    is_whole = all(part.whole_ids for part in tables.rows.parts) and are_whole(pa.array(ids, pa.string()))
    return ids.astype(np.int64) if is_whole else ids


def _landmarks(tables: PatientTables) -> np.ndarray:
    """Landmarks of the examples as the recipe or its table has them, (num_examples,); see `EventData`."""
    days, clock = tables.cohort.landmark, tables.clock
    if clock.unit != "timestamp":
        return np.round(days * clock.per_day, 6)  # a day is not always a whole number of units
    moments = np.round(days * 86_400e6).astype("datetime64[us]")
    return np.strings.replace(np.datetime_as_string(moments, unit="s"), "T", " ").astype(object)


def _count_targets(sets: assemble.Sets, cohort: Cohort) -> np.ndarray:
    """One target per patient with a label, a time to the outcome, or events; (num_patients,) int64."""
    if cohort.duration is not None:
        return np.ones(len(cohort.person), np.int64)
    learned = np.diff(sets.events_of) > 0
    if cohort.label is not None:
        learned = learned | (cohort.label >= 0)
    return learned.astype(np.int64)


def _places(tables: PatientTables, histories: assemble.Histories) -> list[str]:
    """Place of a row of every patient: in the table of labels, or else of the first event."""
    rows, labels, cohort, sets = tables.rows, tables.labels, tables.cohort, histories.sets
    files = {file.owner: file.shown for part in rows.parts for file in part.table.files if file.owner is not None}
    places = []
    for index, (person, label) in enumerate(zip(cohort.person.tolist(), cohort.label_row.tolist(), strict=True)):
        begin, end = sets.events_of[index], sets.events_of[index + 1]
        if labels is not None and label >= 0:
            places.append(labels.where(label))
        elif begin < end:
            places.append(rows.where(int(histories.events.row[begin:end].min())))
        else:
            places.append(files.get(rows.patients[person].as_py(), "data.events"))
    return places


def _hashes(recipe: Recipe, parts: list[EventTable]) -> tuple[tuple[str, str], ...]:
    """Name in messages and sha256 of every file that was read."""
    paths = [resolve_path(recipe.data, path) for path in recipe.events.tables.values()]
    files = {file.shown: file.path for part in parts for file in part.table.files}
    return tuple((shown, sha256_file(path)) for shown, path in {**files, **{str(path): path for path in paths}}.items())
