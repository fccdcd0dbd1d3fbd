"""Values of patients' tests that are two things in one column, stand for none, or are a part of codes; and patients
that a join has lost."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np

from unpad.data.patients import EventData
from unpad.doctor.subject import Subject
from unpad.terminal.finding import Finding, Severity, Value

LEAST_VALUES, DISTINCT = 80, 12  # of a code, and different ones on each side of a gap
SMALLER = 0.1  # share of the values on the smaller side
GAP, ALIKE = 5.0, 5.0  # deviations of the sides between their means, and times that one's spread may be the other's
EMPTY_MIDDLE = 0.35  # of the distance between the means, without a value
STAND_IN, BESIDE = 0.04, 1.0  # share of one exact value, and deviations of the others from their nearest to it
LOST, MOSTLY_LOST = 0.4, 0.8  # of the patients
CENSORED, ENDED_BEFORE = "censored before the horizon", "whose observation ended before the landmark"
# Words of an outcome that came, and of one that did not; and columns in which they mean the other.
BAD = (
    "dead died death deceased exitus expired mortality yes y true t 1 positive pos present case event relapse "
    "relapsed readmitted sepsis septic ill sick tot gestorben verstorben ja décédé oui muerto fallecido sí "
    "死亡 死 已故 去世 是 阳性 有 复发 患病"
)
BAD_WORDS = frozenset(BAD.split())
GOOD = (
    "alive living survived survivor lebt lebend vivant vivo no n false f 0 negative neg absent control none "
    "censored healthy well recovered discharged nein non 存活 生存 活着 否 阴性 无 未 健康 治愈 出院 未复发"
)
GOOD_WORDS = frozenset(GOOD.split())
GOOD_COLUMN = re.compile(r"surviv|alive|censor|healthy|recover|remission|free|生存|存活|删失|治愈", re.IGNORECASE)
BAD_COLUMN = re.compile(
    r"die[ds]|dea[dt]|deceased|expired|mortal|event|outcome|relapse|readmi|sepsis|disease|ill\b|case|fail|positive|死|病|复发",
    re.IGNORECASE,
)
# Words that say nothing without their column.
ANSWER = re.compile(r"yes|y|true|t|1|positive|pos|present|case|event|ja|oui|sí|是|有")
ENDED_WELL = re.compile(r"(?<!un)(?<!not_)(?<!not )censored|survived|alive|存活|删失", re.IGNORECASE)
# A name with a value behind it: after a sign or blank, and a decimal number also after letters.
WITH_VALUE = re.compile(
    r"(?P<name>.*[^\W\d_].*?)(?:\s*[=:<>|~]+\s*|\s+|[_-]+|(?<=[^\W\d_]{3}))[+-]?(?:\d+[.,]\d+|(?<![^\W\d_])\d+)"
    r"\s*(?P<unit>[^\W\d_%/]*[%/]?[^\W\d]*)"
)
VOCABULARY = re.compile(r"\b(?:icd|snomed|sct|loinc|rxn|atc|cpt|hcpcs|drg|ndc|omop)|\d{4,}$", re.IGNORECASE)
MANY_CODES, GLUED, MOSTLY_GLUED = 20, 0.2, 0.5  # of one name, and shares of the events with such codes
RECUR, TO_CODE = 1.05, 20.0  # events of such a code, on average: numbers of orders never recur, and classes always


def check_values(subject: Subject[EventData]) -> list[Finding]:
    """Findings on the values of the training patients, and on patients that were left out."""
    data = subject.data
    by_code = _values_of(data, subject.stage.train_ids)
    found = [*_two_scales(data, by_code), *_stand_ins(data, by_code), *_flat(data, by_code)]
    return [*found, *_in_codes(data, subject.stage.train_ids), *_lost(subject), *check_outcome(subject)]


def _values_of(data: EventData, ids: np.ndarray) -> dict[int, np.ndarray]:
    """Sorted values of the training patients in standard deviations, by code."""
    owner = np.repeat(np.arange(len(data.sets.events_of) - 1), np.diff(data.sets.events_of))
    chosen = np.isin(owner, ids) & ~np.isnan(data.standard) & (data.code > 0)
    code, value = data.code[chosen], data.standard[chosen].astype(np.float64)
    counts = np.bincount(code, minlength=len(data.codes))
    return {one: np.sort(value[code == one]) for one in np.flatnonzero(counts >= LEAST_VALUES).tolist()}


def _two_scales(data: EventData, by_code: dict[int, np.ndarray]) -> list[Finding]:
    """Values in two bells with nothing between them, each of many different values: two units, or two tests."""
    found: list[tuple[float, int, float, float]] = []
    for code, values in by_code.items():
        raw = values * data.known.std[code] + data.known.mean[code]
        for scaled in (raw, np.log(raw)) if (raw > 0).all() else (raw,):
            least = max(int(SMALLER * len(scaled)), 2)
            gaps = np.diff(scaled)[least - 1 : len(scaled) - least]
            cut = least + int(gaps.argmax())
            low, high = scaled[:cut], scaled[cut:]
            apart, spreads = float(high.mean() - low.mean()), sorted((float(low.std()), float(high.std())))
            distinct = min(len(np.unique(low)), len(np.unique(high)))
            is_two = apart >= GAP * spreads[1] and float(gaps.max()) >= EMPTY_MIDDLE * apart
            if is_two and distinct >= DISTINCT and spreads[1] <= ALIKE * spreads[0]:
                middles = float(np.median(raw[:cut])), float(np.median(raw[cut:]))
                found.append((min(len(low), len(high)) / len(raw), code, *middles))
                break
    if not found:
        return []
    share, code, first, second = max(found)
    told: dict[str, Value] = {"code": data.codes[code], "first": first, "second": second, "codes": len(found)}
    return [Finding("two_scales", "warning", share, ("data.events",), told)]


def _stand_ins(data: EventData, by_code: dict[int, np.ndarray]) -> list[Finding]:
    """One exact value at the edge of a code, far from all the others, as programs write where there is none."""
    found: list[tuple[float, int, float]] = []
    for code, values in by_code.items():
        for edge, others in ((values[0], values[values > values[0]]), (values[-1], values[values < values[-1]])):
            share = 1 - len(others) / len(values)
            if len(np.unique(others)) < DISTINCT or not STAND_IN <= share < 0.9:
                continue
            distance = float(np.abs(others - edge).min())
            if distance >= BESIDE * max(float(others.std()), 1e-9):
                step = float(data.known.std[code]) * 1e-5  # beyond which single precision adds digits of its own
                found.append(
                    (share, code, round(float(edge * data.known.std[code] + data.known.mean[code]) / step) * step)
                )
    if not found:
        return []
    share, code, value = max(found)
    told: dict[str, Value] = {"code": data.codes[code], "value": value, "codes": len(found)}
    return [Finding("stand_in", "warning", share, ("data.events",), told)]


def _flat(data: EventData, by_code: dict[int, np.ndarray]) -> list[Finding]:
    """Values that `events.std_floor` has made small, though they differ."""
    floor = data.recipe.events.std_floor
    small = [code for code, values in by_code.items() if 0 < float(values.std()) < 0.1]
    if not small or len(small) < 0.3 * len(by_code) or floor <= 0.01:
        return []
    told: dict[str, Value] = {"code": data.codes[small[0]], "codes": len(small), "field": "events.std_floor"}
    return [Finding("floored", "warning", floor, ("events.std_floor",), told)]


def _in_codes(data: EventData, ids: np.ndarray) -> list[Finding]:
    """Codes that are a name and a number, many for each name, so that no two values of a test are known to be near."""
    owner = np.repeat(np.arange(len(data.sets.events_of) - 1), np.diff(data.sets.events_of))
    events = np.bincount(data.code[np.isin(owner, ids)], minlength=len(data.codes))
    of_name: dict[tuple[str, str], list[int]] = defaultdict(list)
    for code, text in enumerate(data.codes):
        parts = WITH_VALUE.fullmatch(text) if code and events[code] and not VOCABULARY.search(text) else None
        if parts:
            of_name[parts["name"], parts["unit"]].append(code)
    glued = {
        name: codes
        for name, codes in of_name.items()
        if len(codes) >= MANY_CODES and RECUR <= events[codes].mean() <= TO_CODE
    }
    share = sum(int(events[codes].sum()) for codes in glued.values()) / max(int(events.sum()), 1)
    if share < GLUED:
        return []
    most = max(glued.values(), key=len)
    told: dict[str, Value] = {
        "codes": sum(map(len, glued.values())),
        "names": len(glued),
        "first": data.codes[most[0]],
        "second": data.codes[most[len(most) // 2]],
    }
    severity: Severity = "fault" if share >= MOSTLY_GLUED else "warning"
    return [Finding("values_in_codes", severity, share, ("data.events",), told)]


def _lost(subject: Subject[EventData]) -> list[Finding]:
    """Patients that were left out, such as those with an id in no row of the labels. Several landmarks leave out
    examples as they should: observation ends before the later ones."""
    data = subject.data
    if data.landmarks is not None:
        return []
    left = {why: num for why, num in data.cohort.left_out.items() if num}
    unknown = int((data.labels[subject.stage.train_ids] < 0).sum()) if data.labels is not None else 0
    lost, whole = sum(left.values()) + unknown, sum(left.values()) + len(data.ids)
    share = lost / max(whole, 1)
    if share < LOST:
        return []
    why = max(left, key=lambda one: left[one]) if left else "@no_label"
    severity: Severity = "fault" if share >= MOSTLY_LOST else "warning"
    told: dict[str, Value] = {"sequences": whole}
    events, labels = subject.setup.recipe.events, subject.setup.recipe.events.labels
    censored = left.get(CENSORED, 0) + (unknown if labels is not None and labels.horizon is not None else 0)
    if labels is not None and labels.horizon is not None and censored >= lost / 2:
        known = data.labels[data.labels >= 0] if data.labels is not None else np.zeros(1)
        told |= {
            "horizon": labels.horizon,
            "unit": _unit(subject),
            "positive": float(known.mean()) if len(known) else 0,
        }
        fields: tuple[str, ...] = (
            "events.labels.horizon",
            "events.labels.censored",
            "events.labels.duration",
            "events.labels",
        )
        return [Finding("beyond_follow_up", severity, share, fields, told)]
    if why == ENDED_BEFORE:
        told |= {"landmark": str(events.landmark)}
        fields = ("events.landmark", "events.labels.duration", "events.unit", "events.labels")
        return [Finding("late_landmark", severity, share, fields, told)]
    told |= {"why": why}
    fields = ("events.labels", "events.labels.missing", "events.labels.id", "data.events", "events.split")
    return [Finding("lost_patients", severity, share, fields, told)]


def _unit(subject: Subject[EventData]) -> str:
    """The unit of times in the recipe, as it names it or its tables do."""
    recipe = subject.setup.recipe
    given = [recipe.events.unit, *(source.unit for source in recipe.data.events)]
    return next((one for one in given if one in ("minutes", "hours", "days")), "days")


def check_outcome(subject: Subject[EventData]) -> list[Finding]:
    """Findings on outcomes that are labelled the wrong way round, by the words of their map and the name of their
    column. A column of survivors has its own words the other way."""
    labels = subject.setup.recipe.events.labels
    if labels is None:
        return []
    column, told = str(labels.label or labels.event), dict[str, Value]()
    if labels.event is not None and labels.map is None and ENDED_WELL.search(column):
        read = ("events.labels.event", "events.labels.map", "events.labels")
        return [Finding("event_is_censoring", "warning", 1.0, read, {"column": column})]
    if GOOD_COLUMN.search(column):
        return []
    given = labels.map or {}
    bad = [word for word, label in given.items() if label == 0 and word in BAD_WORDS]
    good = [word for word, label in given.items() if label == 1 and word in GOOD_WORDS]
    right = any(word in (BAD_WORDS if label else GOOD_WORDS) for word, label in given.items() if label is not None)
    if not bad or not good or right or (ANSWER.fullmatch(bad[0]) and not BAD_COLUMN.search(column)):
        return []
    told |= {"bad": bad[0], "good": good[0], "column": column}
    fields = ("events.labels.map", "events.labels.label", "events.labels.event", "events.labels")
    return [Finding("map_reversed", "warning", 1.0, fields, told)]
