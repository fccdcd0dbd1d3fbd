"""Report section of patients: calibration and curves, or the confusion of classes."""

from typing import Any

import numpy as np

from unpad.run.report.section import FamilySection, PageSection, Performance
from unpad.run.report.svg import WIDE, Axes, Curve, matrix, plot


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
    return [PageSection("Held-out patients", counts, figures)]


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
    return plot("Calibration", lines, Axes(unit, WIDE, zero=True, over="predicted", begin=even[0]))


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


SECTION = FamilySection(
    section,
    perplexity=False,
    title="Held-out patients",
    adds="calibration and curves",
    private=True,
    performance=(
        Performance("auroc", "AUROC", 0.5),
        Performance("average_precision", "Average precision", "prevalence"),
        Performance("concordance", "Concordance", 0.5),
    ),
    length_unit="events",
)
