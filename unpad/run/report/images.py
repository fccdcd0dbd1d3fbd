"""Report section of image classification."""

from typing import Any

import numpy as np

from unpad.run.report.section import FamilySection, PageSection, Performance
from unpad.run.report.svg import Axes, Curve, matrix, plot


def section(evaluation: dict[str, Any]) -> list[PageSection]:
    """Draw the confusion matrix and the calibration.

    Args:
        evaluation: `evaluation.json`.
    """
    bins = evaluation["calibration"]
    confidence = 100 * np.array([b["confidence"] for b in bins])
    accuracy = 100 * np.array([b["accuracy"] for b in bins])
    even = np.array([0.0, 100.0])
    lines = [
        Curve("raw", [(even, even)], "as sure as right"),
        Curve("main", [(confidence, accuracy)], "measured", dots=True),
    ]
    names, confusion = evaluation["classes"], np.array(evaluation["confusion"])
    figures = [
        matrix("Confusion", names, confusion, "rows: the true class, held-out images"),
        plot("Calibration", lines, Axes("accuracy, % by confidence, %", zero=True, over="confidence")),
    ]
    return [PageSection("Held-out images", figures=figures)]


ACCURACY = Performance("accuracy", "Accuracy", "commonest_class", "always the commonest class", is_share=True)
SECTION = FamilySection(section, performance=(ACCURACY,), length_unit="patches")
