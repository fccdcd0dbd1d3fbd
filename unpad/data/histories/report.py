"""Report of what was read from the tables of patients."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unpad.data.histories.assemble import Codes, Sets
from unpad.data.histories.cohort import Cohort
from unpad.data.sources.bad_rows import fault_lines
from unpad.data.sources.example import BadRow, Unread
from unpad.data.sources.split import Split, describe_split
from unpad.models.set_sequence.event_sets import FIRST_COMPETING, OUTCOME
from unpad.terminal.table import number_of


@dataclass(frozen=True, eq=False)
class PatientsReport:
    """Rows, events and codes by what became of them.

    Args:
        num_rows: rows read; bad: rows that were quarantined; num_sorted: rows that went back in time.
        counts: events that were left out, by reason; with the used ones they are all rows that are not bad, those of a
            patient of several examples once in each.
        unknown: the commonest unknown codes -> how often they occur; without_vector: codes without a vector.
        per_source: (num_patients, num_sources) int64, events of each table; source_names: their names.
        num_read, num_strange, num_late: (num_patients, num_sources) int64, events up to the landmark by table, those of
            unknown codes among them, and events after the landmark.
        notes: remarks of the tables; competing: names of the competing events.
        has_end: whether the recipe says which events are before the outcome, if there is an outcome.
        unread: columns of the tables that nobody read.
    """

    num_rows: int
    bad: list[BadRow]
    num_sorted: int
    counts: dict[str, int]
    unknown: dict[str, int]
    without_vector: list[str]
    per_source: np.ndarray
    source_names: tuple[str, ...]
    num_read: np.ndarray
    num_strange: np.ndarray
    num_late: np.ndarray
    has_end: bool
    unread: Unread
    notes: tuple[str, ...] = ()
    competing: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Remarks of the tables, and on outcomes that may be in the history, for training."""
        what = "no landmark: every event is history; if some are after the outcome, set events.landmark or labels.time"
        return self.notes if self.has_end else (*self.notes, what)

    def lines(
        self, cohort: Cohort, known: Codes, values: np.ndarray, sets: Sets, *, for_training: bool = True
    ) -> list[str]:
        """The report as text.

        Args:
            values: (num_events,), nan where there is none.
            for_training: whether the patients have sides of a split, and outcomes to learn.
        """
        others = {why: number for why, number in self.counts.items() if number}
        events = "events, counted in each example" if cohort.several else "events"
        return [
            f"{number_of(self.num_rows, 'rows')} read, {len(self.bad):,} quarantined; "
            f"{len(values) + sum(others.values()):,} {events} = {len(values):,} used"
            + "".join(f" + {number:,} {why}" for why, number in others.items()),
            *self.unread.lines(),
            *cohort_lines(cohort, self.competing, for_training),
            *(f"warning: {note}" for note in (self.warnings if for_training else self.notes)),
            *self._events(values, sets, "examples" if cohort.several else "patients"),
            *self._codes(known),
            *fault_lines(self.bad, "  quarantined: "),
        ]

    def _events(self, values: np.ndarray, sets: Sets, unit: str) -> list[str]:
        positions, sizes = np.diff(sets.events_of), np.diff(sets.set_starts)
        most, largest = int(positions.max(initial=0)), int(sizes.max(initial=0))
        return [
            f"{positions.min(initial=most)} to {number_of(most, 'events')} per {unit[:-1]}, "
            f"{number_of(len(sizes), 'sets')} of {sizes.min(initial=largest)} to {number_of(largest, 'events')}; "
            f"{number_of(int((~np.isnan(values)).sum()), 'events')} with a value",
            self.without_events(sets, unit),
        ]

    def without_events(self, sets: Sets, unit: str) -> str:
        """The line on patients of whom a table has no event."""
        empty = zip((self.per_source == 0).sum(0), self.source_names, strict=True)
        each = ", ".join(f"{number:,} of {name}" for number, name in empty)
        return f"{unit} without an event: {each}; {int(sets.has_no_time.sum()):,} without any that has a time"

    def _codes(self, known: Codes) -> list[str]:
        rare = ", ".join(f"{name} {number:,}" for name, number in list(self.unknown.items())[:5])
        lines = [
            f"{number_of(len(known.names) - 1, 'codes')}, {int((known.std > 0).sum()):,} with values"
            + ("" if known.scale is None else f", {known.scale.describe()}")
            + (f"; not among them: {rare}" if rare else "")
        ]
        if self.num_sorted:
            lines.append(f"  {number_of(self.num_sorted, 'rows')} went back in time and were sorted")
        if self.without_vector:
            some = ", ".join(self.without_vector[:5])
            lines.append(f"  {number_of(len(self.without_vector), 'codes')} without a vector: {some}")
        return lines


def cohort_lines(cohort: Cohort, competing: Sequence[str], for_training: bool = True) -> list[str]:
    """Lines on who takes part and who does not, and on the outcomes; arguments as of `PatientsReport`."""
    sides = f": {describe_split(cohort.split)}" if for_training else ""
    left_out = "".join(f"; {number:,} left out {why}" for why, number in cohort.left_out.items())
    return [cohort.describe() + sides + left_out, *(_outcomes(cohort, competing) if for_training else [])]


def _outcomes(cohort: Cohort, competing: Sequence[str]) -> list[str]:
    """Lines on labels and times to the outcome, where the recipe has them."""
    lines = []
    if cohort.label is not None:
        kinds = [(f"of class {name}", place) for place, name in enumerate(cohort.classes)]
        missing = "its AUROC" if cohort.classes else "AUROC"
        kinds = kinds or [("with the outcome", 1), ("without the outcome", 0)]
        told = [f"{int((cohort.label == value).sum()):,} {what}" for what, value in kinds]
        told = told if cohort.classes else [told[0], told[1].removesuffix(" the outcome")]
        lines.append(", ".join([*told, f"{int((cohort.label == -1).sum()):,} without a label"]))
        lines += _one_sided(cohort.label, cohort.split, kinds, missing)
    if cohort.duration is not None and cohort.cause is not None:
        median = np.median(cohort.duration) if len(cohort.duration) else 0
        came, other = int((cohort.cause == OUTCOME).sum()), int((cohort.cause >= FIRST_COMPETING).sum())
        until = f"{came:,} observed until the outcome"
        if competing:
            each = (f"{name}: {(cohort.cause == at).sum():,}" for at, name in enumerate(competing, FIRST_COMPETING))
            until += f", {other:,} until a competing event ({', '.join(each)})"
        lines.append(f"{until}, followed for a median of {median:,.6g} days")
    return lines


def _one_sided(label: np.ndarray, split: np.ndarray, kinds: list[tuple[str, int]], missing: str) -> list[str]:
    """Lines on every side of the split that lacks a label, of which `kinds` has words and values; the held-out side has
    no `missing` then."""
    lines = []
    for side, name in ((Split.TRAIN, "to train on"), (Split.HOLDOUT, "held out")):
        labels = label[split == side]
        for what, value in kinds:
            if len(labels) and not (labels == value).any():
                lines.append(f"  {name}: 0 {what}" + (f"; {missing} does not exist" if side == Split.HOLDOUT else ""))
    return lines
