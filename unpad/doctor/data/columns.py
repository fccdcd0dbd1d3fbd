"""Columns of patients' tables that are not what their names say: ids among the facts, times as values, one value for a
whole patient, and events under two times; and what the course of a history gives away, whatever is in it."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from unpad.data.patients import EventData
from unpad.doctor.data.histories import two_sides
from unpad.doctor.subject import Subject
from unpad.evaluation.binary import auroc
from unpad.terminal.finding import Finding, Value

LEAST, LEAST_EVENTS = 60, 200  # patients, and events with a value
MOSTLY, NEARLY_ALL = 0.8, 0.95  # shares of patients or events
LEVEL = 2.3  # kurtosis below which integers are spread evenly, as numbers of a list are: 1.8; of a bell it is 3
AGREES = 0.999  # correlation of values and times
SEVERAL, DISTINCT = 4, 12  # valued events of a patient, and different values of a code
RANKS, LEAST_OF_CLASS = 0.97, 20  # AUROC, and patients
FAR_OFF, LEAST_SPAN = 10.0, 1 / 24  # times the length of a history, and days of a history that has one


def check_columns(subject: Subject[EventData]) -> list[Finding]:
    """Findings on the columns of the training patients."""
    data, ids = subject.data, subject.stage.train_ids
    starts = data.sets.events_of
    owner = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    at = np.isin(owner, ids)
    time = np.repeat(data.sets.times, np.diff(data.sets.set_starts)).astype(np.float64)
    timed = ~np.repeat(data.sets.timeless, np.diff(data.sets.set_starts))
    code, patient = data.code[at].astype(np.int64), owner[at]
    value = data.standard[at] * data.known.std[code] + data.known.mean[code]
    time, timed = time[at], timed[at]
    if len(ids) < LEAST:
        return []
    return [
        *_ids(data, code, patient, value, len(ids)),
        *_numbers_of_rows(code, value, timed),
        *_names(data, code, patient, len(ids)),
        *_times(data, code, value, time, timed),
        *_one_value(code, patient, value, timed),
        *(_twice(patient, code, value, time, timed) if subject.setup.recipe.events.window is None else []),
        *_no_values(subject, value, timed),
        *_course(subject, patient, time, timed),
        *_far_landmark(subject, patient, time, timed),
    ]


def _ids(data: EventData, code: np.ndarray, patient: np.ndarray, value: np.ndarray, num: int) -> list[Finding]:
    """A code with one whole number for each patient, all different and spread as evenly as those of a list are."""
    for one in np.unique(code[~np.isnan(value)]).tolist():
        own = (code == one) & ~np.isnan(value)
        numbers = value[own].astype(np.float64)
        if one == 0 or len(numbers) < NEARLY_ALL * num or len(np.unique(patient[own])) < len(numbers):
            continue
        if not _is_whole(numbers).all() or len(np.unique(np.round(numbers))) < len(numbers):
            continue
        away = numbers - numbers.mean()
        if float((away**4).mean() / max(float((away**2).mean()) ** 2, 1e-12)) <= LEVEL:
            values: dict[str, Value] = {"code": data.codes[one]}
            return [Finding("id_value", "warning", len(numbers) / num, ("data.events", "static"), values)]
    return []


def _numbers_of_rows(code: np.ndarray, value: np.ndarray, timed: np.ndarray) -> list[Finding]:
    """Values of all codes that are whole numbers, each another one, as numbers of rows are."""
    own = timed & (code > 0) & ~np.isnan(value)
    numbers = value[own].astype(np.float64)
    if len(numbers) < LEAST_EVENTS or len(np.unique(code[own])) < 2 or not _is_whole(numbers).all():
        return []
    share = len(np.unique(np.round(numbers))) / len(numbers)
    fields = ("data.events", "data.events.value")
    return [Finding("row_value", "warning", share, fields)] if share >= NEARLY_ALL else []


def _is_whole(numbers: np.ndarray) -> np.ndarray:
    """True for whole numbers, as exactly as single precision has them."""
    whole: np.ndarray = np.abs(numbers - np.round(numbers)) <= 1e-3 + 1e-6 * np.abs(numbers)
    return whole


def _names(data: EventData, code: np.ndarray, patient: np.ndarray, num: int) -> list[Finding]:
    """A column of words where nearly every patient has his own."""
    pairs = np.unique(np.stack([code, patient]), axis=1)
    having = np.bincount(pairs[0], minlength=len(data.codes))
    alone: dict[str, list[int]] = defaultdict(list)
    for one in np.flatnonzero(having).tolist():
        name, equals, _ = data.codes[one].partition("=")
        if equals:
            alone[name].append(one)
    for name, codes in alone.items():
        if len(codes) >= MOSTLY * num and float((having[codes] == 1).mean()) >= NEARLY_ALL:
            values: dict[str, Value] = {"code": name}
            return [Finding("id_value", "warning", len(codes) / num, ("data.events", "static"), values)]
    return []


def _times(data: EventData, code: np.ndarray, value: np.ndarray, time: np.ndarray, timed: np.ndarray) -> list[Finding]:
    """Values that are the times of their events, in any unit."""
    agree, judged = list[str](), 0
    for one in np.unique(code[timed & ~np.isnan(value)]).tolist():
        own = (code == one) & timed & ~np.isnan(value)
        if own.sum() < LEAST or len(np.unique(value[own])) < SEVERAL or len(np.unique(time[own])) < SEVERAL:
            continue
        judged += 1
        if abs(float(np.corrcoef(value[own], time[own])[0, 1])) >= AGREES:
            agree.append(data.codes[one])
    if judged < 2 or len(agree) < MOSTLY * judged:  # one code, such as the week of a pregnancy, may count time
        return []
    values: dict[str, Value] = {"code": agree[0]}
    return [Finding("times_as_values", "warning", len(agree) / judged, ("data.events", "data.events.value"), values)]


def _one_value(code: np.ndarray, patient: np.ndarray, value: np.ndarray, timed: np.ndarray) -> list[Finding]:
    """Patients with one value in tests of several kinds, which is that of a column of the patient."""
    own = timed & ~np.isnan(value)
    of_patient: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for who, what, number in zip(patient[own].tolist(), code[own].tolist(), value[own].tolist(), strict=True):
        of_patient[who].append((what, number))
    several = [known for known in of_patient.values() if len(known) >= SEVERAL and len({what for what, _ in known}) > 1]
    one = [known for known in several if np.ptp([number for _, number in known]) <= 1e-4 * abs(known[0][1])]
    different = {round(known[0][1], 3) for known in one}
    if len(several) < LEAST / 2 or len(one) < MOSTLY * len(several) or len(different) < DISTINCT:
        return []
    fields = ("data.events", "data.events.value")
    return [Finding("one_value", "warning", len(one) / len(several), fields, {"sequences": len(several)})]


def _twice(
    patient: np.ndarray, code: np.ndarray, value: np.ndarray, time: np.ndarray, timed: np.ndarray
) -> list[Finding]:
    """Events that a patient has again with the same value, always as much later: two exports on two clocks."""
    own = np.flatnonzero(timed & ~np.isnan(value))
    if len(own) < LEAST_EVENTS or len(np.unique(value[own])) < 5 * DISTINCT:
        return []
    own = own[np.lexsort((time[own], value[own], code[own], patient[own]))]
    same = (np.diff(patient[own]) == 0) & (np.diff(code[own]) == 0) & (np.diff(value[own]) == 0)
    lags = np.round(np.diff(time[own])[same] * 1440).astype(int)  # minutes
    if not len(lags):
        return []
    lag, num = Counter(lags.tolist()).most_common(1)[0]
    share = 2 * num / len(own)
    if not MOSTLY <= share <= 1.05 or not lag:  # values that are carried forward are there more than twice
        return []
    fields = ("data.events", "events.duplicates")
    return [Finding("events_twice", "warning", min(share, 1.0), fields, {"hours": lag / 60})]


def _no_values(subject: Subject[EventData], value: np.ndarray, timed: np.ndarray) -> list[Finding]:
    """A column of values that the recipe names, and in which there is none."""
    named = [source.value for source in subject.setup.recipe.data.events if source.value not in (None, "auto")]
    if not named or timed.sum() < LEAST_EVENTS or (~np.isnan(value[timed])).mean() > 1 - NEARLY_ALL:
        return []
    share = float(np.isnan(value[timed]).mean())
    return [Finding("no_values", "warning", share, ("data.events", "data.events.value"), {"column": str(named[0])})]


def _course(subject: Subject[EventData], patient: np.ndarray, time: np.ndarray, timed: np.ndarray) -> list[Finding]:
    """The number of events, or the time of the last one, that tells the label: what is written, and how long, follows
    from the outcome."""
    ids = subject.stage.train_ids
    num = np.bincount(patient[timed], minlength=int(max(ids.max(), patient.max(initial=0))) + 1)[ids]
    last = np.full(int(ids.max()) + 1, -np.inf)
    np.maximum.at(last, patient[timed], time[timed])
    for labels, names in two_sides(subject.data, ids):
        known = labels >= 0
        if min((labels == 0).sum(), (labels == 1).sum()) < LEAST_OF_CLASS:
            continue
        for name, measure in (("@num_events", num.astype(float)), ("@last_event", last[ids])):
            usable = known & np.isfinite(measure)
            if len(np.unique(labels[usable])) < 2 or usable.sum() < MOSTLY * known.sum():
                continue
            area = float(auroc(labels[usable], measure[usable]))
            if max(area, 1 - area) >= RANKS:
                means = [float(np.median(measure[usable & (labels == one)])) for one in (0, 1)]
                values: dict[str, Value] = {"what": name, "first": means[0], "second": means[1]}
                values |= dict(zip(("other", "target"), names, strict=True))
                fields = ("events.landmark", "data.events")
                return [Finding("leaking_course", "warning", max(area, 1 - area), fields, values)]
    return []


def _far_landmark(
    subject: Subject[EventData], patient: np.ndarray, time: np.ndarray, timed: np.ndarray
) -> list[Finding]:
    """A landmark that all patients share, far behind the end of their histories: another unit than that of the events,
    or a time at which the outcome is long known."""
    landmark = subject.setup.recipe.events.landmark
    if not isinstance(landmark, float):
        return []
    first, last = defaultdict[int, float](lambda: np.inf), defaultdict[int, float](lambda: -np.inf)
    for who, when in zip(patient[timed].tolist(), time[timed].tolist(), strict=True):
        first[who], last[who] = min(first[who], when), max(last[who], when)
    if len(first) < LEAST:
        return []
    gap = -float(np.median(list(last.values())))
    span = float(np.median([last[who] - first[who] for who in first]))
    # Histories that begin at the same time, as stays at admission do, leave no reason for a gap.
    begin = np.quantile(list(first.values()), [0.1, 0.9])
    if span < LEAST_SPAN or gap < FAR_OFF * span or float(np.ptp(begin)) > gap / FAR_OFF:
        return []
    values: dict[str, Value] = {"landmark": landmark, "gap": gap, "span": span}
    return [Finding("far_landmark", "warning", gap / span, ("events.landmark", "events.unit"), values)]
