"""Histories of patients: codes and values that give the outcome away, values of another unit, codes that do not recur,
and times that leave no history or none that is possible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from unpad.data.patients import EventData
from unpad.doctor.subject import Subject
from unpad.evaluation.binary import auroc
from unpad.terminal.finding import Finding, Severity, Value

LEAST_PATIENTS = 20  # with a code or of a class, below which neither says anything about the others
PURE, SEPARATES, RANKS = 0.98, 0.9, 0.9995  # shares of patients, their difference, and an AUROC
RARE_CLASS, LEAST_COVERED = 0.5, 0.1  # shares of patients: at most with the label, at least of these with the code
TAKEN_AGAIN = 3.0  # values of a code and patient, on average
LEAST_VALUES = 50  # of a code
FEW_SETS, MANY_EVENTS = 2.0, 8.0  # of a patient, with a window
FAR, WIDENED = 5.0, 10.0  # times the distance of all others from the median, and times their standard deviation
RARE, MOSTLY_RARE = 0.2, 0.5  # shares of events
EMPTY, MOSTLY_EMPTY = 0.5, 0.9  # shares of patients
YEAR, LONGEST = 365.25, 120.0  # days, years
MANY_TOO_LONG = 0.05
CUT, MOSTLY_CUT = 0.5, 0.9  # shares of events
DATES = ((6e8, 2.2e9), (6e11, 2.2e12))  # seconds and milliseconds from 1970 to days between 1989 and 2039
SPREAD_OF_DATES = 0.2  # of their mean
FP32_STEP, LEAST_STEPS = 2.0**-23, 4  # the distance of neighbouring numbers, and how many a spread must have
MANY_EQUAL = 0.5  # of all values
SEVERAL, RECURRING = 4, 0.02  # events, and share of those with a code that their patient has again


def check_histories(subject: Subject[EventData]) -> list[Finding]:
    """Findings on the histories of the training patients."""
    told = _told(subject.data, subject.stage.train_ids)
    return [
        *_one_set(subject, told),
        *_leaks(told),
        *_far_values(told),
        *_rare_codes(told),
        *_empty(told),
        *_too_long(told),
        *_cut(subject),
        *_scales(told),
        *_unknown(told),
        *_one_time(told),
    ]


@dataclass(frozen=True, eq=False)
class _Told:
    """Events of the training patients.

    Args:
        ids: (num_patients,) int64, their sequences.
        patient: (num_events,) int64, index into `ids`, ascending; code: (num_events,) int64.
        value: (num_events,) float32, nan without one.
    """

    data: EventData
    ids: np.ndarray
    patient: np.ndarray
    code: np.ndarray
    value: np.ndarray

    @property
    def num_codes(self) -> int:
        return len(self.data.codes)

    def last_of(self, events: np.ndarray) -> np.ndarray:
        """The last of these events of each patient and code, (num_pairs,) int64."""
        pairs = self.patient[events] * self.num_codes + self.code[events]
        _, first = np.unique(pairs[::-1], return_index=True)
        last: np.ndarray = events[len(events) - 1 - first]
        return last


def _told(data: EventData, ids: np.ndarray) -> _Told:
    starts = data.sets.events_of
    owner = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    place = np.full(len(starts) - 1, -1)
    place[ids] = np.arange(len(ids))
    events = np.flatnonzero(place[owner] >= 0)
    events = events[np.argsort(place[owner[events]], kind="stable")]
    return _Told(data, ids, place[owner[events]], data.code[events].astype(np.int64), data.standard[events])


# --------------------------------------------------------------------------- the outcome among the events


def _leaks(told: _Told) -> list[Finding]:
    """The code that tells the label best, and the value that does, if either tells nearly all."""
    codes, values = list[Finding](), list[Finding]()
    for labels, names in two_sides(told.data, told.ids):
        classes = np.array([(labels == 0).sum(), (labels == 1).sum()])
        if classes.min() >= LEAST_PATIENTS:
            known = np.flatnonzero((labels[told.patient] >= 0) & (told.code > 0))
            codes += _leaking_code(told, labels, names, classes, known)
            values += _leaking_value(told, labels, known)
    return [max(found, key=lambda one: one.number) for found in (codes, values) if found]


def two_sides(data: EventData, ids: np.ndarray) -> Iterator[tuple[np.ndarray, tuple[str, str]]]:
    """Labels 0, 1, or -1 if unknown, of patients (num_patients,), and the names of 0 and 1; of several classes every
    one after the other as 1, against the rest. Nothing without labels."""
    if data.labels is None:
        return
    labels = data.labels[ids]
    if not data.classes:
        yield labels, ("0", "1")
    for place, name in enumerate(data.classes):
        yield np.where(labels < 0, labels, labels == place), (f"≠ {name}", name)


def _leaking_code(
    told: _Told, labels: np.ndarray, names: tuple[str, str], classes: np.ndarray, known: np.ndarray
) -> list[Finding]:
    last = told.last_of(known)
    having = np.stack(
        [np.bincount(told.code[last[labels[told.patient[last]] == one]], minlength=told.num_codes) for one in (0, 1)]
    )  # (2, num_codes) patients of each class with the code
    total, shares = having.sum(0), having / classes[:, None]
    best: tuple[float, int, int] | None = None
    for label in (0, 1):
        pure = having[label] / np.maximum(total, 1)
        apart = shares[label] - shares[1 - label]
        is_leak = apart >= SEPARATES
        if classes[label] <= RARE_CLASS * classes.sum():
            is_leak |= (pure >= PURE) & (shares[label] >= LEAST_COVERED)
        is_leak &= total >= LEAST_PATIENTS
        for code in np.flatnonzero(is_leak).tolist():
            best = max(best or (-1.0, 0, 0), (float(apart[code]), code, label))
    if best is None:
        return []
    apart_most, code, label = best
    values: dict[str, Value] = {
        "code": told.data.codes[code],
        "target": names[label],
        "covered": float(shares[label, code]),
        "others": float(shares[1 - label, code]),
    }
    severity: Severity = "fault" if apart_most >= SEPARATES else "warning"
    pure_share = float(having[label, code] / total[code])
    return [Finding("leaking_code", severity, pure_share, ("data.events", "events.landmark"), values)]


def _leaking_value(told: _Told, labels: np.ndarray, known: np.ndarray) -> list[Finding]:
    last = told.last_of(known[~np.isnan(told.value[known])])
    last = last[np.argsort(told.code[last], kind="stable")]
    codes, firsts = np.unique(told.code[last], return_index=True)
    best: tuple[float, int, int] = (RANKS, 0, 0)
    for code, events in zip(codes.tolist(), np.split(last, firsts[1:]), strict=bool(len(codes))):
        own = labels[told.patient[events]]
        if min((own == 0).sum(), (own == 1).sum()) >= LEAST_PATIENTS:
            area = float(auroc(own, told.value[events]))
            best = max(best, (max(area, 1 - area), code, len(own)))
    area, code, num = best
    if not code:
        return []
    values: dict[str, Value] = {"code": told.data.codes[code], "sequences": num}
    # A test that is taken again and again may well tell the label by its course: what is written afterwards is not.
    taken = np.flatnonzero((told.code == code) & ~np.isnan(told.value))
    again = len(taken) / max(len(np.unique(told.patient[taken])), 1)
    severity: Severity = "warning" if again < TAKEN_AGAIN else "note"
    return [Finding("leaking_value", severity, area, ("data.events", "events.landmark"), values)]


# --------------------------------------------------------------------------- values and codes


def _far_values(told: _Told) -> list[Finding]:
    """The code with a scale set by a few values far from all others."""
    valued = np.flatnonzero(~np.isnan(told.value))
    valued = valued[np.argsort(told.code[valued], kind="stable")]
    codes, firsts = np.unique(told.code[valued], return_index=True)
    found: list[tuple[float, int, int, float]] = []
    for code, events in zip(codes.tolist(), np.split(told.value[valued], firsts[1:]), strict=bool(len(codes))):
        if len(events) < LEAST_VALUES:
            continue
        from_median = np.abs(events.astype(np.float64) - np.median(events))
        order = np.argsort(from_median, kind="stable")
        upper = from_median[order][len(order) // 2 :]
        times = upper[1:] / np.where(upper[:-1] > 0, upper[:-1], np.inf)
        gap = int(times.argmax())
        near = events[order[: len(order) // 2 + gap + 1]].astype(np.float64)
        widened = float(events.astype(np.float64).std() / max(near.std(), 1e-12))
        if times[gap] >= FAR and widened >= WIDENED:
            found.append((widened, code, len(events) - len(near), float(times[gap])))
    if not found:
        return []
    widened, code, num_far, gap_times = max(found)
    values: dict[str, Value] = {
        "code": told.data.codes[code],
        "far": num_far,
        "times": gap_times,
        "codes": len(found),
    }
    return [Finding("far_values", "warning", widened, ("data.events",), values)]


def _rare_codes(told: _Told) -> list[Finding]:
    """Codes that one patient alone has."""
    if len(told.ids) < LEAST_PATIENTS or not len(told.code):
        return []
    num_patients = np.bincount(told.code[told.last_of(np.arange(len(told.code)))], minlength=told.num_codes)
    alone = num_patients == 1
    share = float(alone[told.code].mean())
    if share < RARE:
        return []
    values: dict[str, Value] = {"codes": int(alone.sum()), "all_codes": told.num_codes - 1}
    severity: Severity = "fault" if share >= MOSTLY_RARE else "warning"
    return [Finding("rare_codes", severity, share, ("data.events", "events.min_count"), values)]


# --------------------------------------------------------------------------- times


def _empty(told: _Told) -> list[Finding]:
    """Patients of whom no event with a time is read, where there are such events."""
    report, num = told.data.report, len(told.ids)
    late = report.num_late[told.ids].sum(1)
    empty = told.data.sets.has_no_time[told.ids]
    share = float((empty & (late > 0)).sum() / max(num, 1))
    if num < LEAST_PATIENTS or share < EMPTY:
        return []
    values: dict[str, Value] = {"sequences": num, "late": int(late.sum())}
    severity: Severity = "fault" if share >= MOSTLY_EMPTY else "warning"
    return [Finding("no_history", severity, share, ("events.landmark", "events.unit", "data.events"), values)]


def _too_long(told: _Told) -> list[Finding]:
    """Patients with a first event further before the landmark than a life is long."""
    sets = told.data.sets
    if not len(sets.times):
        return []
    first = np.minimum(sets.sets_of[told.ids], len(sets.times) - 1)
    years = np.where(np.diff(sets.sets_of)[told.ids] > 0, -sets.times[first] / YEAR, 0.0)
    long = years > LONGEST
    if not long.any():
        return []
    share = float(long.mean())
    values: dict[str, Value] = {"sequences": len(told.ids), "years": float(years.max())}
    severity: Severity = "fault" if share >= MANY_TOO_LONG else "warning"
    return [Finding("long_history", severity, share, ("data.events", "events.unit"), values)]


def _cut(subject: Subject[EventData]) -> list[Finding]:
    """Events beyond `events.max_events`, of all patients."""
    data = subject.data
    kept, cut = len(data.code), data.report.counts.get("beyond events.max_events", 0)
    lost, num = cut / max(kept + cut, 1), len(data.ids)
    if lost < CUT:
        return []
    field = "events.max_events"
    values: dict[str, Value] = {"whole": (kept + cut) / num, "unit": subject.units[1], "lost": lost, "field": field}
    return [Finding("cut_short", "fault" if lost >= MOSTLY_CUT else "warning", kept / num, (field,), values)]


# --------------------------------------------------------------------------- what values and times can say


def _scales(told: _Told) -> list[Finding]:
    """Codes with values that are all alike, or dates: numbers that say nothing, or not what they seem to."""
    known, counts = told.data.known, np.bincount(told.code[~np.isnan(told.value)], minlength=told.num_codes)
    valued = np.flatnonzero(counts >= LEAST_VALUES)
    if not len(valued):
        return []
    mean = known.mean[valued]
    # `known.std` has a floor, so that values that are all alike do not become large.
    std = np.array(
        [told.value[told.code == code].std(where=~np.isnan(told.value[told.code == code])) for code in valued]
    )
    std, found = std * known.std[valued], []
    for code, is_bad in (
        ("dates_as_values", [any(low <= abs(m) <= high for low, high in DATES) and s < SPREAD_OF_DATES * abs(m)
                             for m, s in zip(mean, std, strict=True)]),
        ("equal_values", (std <= np.abs(mean) * FP32_STEP * LEAST_STEPS).tolist()),
    ):  # fmt: skip
        bad = valued[is_bad]
        if not len(bad):
            continue
        first, share = int(bad[counts[bad].argmax()]), float(counts[bad].sum() / counts.sum())
        is_note = code == "equal_values" and share < MANY_EQUAL
        values: dict[str, Value] = {"code": told.data.codes[first], "codes": len(bad), "mean": float(known.mean[first])}
        found.append(Finding(code, "note" if is_note else "warning", share, ("data.events",), values))
    return found[:1]


def _unknown(told: _Told) -> list[Finding]:
    """Events of codes that are too rare for a row of their own."""
    share = float((told.code == 0).mean()) if len(told.code) else 0.0
    if share < RARE:
        return []
    severity: Severity = "fault" if share >= MOSTLY_RARE else "warning"
    values: dict[str, Value] = {"codes": told.num_codes - 1}
    return [Finding("unknown_codes", severity, share, ("events.min_count", "data.events"), values)]


def _one_set(subject: Subject[EventData], told: _Told) -> list[Finding]:
    """A window in which the whole history of most patients is one set or two."""
    window, sets = subject.setup.recipe.events.window, told.data.sets
    if window is None or len(told.ids) < LEAST_PATIENTS:
        return []
    num_sets = float(np.median(np.diff(sets.sets_of)[told.ids]))
    num_events = float(np.median(np.bincount(told.patient, minlength=len(told.ids))))
    if num_sets > FEW_SETS + 1 or num_events < MANY_EVENTS or num_events < 4 * num_sets:
        return []
    values: dict[str, Value] = {"sets": num_sets, "events": num_events}
    return [Finding("one_set", "warning", window, ("events.window",), values)]


def _one_time(told: _Told) -> list[Finding]:
    """Patients with several events, all of one time."""
    sets = told.data.sets
    first, last = sets.sets_of[told.ids], np.maximum(sets.sets_of[told.ids + 1] - 1, sets.sets_of[told.ids])
    num_events = np.bincount(told.patient, minlength=len(told.ids))
    several = num_events >= SEVERAL
    if several.sum() < LEAST_PATIENTS:
        return []
    share = float((sets.times[first[several]] == sets.times[last[several]]).mean())
    recurring = 1 - len(told.last_of(np.arange(len(told.code)))) / max(len(told.code), 1)
    if share < MOSTLY_EMPTY or recurring < RECURRING:  # one visit has each test once
        return []
    return [Finding("one_time", "warning", share, ("data.events", "events.unit"), {"sequences": int(several.sum())})]
