"""Patients as runs of events that form sets.

A sequence is a patient and a position one event; a patient without any is still one, who has a label or a time to the
outcome. Everything is in memory as flat arrays, so that a batch is a few gathers. How rows become histories:
`histories.py`; who takes part: `sources/patients.py`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import pyarrow as pa
import torch

from unpad.batching.batch import RaggedBatch, make_batch
from unpad.batching.layout import build_layout
from unpad.batching.plan import Micro
from unpad.data.family import Data, SequenceTable, refuse_cuts, sequence_table
from unpad.data.histories import assemble as histories
from unpad.data.histories.assemble import Codes, Events, Sets, load_codes
from unpad.data.histories.code_vectors import read_vectors
from unpad.data.histories.cohort import Cohort, read_cohort, refuse_nobody, refuse_unlearnable
from unpad.data.histories.columns import are_whole
from unpad.data.histories.event_rows import EventRows, EventTable
from unpad.data.histories.labels import Clock, LabelTable
from unpad.data.histories.tables import alias
from unpad.data.sources.bad_rows import apply_policy, refuse_empty
from unpad.data.sources.example import BadRow
from unpad.data.sources.places import resolve_path
from unpad.data.sources.split import Split, describe_split
from unpad.errors import RecipeError
from unpad.models.contract import Model, ReadsCodeVectors
from unpad.models.set_sequence.event_sets import EventSets
from unpad.recipes.recipe import Recipe
from unpad.storage import sha256_file

KINDS = ("events",)
UNITS = ("patients", "events")
CODES = "events.json"
FILES = (CODES,)
NO_TEXT = "this run is one of patients and writes no text", "use `unpad embed {run}`"


@dataclass(frozen=True, eq=False)
class EventData(Data):
    """The patients of a run.

    Args:
        ids: (num_patients,) of each patient as the tables have it, int64 or str; in no message.
        known: the codes.
        code: (num_events,) int32, row of the code embedding.
        values: (num_events,) float32 in standard deviations from the mean of the code, nan where there is none.
        sets: where patients and sets begin, and the times of sets.
        cohort: labels, landmarks and split of the patients.
        places: (num_patients,) str, a row of each patient's.
        per_source: (num_patients, num_sources) int64, events of each table; source_names: their names.
        counts: events by what became of them; the values add up to the rows that are no bad ones.
        unknown: the commonest codes that are not known -> how often they occur.
        code_vectors: (num_codes, dim) float32 from `events.code_embeddings`, or None; without_vector: codes of which
            it has none.
        num_rows: rows read; bad: those set aside; num_sorted: rows that went back in time.
        has_end: whether something says which events are before the outcome, where there is one.
    """

    table: SequenceTable
    ids: np.ndarray
    known: Codes
    code: np.ndarray
    values: np.ndarray
    sets: Sets
    cohort: Cohort
    places: list[str]
    per_source: np.ndarray
    source_names: tuple[str, ...]
    counts: dict[str, int]
    unknown: dict[str, int]
    code_vectors: np.ndarray | None
    without_vector: list[str]
    num_rows: int
    bad: list[BadRow]
    num_sorted: int
    has_end: bool
    family: ClassVar[str] = "patients"
    kinds: ClassVar[tuple[str, ...]] = KINDS

    @property
    def codes(self) -> tuple[str, ...]:
        """Names of the codes, row by row of the code embedding; row 0 is that of unknown ones."""
        return self.known.names

    @property
    def labels(self) -> np.ndarray | None:
        """(num_patients,) int64, 0, 1, or -1 where it is not known; None where the recipe has none."""
        return self.cohort.label

    @property
    def num_outputs(self) -> int:
        return len(self.codes)

    @property
    def files(self) -> dict[str, bytes]:
        return {CODES: self.known.to_bytes()}

    def load(self, micro: Micro) -> RaggedBatch:
        ids = micro.seq_ids
        assert np.array_equal(micro.stops - micro.starts, self.table.positions[ids]), "a patient is never cut"
        sets = self.sets
        events = _ranges(sets.events_of[ids], sets.events_of[ids + 1])
        chosen = _ranges(sets.sets_of[ids], sets.sets_of[ids + 1])
        batch = self._batch(
            ids, events, np.diff(sets.set_starts)[chosen], np.diff(sets.sets_of)[ids], sets.times[chosen]
        )
        return batch.pad(pad_to=micro.pad_to) if micro.pad_to else batch

    def alone(self, seq_id: int, start: int, stop: int, first_target: int) -> RaggedBatch:
        sets = self.sets
        first, last = sets.sets_of[seq_id : seq_id + 2].tolist()
        sizes: list[int] = []
        events: list[int] = []
        for one in range(first, last):
            inside = range(sets.set_starts[one], sets.set_starts[one + 1])
            sizes.append(len(inside))
            events += inside
        index = np.array(events, np.int64)
        return self._batch(
            np.array([seq_id]), index, np.array(sizes, np.int64), np.array([len(sizes)]), sets.times[first:last]
        )

    def where(self, seq_id: int) -> str:
        return f"{self.places[seq_id]} (patient {alias(str(self.ids[seq_id]))})"

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.known.to_bytes())
        cohort, sets = self.cohort, self.sets
        for part in (
            self.code,
            sets.events_of,
            sets.sets_of,
            sets.set_starts,
            cohort.split,
            cohort.label,
            cohort.observed,
        ):
            digest.update(b"" if part is None else np.ascontiguousarray(part).astype("<i8").tobytes())
        for part in (self.values, sets.times, cohort.duration):
            digest.update(b"" if part is None else np.ascontiguousarray(part).astype("<f8").tobytes())
        for one in self.ids.tolist():
            digest.update(f"{one},".encode())
        return digest.hexdigest()

    def initialize(self, model: Model) -> None:
        """Load the vectors of `events.code_embeddings`.

        Raises:
            RecipeError: their length differs from `model.code_vectors`.
        """
        given = None if self.code_vectors is None else self.code_vectors.shape[1]
        wanted = model.code_vector_size if isinstance(model, ReadsCodeVectors) else None
        if given != wanted:
            what = f"events.code_embeddings gives vectors of length {given}, and the model takes {wanted}"
            raise RecipeError(what, where="model.code_vectors", fix=f"set model.code_vectors={given or 'null'}")
        if self.code_vectors is not None and isinstance(model, ReadsCodeVectors):
            model.load_code_vectors(torch.from_numpy(self.code_vectors))

    def describe_outputs(self) -> str:
        return f"{len(self.codes):,} codes"

    # ----------------------------------------------------------------------- batches

    def _batch(
        self, ids: np.ndarray, events: np.ndarray, members: np.ndarray, history: np.ndarray, times: np.ndarray
    ) -> RaggedBatch:
        """One flat run of patients.

        Args:
            events: (num_events,) int64, their events.
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
            observed=None if cohort.observed is None else torch.from_numpy(cohort.observed[ids]),
        )
        labels = None if cohort.label is None else torch.from_numpy(cohort.label[ids])
        return replace(batch, seq_labels=labels, parts=(sets,))

    # ----------------------------------------------------------------------- what was read

    def lines(self) -> list[str]:
        cohort, positions = self.cohort, self.table.positions
        sizes = np.diff(self.sets.set_starts)
        used, others = len(self.code), {why: number for why, number in self.counts.items() if number}
        lines = [
            f"{self.num_rows:,} rows read, {len(self.bad):,} set aside; {used + sum(others.values()):,} events = "
            f"{used:,} used" + "".join(f" + {number:,} {why}" for why, number in others.items()),
            f"{len(self.ids):,} patients: {describe_split(self.table.split)}"
            + "".join(f"; {number:,} left out {why}" for why, number in cohort.left_out.items()),
        ]
        if cohort.label is not None:
            counts = [int((cohort.label == value).sum()) for value in (1, 0, -1)]
            lines.append(f"{counts[0]:,} with the outcome, {counts[1]:,} without, {counts[2]:,} without a label")
            lines += self._one_sided()
        if cohort.duration is not None and cohort.observed is not None:
            lines.append(f"{int(cohort.observed.sum()):,} observed until the outcome, followed for a median of "
                         f"{np.median(cohort.duration) if len(cohort.duration) else 0:,.6g} days")  # fmt: skip
        if not self.has_end:
            lines.append(
                "  no landmark: every event is history; name events.labels.time or events.landmark if some are after "
                "the outcome"
            )
        lines.append(
            f"{positions.min(initial=positions.max(initial=0))} to {positions.max(initial=0)} events per patient, "
            f"{len(sizes):,} sets of {sizes.min(initial=sizes.max(initial=0))} to {sizes.max(initial=0)} events; "
            f"{int((~np.isnan(self.values)).sum()):,} events with a value"
        )
        lines.append("patients without an event: " + ", ".join(
            f"{int((self.per_source[:, n] == 0).sum()):,} of {name}" for n, name in enumerate(self.source_names)
        ) + f"; {int(self.has_no_time.sum()):,} without any that has a time")  # fmt: skip
        rare = ", ".join(f"{name} {number:,}" for name, number in list(self.unknown.items())[:5])
        lines.append(f"{len(self.codes) - 1:,} codes, {int((self.known.std > 0).sum()):,} with values"
                     + (f"; not among them: {rare}" if rare else ""))  # fmt: skip
        lines += [f"  {self.num_sorted:,} rows went back in time and were sorted"] if self.num_sorted else []
        if self.without_vector:
            lines.append(f"  {len(self.without_vector):,} codes without a vector: {', '.join(self.without_vector[:5])}")
        return lines + [f"  set aside: {row.where}: {row.code} {row.what}" for row in self.bad[:20]]

    def _one_sided(self) -> list[str]:
        """A line for every side of the split whose known labels are all the same, or where none is known."""
        assert self.labels is not None
        found = []
        for side, name in ((Split.TRAIN, "to train on"), (Split.HOLDOUT, "held out")):
            mine = self.labels[self.table.split == side]
            for value, what in ((1, "with the outcome"), (0, "without the outcome")):
                if len(mine) and not (mine == value).any():
                    found.append(f"  {name}: 0 {what}" + ("; AUROC does not exist" if side == Split.HOLDOUT else ""))
        return found

    @cached_property
    def has_no_time(self) -> np.ndarray:
        """Patients without any event that has a time, (num_patients,) bool."""
        timed = np.append(0, np.cumsum(~self.sets.timeless))
        return np.diff(timed[self.sets.sets_of]) == 0


def _ranges(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """The whole numbers of [start, stop) of every pair, end to end, (sum of lengths,) int64."""
    lengths = stops - starts
    return np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)


def num_outputs(files: dict[str, bytes]) -> int:
    """Number of codes of a run, the unknown one included."""
    return len(load_codes(files[CODES]).names)


def next_command(recipe: Recipe, run: str) -> str:
    """What to type to use a run of it."""
    return f"unpad embed {run} --out vectors.parquet"


# --------------------------------------------------------------------------- reading


def open_data(recipe: Recipe, kept: dict[str, bytes] | None) -> EventData:
    """Read the patients of a recipe.

    Raises:
        SourceError: a table is missing or unusable, bad rows are refused, or there is nobody to train on.
        RecipeError: settings do not fit the tables, an outcome is among the facts, or the plan would cut a patient.
    """
    refuse_empty(len(recipe.data.events), "events", [])
    rows, labels, cohort, clock = read_cohort(recipe)
    events, counts, repeated = histories.read_histories(rows, cohort, recipe.events)
    bad = [*(row for part in rows.parts for row in part.bad), *(labels.bad if labels else []), *cohort.bad, *repeated]
    num_rows = sum(part.num_rows for part in rows.parts) + (len(labels.table) if labels else 0)
    apply_policy(bad, num_rows, recipe.data, "RECIPE.yaml")
    if kept is None:
        refuse_unlearnable(recipe, cohort)
    elif not len(cohort.person):
        refuse_nobody(recipe, cohort)
    return _make(recipe, kept, rows, labels, cohort, events, clock, counts, bad, num_rows)


def _make(
    recipe: Recipe, kept: dict[str, bytes] | None, rows: EventRows, labels: LabelTable | None, cohort: Cohort,
    events: Events, clock: Clock, counts: dict[str, int], bad: list[BadRow], num_rows: int,
) -> EventData:  # fmt: skip
    """Number the codes, form sets and cut them."""
    settings, num = recipe.events, len(cohort.person)
    in_training = cohort.split[events.patient] == Split.TRAIN
    known = load_codes(kept[CODES]) if kept else histories.learn_codes(events, rows.names, in_training, settings)
    events, skipped, unknown = histories.number_codes(events, rows, known, settings)
    sets = histories.form_sets(events, num, settings, clock, rows.sets is not None)
    within = histories.cut_sets(sets, settings)
    before = len(events)
    if not within.all():
        events = histories.keep_sets(events, sets, within)
        sets = histories.form_sets(events, num, settings, clock, rows.sets is not None)
    vectors, without = None, list[str]()
    if settings.code_embeddings is not None:
        vectors, without = read_vectors(resolve_path(recipe.data, settings.code_embeddings), known.names)
    ids = rows.patients.take(pa.array(cohort.person)).to_numpy(zero_copy_only=False)
    whole = all(part.whole_ids for part in rows.parts) and are_whole(pa.array(ids, pa.string()))  # labels name others
    sources = np.bincount(events.patient * len(rows.parts) + rows.source[events.row], minlength=num * len(rows.parts))
    table = sequence_table(
        np.diff(sets.events_of),
        cohort.split,
        num_targets=_count_targets(sets, cohort),
        file_hashes=_hashes(recipe, rows.parts),
        attended=np.diff(sets.sets_of) + 1,  # sets and one readout
    )
    most = int(table.positions.max(initial=0))
    why, fix = "a plan would cut through a set", "set events.max_events={}"
    refuse_cuts(recipe, most, "a patient has {} events", why, fix)
    return EventData(
        table=table,
        ids=ids.astype(np.int64) if whole else ids, known=known, code=events.code.astype(np.int32),
        values=events.value.astype(np.float32), sets=sets, cohort=cohort,
        places=_places(rows, labels, cohort, events, sets), per_source=sources.reshape(num, len(rows.parts)),
        source_names=tuple(part.name for part in rows.parts),
        counts={**counts, **skipped, "beyond events.max_events": before - len(events)}, unknown=unknown,
        code_vectors=vectors, without_vector=without, num_rows=num_rows,
        bad=bad, num_sorted=sum(part.unsorted for part in rows.parts),
        has_end=not settings.labels or bool(settings.labels.time) or settings.landmark is not None,
    )  # fmt: skip


def _count_targets(sets: Sets, cohort: Cohort) -> np.ndarray:
    """One per patient who has something to learn from: a label, the time to the outcome, or events; (num,) int64."""
    if cohort.duration is not None:
        return np.ones(len(cohort.person), np.int64)
    learned = np.diff(sets.events_of) > 0
    if cohort.label is not None:
        learned = learned | (cohort.label >= 0)
    return learned.astype(np.int64)


def _places(rows: EventRows, labels: LabelTable | None, cohort: Cohort, events: Events, sets: Sets) -> list[str]:
    """A row of every patient's: of the table of labels, or else of the first event."""
    files = {file.owner: file.shown for part in rows.parts for file in part.table.files if file.owner is not None}
    found = []
    for index, (person, label) in enumerate(zip(cohort.person.tolist(), cohort.label_row.tolist(), strict=True)):
        begin, end = sets.events_of[index], sets.events_of[index + 1]
        if labels is not None and label >= 0:
            found.append(labels.where(label))
        elif begin < end:
            found.append(rows.where(int(events.row[begin:end].min())))
        else:
            found.append(files.get(rows.patients[person].as_py(), "data.events"))
    return found


def _hashes(recipe: Recipe, parts: list[EventTable]) -> tuple[tuple[str, str], ...]:
    """Every file that was read, as messages name it, and its sha256."""
    settings = recipe.events
    more = [settings.labels.path if settings.labels else None, settings.split, settings.code_embeddings]
    paths = [resolve_path(recipe.data, path) for path in more if path is not None]
    files = {file.shown: file.path for part in parts for file in part.table.files}
    return tuple((shown, sha256_file(path)) for shown, path in {**files, **{str(path): path for path in paths}}.items())
