"""Findings on patients: what gives the outcome away, far values, rare codes, and histories that were not read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from unpad.data.patients import EventData
from unpad.doctor.finding import Finding, Found, Words, finding, level
from unpad.doctor.rows import cut_short, labelled, of_rows, spelt_twice
from unpad.doctor.subject import Subject
from unpad.evaluation.binary import auroc


def look(subject: Subject[EventData]) -> list[Finding]:
    """Findings on the sequences of the stage, of a patient at several landmarks on the last, which holds the most."""
    data = subject.data
    last = np.flatnonzero(np.diff(data.table.group, append=-1))
    train_ids, held_out_ids = (ids[np.isin(ids, last)] for ids in (subject.stage.train_ids, subject.stage.held_out_ids))
    subject = replace(subject, stage=replace(subject.stage, train_ids=train_ids, held_out_ids=held_out_ids))
    events = _events(data, train_ids)
    names = [data.codes[code] for code in events.code[events.code > 0].tolist()]
    beyond = data.report.counts.get("beyond events.max_events", 0)
    return [
        *of_rows(subject, labelled(subject)),
        *leak(events),
        *far_values(events),
        *rare_codes(events),
        *no_history(subject),
        *spelt_twice(names, ("data.events", "data.events.code", "static")),
        *cut_short(subject, beyond, "events.max_events", 0.5),
    ]


@dataclass(frozen=True, eq=False)
class _Events:
    """Events of the training patients.

    Args:
        ids: (num_patients,) int64, their sequences.
        patient: (num_events,) int64, index into `ids`, ascending; code: (num_events,) int64, 0 for a rare one.
        value: (num_events,) float32, nan without one; time: (num_events,) days before the landmark, nan of facts.
    """

    data: EventData
    ids: np.ndarray
    patient: np.ndarray
    code: np.ndarray
    value: np.ndarray

    def last_of(self, events: np.ndarray) -> np.ndarray:
        """The last of these events of each patient and code, (num_pairs,) int64."""
        pairs = self.patient[events] * len(self.data.codes) + self.code[events]
        _, first = np.unique(pairs[::-1], return_index=True)
        last: np.ndarray = events[len(events) - 1 - first]
        return last

    def by_code(self, events: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Each code with its events among these."""
        events = events[np.argsort(self.code[events], kind="stable")]
        codes, firsts = np.unique(self.code[events], return_index=True)
        yield from zip(codes.tolist(), np.split(events, firsts[1:]), strict=bool(len(codes)))


def _events(data: EventData, ids: np.ndarray) -> _Events:
    starts = data.sets.events_of
    owner, place = np.repeat(np.arange(len(starts) - 1), np.diff(starts)), np.full(len(starts) - 1, -1)
    place[ids] = np.arange(len(ids))
    events = np.flatnonzero(place[owner] >= 0)
    events = events[np.argsort(place[owner[events]], kind="stable")]
    return _Events(data, ids, place[owner[events]], data.code[events].astype(np.int64), data.standard[events])


@finding(
    "leak", "fault",
    en=("{what} alone tells label {target}, {number:.3f} of 1: it may be the outcome itself, or be written after it, so "
        "that it leaks.",
        "leave it out of the events and of `static`, or predict before it: events.landmark; a loss near 0 is no success"),
    zh=("单凭{what}就能分出标签 {target}（{number:.3f}，最高为 1）：它可能就是结局本身，或是之后才写入的，即泄漏。",
        "从事件和 `static` 中去掉它，或用 events.landmark 在它之前预测；损失接近 0 并不说明学会了"),
)  # fmt: skip
def leak(events: _Events) -> Found | None:
    """The code, value or number of events that tells the label best, if one tells nearly all."""
    data, best = events.data, list[tuple[float, Words, str]]()
    for labels, name in _two_sides(data, events.ids):
        sizes = np.array([(labels == 0).sum(), (labels == 1).sum()])
        if sizes.min() < 20:
            continue
        known = np.flatnonzero((labels[events.patient] >= 0) & (events.code > 0))
        last = events.last_of(known)
        sides = [events.code[last[labels[events.patient[last]] == one]] for one in (0, 1)]
        having = np.stack([np.bincount(side, minlength=len(data.codes)) for side in sides])
        shares, total = having / sizes[:, None], having.sum(0)
        for label in (0, 1):
            apart = shares[label] - shares[1 - label]
            pure = (
                (having[label] / np.maximum(total, 1) >= 0.98)
                & (shares[label] >= 0.1)
                & (2 * sizes[label] <= sizes.sum())
            )
            for code in np.flatnonzero((total >= 20) & ((apart >= 0.9) | pure)).tolist():
                what = (f"The code {data.codes[code]} ({shares[label, code]:.0%} of the patients with the label, "
                        f"{shares[1 - label, code]:.1%} of the others)", f"编码 {data.codes[code]}")  # fmt: skip
                best.append((float(having[label, code] / total[code]), what, name if label else f"≠ {name}"))
        valued = events.last_of(known[~np.isnan(events.value[known])])
        for code, chosen in events.by_code(valued):
            taken = np.flatnonzero((events.code == code) & ~np.isnan(events.value))
            again = len(taken) / max(len(np.unique(events.patient[taken])), 1)
            side = labels[events.patient[chosen]]
            area = _area(side, events.value[chosen]) if min((side == 0).sum(), (side == 1).sum()) >= 20 else 0
            if area >= 0.9995 and again < 3:  # a test that is taken again and again may tell the label by its course
                best.append((area, (f"The value of {data.codes[code]}", f" {data.codes[code]} 的数值"), name))
        num = np.bincount(events.patient, minlength=len(events.ids))
        area = _area(labels[labels >= 0], num[labels >= 0].astype(float))
        if area >= 0.97:
            medians = [float(np.median(num[labels == one])) for one in (0, 1)]
            what = (
                f"The number of events (at the median {medians[1]:g} with the label and {medians[0]:g} without)",
                "事件数",
            )
            best.append((area, what, name))
    if not best:
        return None
    number, what, target = max(best, key=lambda item: item[0])
    return Found(number, "data.events", "events.landmark", what=what, target=target)


def _two_sides(data: EventData, ids: np.ndarray) -> Iterator[tuple[np.ndarray, str]]:
    """Labels 0, 1, or -1 if unknown, (num_patients,), and the name of 1; every one of several classes in turn as 1."""
    if data.labels is None:
        return
    labels = data.labels[ids]
    if not data.classes:
        yield labels, "1"
    for place, name in enumerate(data.classes):
        yield np.where(labels < 0, labels, labels == place), name


def _area(labels: np.ndarray, scores: np.ndarray) -> float:
    area = float(auroc(labels, scores))
    return max(area, 1 - area)


@finding(
    "far_values", explains={"labels_random"},
    en=("{far:,} values of {code} are {times:,.0f} times as far from the median as all others, and make its standard "
        "deviation {number:,.0f} times as large: the others look equal. Codes like it: {codes}.",
        "look for another unit or placeholders such as 9999 among them; convert or empty these cells"),
    zh=("{code} 有 {far:,} 个数值离中位数的距离是其余的 {times:,.0f} 倍，使标准差变成 {number:,.0f} 倍：其余数值看起来都一样。"
        "这样的编码有 {codes} 种。", "检查其中是否混有别的单位或 9999 之类的占位值；换算或清空这些单元格"),
)  # fmt: skip
def far_values(events: _Events) -> Found | None:
    """The code with a scale set by a few values far from all others."""
    results = list[tuple[float, int, int, float]]()
    for code, chosen in events.by_code(np.flatnonzero(~np.isnan(events.value))):
        values = events.value[chosen].astype(np.float64)
        if len(values) < 50:
            continue
        distance = np.abs(values - np.median(values))
        order = np.argsort(distance, kind="stable")
        upper = distance[order][len(order) // 2 :]
        times = upper[1:] / np.where(upper[:-1] > 0, upper[:-1], np.inf)
        gap = int(times.argmax())
        near = values[order[: len(order) // 2 + gap + 1]]
        widened = float(values.std() / max(near.std(), 1e-12))
        if times[gap] >= 5 and widened >= 10:
            results.append((widened, code, len(values) - len(near), float(times[gap])))
    if not results:
        return None
    widened, code, far, most = max(results)
    return Found(widened, "data.events", code=events.data.codes[code], far=far, times=most, codes=len(results))


@finding(
    "rare_codes", explains={"labels_random", "frozen"},
    en=("{number:.0%} of the events have codes that are unique to one patient, or that events.min_count makes unknown; "
        "{codes:,} codes are known: nothing of the others holds for new patients.",
        "take numbers and values out of the code column, map codes to coarser ones, or change events.min_count"),
    zh=("{number:.0%} 的事件用的编码只出现在一个病人身上，或因 events.min_count 而未知；已知的编码有 {codes:,} 种：其余的对新病人没有用。",
        "去掉编码列中的流水号和数值，把编码归并成更粗的，或修改 events.min_count"),
)  # fmt: skip
def rare_codes(events: _Events) -> Found | None:
    """Codes that one patient alone has, or none that is known."""
    if len(events.ids) < 20 or not len(events.code):
        return None
    patients = np.bincount(events.code[events.last_of(np.arange(len(events.code)))], minlength=len(events.data.codes))
    share = float(((patients == 1) | (np.arange(len(patients)) == 0))[events.code].mean())
    fields = ("data.events", "events.min_count")
    return Found(share, *fields, severity=level(share >= 0.5), codes=len(patients) - 1) if share >= 0.2 else None


@finding(
    "no_history", explains={"labels_random"},
    en=("{number:.0%} of {num:,} patients are lost: {why}.",
        "compare ids, times and units of the tables and of events.landmark and events.labels: blanks, leading zeros, days "
        "for hours, another start"),
    zh=("{num:,} 个病人中有 {number:.0%} 没有用上：{why}。",
        "对照各表与 events.landmark、events.labels 的 id、时间和单位：空格、前导零、把小时当成天、起点不同"),
)  # fmt: skip
def no_history(subject: Subject[EventData]) -> Found | None:
    """Patients of whom no event with a time is read, where there are some, or that are left out or without a label."""
    data, ids, labels = subject.data, subject.stage.train_ids, subject.setup.recipe.events.labels
    late = data.report.num_late[ids].sum(1)
    share = float((data.sets.has_no_time[ids] & (late > 0)).sum() / max(len(ids), 1))
    if len(ids) >= 20 and share >= 0.5:
        why = (
            f"no event with a time is up to the landmark, {int(late.sum()):,} are after it",
            "在预测时点之前没有带时间的事件",
        )
        fields: tuple[str, ...] = ("events.landmark", "events.unit", "data.events")
        return Found(share, *fields, severity=level(share >= 0.9), num=len(ids), why=why)
    # Several landmarks leave out examples as they should: observation ends before the later ones.
    left = {} if data.landmarks is not None else {why: num for why, num in data.cohort.left_out.items() if num}
    unknown = int((data.labels[ids] < 0).sum()) if data.labels is not None and data.landmarks is None else 0
    lost, whole = sum(left.values()) + unknown, sum(left.values()) + len(data.ids)
    if lost < 0.4 * whole:
        return None
    reason = max(left, key=lambda one: left[one]) if left else "without a label"
    if (labels is not None and labels.horizon is not None and "before the horizon" in reason) or (not left and unknown):
        fields = ("events.labels.horizon", "events.labels.censored", "events.labels.duration", "events.labels")
    else:
        fields = ("events.labels", "events.labels.missing", "events.labels.id", "events.landmark", "events.unit",
                  "events.labels.duration", "data.events", "events.split")  # fmt: skip
    return Found(
        lost / whole,
        *fields,
        severity=level(lost >= 0.8 * whole),
        num=whole,
        why=(f"left out, {reason}", f"被略去（{reason}）"),
    )
