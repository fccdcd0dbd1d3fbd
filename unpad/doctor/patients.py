"""Findings on patients: what gives the outcome away, far values, rare codes, and histories that were not read."""

from dataclasses import replace

import numpy as np

from unpad.data.histories.cohort import TEST_PART
from unpad.data.histories.leaks import PatientEvents
from unpad.data.histories.scales import by_code
from unpad.data.patients import EventData
from unpad.doctor.finding import Finding, Found, finding, level
from unpad.doctor.rows import cut_short, labelled, of_rows
from unpad.doctor.subject import Subject


def look(subject: Subject[EventData]) -> list[Finding]:
    """Findings on the sequences of the stage, of a patient at several landmarks on the last, which holds the most."""
    data = subject.data
    last = np.flatnonzero(np.diff(data.table.group, append=-1))
    train_ids, held_out_ids = (ids[np.isin(ids, last)] for ids in (subject.stage.train_ids, subject.stage.held_out_ids))
    subject = replace(subject, stage=replace(subject.stage, train_ids=train_ids, held_out_ids=held_out_ids))
    events = data.events_of(train_ids)
    beyond = data.report.counts.get("beyond events.max_events", 0)
    return [
        *of_rows(subject, labelled(subject)),
        *leak(data, events),
        *far_values(events),
        *rare_codes(events),
        *no_history(subject),
        *cut_short(subject, beyond, "events.max_events", 0.5),
    ]


@finding("leak", "fault",
    en=("{what} alone tells label {target}, {number:.3f} of 1: it may be the outcome itself, or be written after it, "
        "so that it leaks.", "leave it out of events and `static`, or predict before it: events.landmark"),
    zh=("单凭{what}就能分出标签 {target}（{number:.3f}，最高为 1）：可能是泄漏。",
        "去掉它，或用 events.landmark 在它之前预测"))  # fmt: skip
def leak(data: EventData, events: PatientEvents) -> Found | None:
    """The code, value or number of events that tells the label best, if one tells nearly all."""
    worst = data.worst_leak(events)
    if worst is None:
        return None
    what = f"T{worst.what[0][1:]}", worst.what[1]
    return Found(worst.share, "data.events", "events.landmark", what=what, target=worst.label)


@finding("far_values", explains={"labels_random"},
    en=("{far:,} values of {code} ({codes} such codes) are {times:,.0f} times as far from the median as others, and "
        "make its deviation {number:,.0f} times as large.",
        "look for another unit or placeholders (9999); convert or empty them"),
    zh=("{code} 等 {codes} 种编码：{far:,} 个数值离中位数是其余的 {times:,.0f} 倍，标准差变成 {number:,.0f} 倍。",
        "检查单位和 9999 之类的占位值"))  # fmt: skip
def far_values(events: PatientEvents) -> Found | None:
    """The code with a scale set by a few values far from all others."""
    results = list[tuple[float, int, int, float]]()
    for code, chosen in by_code(events.code, np.flatnonzero(~np.isnan(events.value))):
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
    return Found(widened, "data.events", code=events.codes[code], far=far, times=most, codes=len(results))


@finding("rare_codes", explains={"labels_random", "frozen"},
    en=("{number:.0%} of the events have codes that are unique to one patient or unknown by events.min_count; "
        "{codes:,} codes are known.", "take numbers and values out of codes, or map codes to coarser ones"),
    zh=("{number:.0%} 的事件的编码只有一个病人有，或因 events.min_count 未知（已知 {codes:,} 种）。",
        "去掉其中的流水号和数值，或归并编码"))  # fmt: skip
def rare_codes(events: PatientEvents) -> Found | None:
    """Codes that one patient alone has, or none that is known."""
    if len(events.ids) < 20 or not len(events.code):
        return None
    patients = np.bincount(events.code[events.last_of(np.arange(len(events.code)))], minlength=len(events.codes))
    share = float(((patients == 1) | (np.arange(len(patients)) == 0))[events.code].mean())
    fields = ("data.events", "events.min_count")
    return Found(share, *fields, severity=level(share >= 0.5), codes=len(patients) - 1) if share >= 0.2 else None


@finding("no_history", explains={"labels_random"},
    en=("{number:.0%} of {num:,} patients are lost: {why}.",
        "compare ids and times (days, hours) with events.landmark, events.labels"),
    zh=("{num:,} 个病人中有 {number:.0%} 没有用上：{why}。", "对照 id、时间、单位与 events.landmark"))  # fmt: skip
def no_history(subject: Subject[EventData]) -> Found | None:
    """Patients of whom no event with a time is read, where there are some, or that are left out or without a label."""
    data, ids = subject.data, subject.stage.train_ids
    labels = [f"events.labels{name}" for name in ("", ".horizon", ".censored", ".duration", ".missing", ".id")]
    fields = ("events.landmark", "events.unit", "data.events", *labels, "events.split")
    late = data.report.num_late[ids].sum(1)
    share = float((data.sets.has_no_time[ids] & (late > 0)).sum() / max(len(ids), 1))
    if len(ids) >= 20 and share >= 0.5:
        why = (f"no event with a time is up to the landmark, {int(late.sum()):,} are after it", "预测时点之前没有事件")
        return Found(share, *fields, severity=level(share >= 0.9), num=len(ids), why=why)
    # Several landmarks leave out examples as they should: observation ends before the later ones.
    left = {} if data.landmarks is not None else {why: num for why, num in data.cohort.left_out.items() if num}
    left.pop(TEST_PART, None)  # they are measured later
    unknown = int((data.labels[ids] < 0).sum()) if data.labels is not None and data.landmarks is None else 0
    lost, whole = sum(left.values()) + unknown, sum(left.values()) + len(data.ids)
    if lost < 0.4 * whole:
        return None
    reason = max(left, key=lambda one: left[one]) if left else "without a label"
    why = (f"left out, {reason} (events.labels.horizon?)", f"被略去（{reason}）")
    return Found(lost / whole, *fields[3:], severity=level(lost >= 0.8 * whole), num=whole, why=why)
