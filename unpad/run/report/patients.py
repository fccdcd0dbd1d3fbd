"""Report section of patients: calibration and curves, or the confusion of classes, and a few patients over time."""

from typing import Any

import numpy as np

from unpad.run.report.section import FamilySection, PageSection, Performance, table
from unpad.run.report.svg import WIDE, Axes, Curve, matrix, plot

MAX_EVENTS = 12  # of a set that are named; the row counts the rest


def section(evaluation: dict[str, Any]) -> list[PageSection]:
    """Draw the evaluation on held-out patients.

    Args:
        evaluation: `evaluation.json`.
    """
    counts = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in evaluation["counts"].items())
    figures = []
    if "confusion" in evaluation:
        names, confusion = evaluation["classes"], np.array(evaluation["confusion"])
        figures.append(matrix("Confusion", names, confusion, "rows: the true class, columns: the likeliest"))
    if "calibration" in evaluation:
        figures.append(_calibration(evaluation["calibration"]))
    if "roc" in evaluation:
        figures += _curves(evaluation["roc"], evaluation["precision_recall"], evaluation["counts"])
    patients = [course(f"patient {place}", one) for place, one in enumerate(evaluation.get("courses", []), 1)]
    kind = "class, by its probability," if "classes" in evaluation else "outcome"
    chosen = f"of each {kind} the one of highest and the one of lowest probability; others lie between"
    over_time = [PageSection("Held-out patients over time", chosen)] if patients else []
    return [PageSection("Held-out patients", counts, figures), *over_time, *patients]


def _calibration(bins: list[dict[str, float]]) -> str:
    """Observed against predicted share of patients with the outcome, in bins of equally many patients."""
    columns = {name: 100 * np.array([b[name] for b in bins]) for name in ("predicted", "observed", "low", "high")}
    x = columns["predicted"]
    ranges = [(np.array([x[i], x[i]]), np.array([columns["low"][i], columns["high"][i]])) for i in range(len(x))]
    even = np.array([np.floor(x.min()), np.floor(x.max()) + 1])
    lines = [
        Curve("stage", [(even, even)], "as predicted"),
        Curve("raw", ranges, "95 %"),
        # Dots without a line: nothing was measured between bins.
        Curve("main", [(x[i : i + 1], columns["observed"][i : i + 1]) for i in range(len(x))], "observed"),
    ]
    unit = "patients with the outcome, % by predicted probability, %"
    axes = Axes(unit, WIDE, zero=True, over="predicted", begin=even[0])
    return plot("Calibration", lines, axes)


def _curves(roc: list[list[float]], precision_recall: list[list[float]], counts: dict[str, int]) -> list[str]:
    false, true = 100 * np.array(roc).T
    recall, precision = 100 * np.array(precision_recall).T
    whole = np.array([0.0, 100.0])
    share = 100 * counts["with_outcome"] / (counts["with_outcome"] + counts["without_outcome"])
    chance = [Curve("stage", [(whole, whole)], "chance"), Curve("stage", [(whole, np.full(2, share))], "chance")]
    by_alarms = Axes("sensitivity, % by false alarms, %", (520, 360), zero=True, over="false alarms")
    by_recall = Axes("precision, % by recall, %", (520, 360), zero=True, over="recall")
    return [
        plot("Receiver operating characteristic", [chance[0], Curve("main", [(false, true)], "model")], by_alarms),
        plot("Precision and recall", [chance[1], Curve("main", [(recall, precision)], "model")], by_recall),
    ]


def course(title: str, patient: dict[str, Any]) -> PageSection:
    """One patient over time: the probability after every set, the attention to it, and its events.

    Args:
        patient: a course of `evaluation/patients.py`.
    """
    days, shares = patient["days"], (patient["probability"], patient["attention"])
    first = next((day for day in days if day is not None), 0.0)  # facts without a time share the first day
    places = np.array([first if day is None else day for day in days])
    lines = [
        Curve(css, [(places, 100 * np.array(values))], name, dots=True)
        for css, name, values in zip(("main", "held"), ("probability", "attention"), shares, strict=True)
    ]
    figure = plot(title, lines, Axes("% after every set", WIDE, zero=True, over="day", begin=float(places.min())))
    events = [
        [_told(code, value) for at, code, value in patient["events"] if at == place] for place in range(len(days))
    ]
    rows = [
        [_when(day), *(f"{share:.1%}" for share in given), ", ".join(told[:MAX_EVENTS]) + _more(told)]
        for day, told, *given in zip(days, events, *shares, strict=True)
    ]
    if "class" in patient:
        note = f"{patient['p']:.1%} for {patient['class']} in the end, which it was"
    else:
        note = f"{patient['p']:.1%} in the end; the outcome {'came' if patient['outcome'] else 'did not come'}"
    heads = ("Day", "Probability", "Attention", "Events, values in standard deviations from their mean")
    return PageSection(title, note, [figure], table=table(heads, rows, (0, 3)), folded=True)


def _when(day: float | None) -> str:
    return "facts" if day is None else f"{day:,.3g}" if abs(day) < 100 else f"{day:,.0f}"


def _told(code: str, value: float | None) -> str:
    return code if value is None else f"{code} {value:+.2f}"


def _more(events: list[str]) -> str:
    return f" and {len(events) - MAX_EVENTS} more" if len(events) > MAX_EVENTS else ""


SECTION = FamilySection(
    section,
    perplexity=False,
    title="Held-out patients",
    adds="calibration, curves and the course of some patients",
    private=True,
    performance=(
        Performance("auroc", "AUROC", 0.5),
        Performance("average_precision", "Average precision", "prevalence"),
        Performance("concordance", "Concordance", 0.5),
    ),
    length_unit="events",
)
