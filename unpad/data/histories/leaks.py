"""What alone tells the label of patients: a code, the value of a code, or the number or the end of their events."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from unpad.data.histories.scales import by_code

FEWEST = 20  # patients of each label


@dataclass(frozen=True, eq=False)
class PatientEvents:
    """Events of some patients.

    Args:
        ids: (num_patients,) int64, their sequences.
        patient: (num_events,) int64, index into `ids`, ascending; code: (num_events,) int64, 0 for a rare one.
        value: (num_events,) float, nan without one; time: (num_events,) days from the landmark, nan of facts.
        codes: their names.
    """

    ids: np.ndarray
    patient: np.ndarray
    code: np.ndarray
    value: np.ndarray
    time: np.ndarray
    codes: Sequence[str]

    def last_of(self, events: np.ndarray) -> np.ndarray:
        """The last of these events of each patient and code, (num_pairs,) int64."""
        pairs = self.patient[events] * len(self.codes) + self.code[events]
        _, first = np.unique(pairs[::-1], return_index=True)
        return np.asarray(events[len(events) - 1 - first])


@dataclass(frozen=True)
class LabelLeak:
    """What alone tells a label.

    Args:
        share: of the patients with it who have the label; of a number the area under its curve.
        what: in English and in Chinese; label: that it tells.
    """

    share: float
    what: tuple[str, str]
    label: str


def worst_leak(events: PatientEvents, labels: np.ndarray | None, classes: Sequence[str]) -> LabelLeak | None:
    """The code, value, or number of events that tells the label best, if one tells nearly all.

    Args:
        labels: (num,) 0, 1, or the place in `classes`, -1 if unknown.
    """
    sides = [] if labels is None else [(labels, "1")]
    if labels is not None and classes:
        sides = [(np.where(labels < 0, labels, labels == place), name) for place, name in enumerate(classes)]
    leaks = [leak for side, name in sides for leak in _leaks(events, side, name)]
    return max(leaks, key=lambda leak: leak.share, default=None)


def _leaks(events: PatientEvents, labels: np.ndarray, name: str) -> Iterator[LabelLeak]:
    sizes = np.array([(labels == 0).sum(), (labels == 1).sum()])
    if sizes.min() < FEWEST:
        return
    labelled = np.flatnonzero((labels[events.patient] >= 0) & (events.code > 0))
    last, num_codes = events.last_of(labelled), len(events.codes)
    sides = [events.code[last[labels[events.patient[last]] == label]] for label in (0, 1)]
    having = np.stack([np.bincount(side, minlength=num_codes) for side in sides])
    shares, total = having / sizes[:, None], having.sum(0)
    for label in (0, 1):
        apart = shares[label] - shares[1 - label]
        pure = (having[label] >= 0.98 * total) & (shares[label] >= 0.1) & (2 * sizes[label] <= sizes.sum())
        for code in np.flatnonzero((total >= FEWEST) & ((apart >= 0.9) | pure)).tolist():
            what = (f"the code {events.codes[code]} ({shares[label, code]:.0%} of the patients with the label, "
                    f"{shares[1 - label, code]:.1%} of the others)", f"编码 {events.codes[code]}")  # fmt: skip
            yield LabelLeak(float(having[label, code] / total[code]), what, name if label else f"≠ {name}")
    valued = labelled[~np.isnan(events.value[labelled])]
    last = events.last_of(valued)
    again = np.bincount(events.code[valued], minlength=num_codes)
    for code, chosen in by_code(events.code, last):
        side = labels[events.patient[chosen]]
        # A test that is taken again and again may tell the label by its course.
        if again[code] < 3 * len(chosen) and min((side == 0).sum(), (side == 1).sum()) >= FEWEST:
            area = _area(side, events.value[chosen])
            if area >= 0.9995:
                yield LabelLeak(area, (f"the value of {events.codes[code]}", f" {events.codes[code]} 的数值"), name)
    timed, last_time = ~np.isnan(events.time), np.full(len(events.ids), -np.inf)
    np.maximum.at(last_time, events.patient[timed], events.time[timed])
    number = np.bincount(events.patient[timed], minlength=len(events.ids)).astype(float)
    for measure, words, chinese in (
        (number, "number of events", "事件数"), (last_time, "time of the last event", "末次事件时间")
    ):  # fmt: skip
        usable = (labels >= 0) & np.isfinite(measure)
        area = _area(labels[usable], measure[usable]) if len(np.unique(labels[usable])) == 2 else 0
        if area >= 0.97:
            medians = [float(np.median(measure[usable & (labels == label)])) for label in (1, 0)]
            words = f"the {words} (at the median {medians[0]:g} with it and {medians[1]:g} without)"
            yield LabelLeak(area, (words, chinese), name)


def _area(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the curve of scores, whichever way they point, by ranks (Mann and Whitney 1947)."""
    _, place, num = np.unique(scores, return_inverse=True, return_counts=True)
    rank, with_it = (np.cumsum(num) - (num - 1) / 2)[place], labels == 1
    size = with_it.sum()
    area = float((rank[with_it].sum() - size * (size + 1) / 2) / (size * (len(labels) - size)))
    return max(area, 1 - area)
