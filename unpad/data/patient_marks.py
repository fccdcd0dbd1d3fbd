"""Marks on patients unlike those of training: unknown codes, values in another unit, nothing before the landmark."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from unpad.data.patients import EventData
from unpad.errors import SourceError
from unpad.terminal.table import number_of

# Larger shares are warnings.
MOST_UNKNOWN = 0.05  # events of unknown codes
MOST_OUTSIDE = 0.05  # values outside the range of training
MOST_EMPTY = 0.05  # patients without an event
MOST_MARKED = 0.05  # patients unlike those of training; a fact that is miscoded for all of them may be few events
# The middle 98 % of a code's values in training contains few of the new ones: they are most likely in another unit.
MOST_UNUSUAL = 0.5
ONE_SIDED = 0.99  # share of days on one side of the median of training
FEWEST_VALUES = 10  # values of a code needed for a statement about its unit
NUM_NAMED = 5
STRANGE, FAR = "unknown codes", "unusual values"  # reasons to doubt a row: mostly such, or such a fact


@dataclass(frozen=True, eq=False)
class Marks:
    """Counts per row of an output, a patient or a set; each (num_rows,) int64.

    Args:
        events: events that the model read.
        unknown: events of unknown codes, including those that were left out for it.
        valued: events with a value.
        outside: values outside the range of their code in training; None if the run does not record the values of
            training.
        late: events after the landmark; None for sets.
        empty: (num_rows,) bool, patients without any timed event, if others have one: at most facts are known about
            them.
        reasons: why a row is to be doubted -> (num_rows,) bool, the rows.
    """

    events: np.ndarray
    unknown: np.ndarray
    valued: np.ndarray
    outside: np.ndarray | None
    late: np.ndarray | None
    empty: np.ndarray
    reasons: dict[str, np.ndarray]

    @property
    def unlike(self) -> np.ndarray:
        """Rows with mostly unknown codes or unusual values, or with such a fact, (num_rows,) bool."""
        return np.asarray(self.reasons[STRANGE] | self.reasons[FAR])

    def texts(self) -> list[str]:
        """Reasons to doubt a row, "" without one."""
        named = self.reasons.items()
        return ["; ".join(name for name, rows in named if rows[row]) for row in range(len(self.events))]

    def columns(self) -> dict[str, pa.Array]:
        """Columns of the output: the counts, and `mark` with the reasons to doubt the row."""
        nothing = pa.nulls(len(self.events), pa.int64())
        outside = nothing if self.outside is None else pa.array(self.outside)
        columns = {"events": pa.array(self.events), "unknown_codes": pa.array(self.unknown), "outside_range": outside}
        columns |= {} if self.late is None else {"after_landmark": pa.array(self.late)}
        return columns | {"mark": pa.array(self.texts())}


def mark_patients(data: EventData) -> Marks:
    """Count unknown events and values of every patient."""
    owner, late = np.repeat(np.arange(len(data.table)), np.diff(data.sets.events_of)), data.report.num_late.sum(1)
    empty = data.sets.has_no_time
    if empty.all() and not late.any():  # there are only facts
        empty = np.diff(data.sets.events_of) == 0
    of_facts = [bool(source.static) for source in data.recipe.data.events]
    strange_facts = np.asarray(data.report.num_strange[:, of_facts].any(1))
    return _count(data, owner, empty, data.report.num_strange.sum(1), strange_facts, late)


def mark_sets(data: EventData) -> Marks:
    """Count unknown events and values of every set."""
    num = len(data.sets.set_starts) - 1
    owner = np.repeat(np.arange(num), np.diff(data.sets.set_starts))
    unknown = np.bincount(owner[data.code == 0], minlength=num)
    return _count(data, owner, np.zeros(num, np.bool_), unknown, data.sets.timeless & (unknown > 0), None)


def _count(
    data: EventData, owner: np.ndarray, empty: np.ndarray, unknown: np.ndarray, strange_facts: np.ndarray,
    late: np.ndarray | None,
) -> Marks:  # fmt: skip
    """Sum up the events of every row; fields of `Marks` that no event of the history counts are given.

    Args:
        owner: (num_events,) row of each event.
        strange_facts: (num_rows,) bool, rows with a fact of an unknown code.
    """

    def counted(of: np.ndarray) -> np.ndarray:
        return np.bincount(owner[of], minlength=len(empty))

    outside, unusual = beyond(data, 0), beyond(data, 1)
    facts = np.repeat(data.sets.timeless, np.diff(data.sets.set_starts))
    events, valued = np.bincount(owner, minlength=len(empty)), counted(~np.isnan(data.standard))
    far, far_times = np.zeros((2, len(empty)), np.bool_)
    if data.known.times is not None:
        days = np.repeat(data.sets.times, np.diff(data.sets.set_starts))
        far_times = 2 * counted(_outside(days, data.known.times) & ~facts) > counted(~facts)
    if outside is not None and unusual is not None:
        far = (2 * counted(unusual) > np.maximum(valued, 1)) | (counted(facts & outside) > 0)
    is_late = np.zeros(len(empty), np.bool_) if late is None else late > 0
    reasons = {
        "no events before the landmark": empty & is_late,
        "no events": empty & ~is_late,
        STRANGE: strange_facts | (2 * unknown > np.maximum(events, 1)),
        FAR: far,
        "unusual times": far_times,
    }
    return Marks(events, unknown, valued, None if outside is None else counted(outside), late, empty, reasons)


def _outside(days: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Days beyond the least and the most of training, which are rounded to float32, (num,) bool."""
    return np.asarray((days < known[0] - 1e-5 * abs(known[0])) | (days > known[-1] + 1e-5 * abs(known[-1])))


def beyond(data: EventData, margin: int) -> np.ndarray | None:
    """Events with a value below quantile `margin` of QUANTILES or above the opposite quantile of their code in
    training, (num_events,) bool; None if the run does not record these."""
    known = data.known
    if known.quantiles is None:
        return None
    scale = np.where(known.std > 0, known.std, 1)
    low, high = ((known.quantiles[:, at] - known.mean) / scale for at in (margin, -1 - margin))
    code, value = data.code, data.standard.astype(np.float64)
    # Values are fp32: an extreme of training may round outwards.
    below = value < low[code] - 1e-5 * np.maximum(1, np.abs(low[code]))
    above = value > high[code] + 1e-5 * np.maximum(1, np.abs(high[code]))
    return np.asarray((below | above) & (known.std[code] > 0))


def refuse_unknown(data: EventData) -> None:
    """Refuse tables without anything that the run knows.

    Raises:
        SourceError: no code of a table is known, or all its events are after the landmark, or there is no event at all.
    """
    report = data.report
    counts = (part.sum(0).tolist() for part in (report.num_read, report.num_strange, report.num_late))
    for name, read, strange, late in zip(report.source_names, *counts, strict=True):
        if late and not read:
            what = f"none of the {late:,} events can be read: all are after the landmark"
            fix = "check events.landmark of the run's recipe against the times of the table"
            raise SourceError(what, where=name, fix=fix)
        if read and strange == read:
            seen, known = ", ".join(list(report.unknown)[:NUM_NAMED]), ", ".join(data.codes[1 : 1 + NUM_NAMED])
            what = f"E_CODE none of the {read:,} events has a code that the run knows: {seen}; it knows {known}"
            fix = "name the codes as the training data does, and check the table's columns"
            raise SourceError(what, where=name, fix=fix)
    if not report.num_read.any():
        what = "the tables hold no event of any patient"
        raise SourceError(what, where=", ".join(report.source_names), fix="check the tables and the columns of ids")


def ledger(data: EventData, marks: Marks) -> list[str]:
    """Lines on patients: events read and left out, as training reports them, and what is unknown to the run."""
    lines = data.report.lines(data.cohort, data.known, data.values, data.sets, for_training=False)
    return lines + unknown_lines(data, marks)


def unknown_lines(data: EventData, marks: Marks) -> list[str]:
    """Shares of events, patients and values that are unknown to the run, with a warning where they are large."""
    report, lines = data.report, list[str]()
    num_read, num_strange = int(report.num_read.sum()), int(report.num_strange.sum())
    lines += _share(num_strange, num_read, "events have codes unknown to the run", MOST_UNKNOWN)
    late = int((marks.empty & report.num_late.any(1)).sum())
    because = f", {late:,} of them because all are after the landmark" if late else ""
    what = f"{data.unit} have no event to read{because}"
    lines += _share(int(marks.empty.sum()), len(marks.empty), what, MOST_EMPTY)
    what = f"{data.unit} have mostly unknown codes or unusual values, or such a fact"
    lines += _share(int(marks.unlike.sum()), len(marks.unlike), what, MOST_MARKED)
    days = np.repeat(data.sets.times, np.where(data.sets.timeless, 0, np.diff(data.sets.set_starts)))
    followed = np.zeros(0) if data.cohort.duration is None else data.cohort.duration
    if len(data.table) >= FEWEST_VALUES:
        lines += _days(days, data.known.times, "times of events")
        lines += _days(followed, data.known.durations, "durations")
    if marks.outside is None:
        return [*lines, "this run does not record the values of training, so values of another unit go unnoticed"]
    what = "values are beyond the least and the most of their code in training"
    lines += _share(int(marks.outside.sum()), int(marks.valued.sum()), what, MOST_OUTSIDE)
    return lines + _units(data)


def _share(number: int, total: int, what: str, most: float) -> list[str]:
    share = number / max(total, 1)
    return [f"{'warning: ' if share > most else ''}{number:,} of {total:,} {what} ({share:.1%})"] if total else []


def _days(days: np.ndarray, known: np.ndarray | None, what: str) -> list[str]:
    """A warning of days that are most likely in another unit: many beyond those of training, or nearly all of them on
    one side of their median.

    Args:
        days: (num,) from the landmark; known: those of training at QUANTILES.
    """
    if known is None or not len(days):
        return []
    sides = max((days < known[2]).mean(), (days > known[2]).mean())
    if _outside(days, known).mean() <= MOST_OUTSIDE and sides < ONE_SIDED:
        return []
    median = f"a median of {np.median(days):.4g} days, in training {known[2]:.4g}"
    return [f"warning: {what} from the landmark have {median}: is this another unit?"]


def _units(data: EventData) -> list[str]:
    """Warnings on codes with most new values outside the middle 98 % of the values of training."""
    unusual, known = beyond(data, 1), data.known
    assert unusual is not None, "the caller has checked it"
    assert known.quantiles is not None, "as well"
    valued = ~np.isnan(data.standard)
    num = np.bincount(data.code[valued], minlength=len(data.codes))
    strange = np.bincount(data.code[unusual], minlength=len(data.codes))
    codes = np.flatnonzero((num >= FEWEST_VALUES) & (strange > MOST_UNUSUAL * num))
    lines = []
    for code in sorted(codes.tolist(), key=lambda one: -strange[one])[:NUM_NAMED]:
        values = data.standard[valued & (data.code == code)].astype(np.float64) * known.std[code] + known.mean[code]
        low, median, high = known.quantiles[code, 1:4].tolist()
        lines.append(
            f"warning: {data.codes[code]}: {strange[code]:,} of {num[code]:,} values outside of {low:.4g} to {high:.4g}"
            f"; their median is {np.median(values):.4g}, in training {median:.4g}: is this another unit?"
        )
    more = len(codes) - len(lines)
    return [*lines, f"warning: and so for {number_of(more, 'more codes')}"] if more else lines
