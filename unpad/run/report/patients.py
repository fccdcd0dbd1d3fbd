"""Report section of patients: calibration and curves, or the confusion of classes, and a few patients over time."""

from collections import Counter
from html import escape
from typing import Any

import numpy as np

from unpad.run.report.history import Array
from unpad.run.report.section import FamilySection, PageSection, Performance
from unpad.run.report.svg import WIDE, Axes, Curve, drawn, framed, matrix, plot, tick_labels, ticks

WIDTH, RIGHT = 1060, 1042
CHART, ROW = 110, 20  # height of the probability's chart, and of the row of one code
MAX_CODES = 14  # codes of one patient; the caption counts the rest
MAX_LETTERS = 24
LEGEND = (
    ("main", "probability"),
    ("weight", "attention"),
    ("high", "above its mean"),
    ("low", "below"),
    ("bare", "no value"),
)
STYLE = """
.courses{display:grid;gap:14px;grid-template-columns:minmax(0,1fr)}
@media(max-width:760px){figure.course{overflow-x:auto}figure.course svg{min-width:720px}}
figure.course text.end{dominant-baseline:middle}
circle.high{fill:var(--main);stroke:var(--main)}
circle.low{fill:var(--held);stroke:var(--held)}
circle.bare{fill:var(--card);stroke:var(--soft);stroke-width:1.4}
path.weight{stroke:var(--held);stroke-width:4;opacity:.45}
i.low{color:var(--held)}
i.high{color:var(--main)}
i.weight{color:var(--held);opacity:.45}
i.bare{color:var(--soft)}
"""


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
    over_time = [PageSection("Held-out patients over time", chosen, patients, "courses")] if patients else []
    return [PageSection("Held-out patients", counts, figures), *over_time]


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


def course(title: str, patient: dict[str, Any]) -> str:
    """Draw one patient over time: the probability after every set, the weight of every set, and every event.

    Args:
        patient: a course of `evaluation/patients.py`.
    """
    days = _places(patient["days"])
    codes = [code for code, _ in Counter(code for _, code, _ in patient["events"]).most_common()]
    rows = {code: place for place, code in enumerate(codes[:MAX_CODES])}
    names = [code if len(code) <= MAX_LETTERS else code[: MAX_LETTERS - 1] + "…" for code in rows]
    left = max(52, 20 + 7 * max(map(len, names), default=0))
    top, below = 10, 10 + CHART + 18
    height = below + ROW * len(rows) + 30
    marks = ticks(min(days.min(), -1.0), max(days.max(), 0.0), 8)
    low, high = marks[0], marks[-1]
    levels = ticks(0.0, max([*patient["probability"], 0.01]), 3)  # all are small for a rare outcome

    def across(day: float) -> float:
        return left + (day - low) / (high - low) * (RIGHT - left)

    body = _frame(marks, levels, across, left, top, below, names)
    body += _probability(patient, days, levels[-1], across, top)
    body += _dots(patient, days, rows, across, below)
    rarer = len(codes) - len(rows)
    more = f" · not shown: {rarer} rarer code{'s' if rarer > 1 else ''}" if rarer else ""
    if "class" in patient:
        unit = f"{patient['p']:.1%} for {patient['class']} in the end, which it was{more}"
    else:
        outcome = "the outcome came" if patient["outcome"] else "the outcome did not come"
        unit = f"{patient['p']:.1%} in the end; {outcome}{more}"
    return framed(title, unit, drawn(title, body, (WIDTH, height)), LEGEND, "course")


def _places(days: list[float | None]) -> Array:
    """Day at which each set is drawn, (num_sets,); facts without a time share the day of the first timed set."""
    first = next((day for day in days if day is not None), 0.0)
    return np.array([first if day is None else day for day in days])


def _when(day: float | None) -> str:
    return "facts" if day is None else f"day {day:,.3g}" if abs(day) < 100 else f"day {day:,.0f}"


def _frame(
    marks: list[float], levels: list[float], across: Any, left: int, top: int, below: int, names: list[str]
) -> str:
    """Axes, the names of the codes and the days under them."""
    body = ""
    for level in levels:
        y = top + CHART * (1 - level / levels[-1])
        body += f'<path class=grid d="M{left} {y:.1f}H{RIGHT}"/>'
        body += f"<text class=end x={left - 8} y={y:.1f}>{100 * level:.3g}%</text>"
    for place, name in enumerate(names):
        y = below + ROW * (place + 0.5)
        body += f'<path class=grid d="M{left} {y:.1f}H{RIGHT}"/>'
        body += f"<text class=end x={left - 8} y={y:.1f}>{escape(name)}</text>"
    bottom = below + ROW * len(names)
    for mark, label in zip(marks, tick_labels(marks), strict=True):
        body += f'<path class=grid d="M{across(mark):.1f} {top}V{bottom}"/>'
        body += f"<text class=mid x={across(mark):.1f} y={bottom + 18}>{label}</text>"
    return body + f"<text class=end x={left - 30} y={bottom + 14}>day</text>"


def _probability(patient: dict[str, Any], places: Array, highest: float, across: Any, top: int) -> str:
    """A step after every set, and the final weight of each set, the largest over the whole height."""
    values, weights = patient["probability"], patient["attention"]
    heaviest = max([*weights, 1e-12])
    body, path = "", ""
    for day, place, value, weight in zip(patient["days"], places, values, weights, strict=True):
        x, y = across(place), top + CHART * (1 - value / highest)
        body += f'<path class=weight d="M{x:.1f} {top + CHART}V{top + CHART * (1 - weight / heaviest):.1f}">'
        body += f"<title>{_when(day)}: attention {weight:.1%}, probability {value:.1%}</title></path>"
        path += f"H{x:.1f}V{y:.1f}" if path else f"M{x:.1f} {y:.1f}"
    return body + f'<path class=main d="{path}H{across(max(places[-1], 0.0)):.1f}"/>'


def _dots(patient: dict[str, Any], places: Array, rows: dict[str, int], across: Any, below: int) -> str:
    """Every event on the row of its code, with stronger colour for values further from the mean."""
    body = ""
    for at, code, value in patient["events"]:
        if code not in rows:
            continue
        x, y = across(places[at]), below + ROW * (rows[code] + 0.5)
        css = "bare" if value is None else "high" if value > 0 else "low"
        strength = 1.0 if value is None else min(1.0, 0.15 + abs(value) / 2)
        words = "no value" if value is None else f"{value:+.2f} standard deviations"
        body += f'<circle class={css} cx={x:.1f} cy={y:.1f} r=4 fill-opacity="{strength:.2f}">'
        body += f"<title>{escape(code)}, {_when(patient['days'][at])}: {words}</title></circle>"
    return body


SECTION = FamilySection(
    section,
    STYLE,
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
