"""Report section of image classification."""

from __future__ import annotations

from typing import Any

import numpy as np

from unpad.run.report.svg import Curve, matrix, plot


def _images(found: dict[str, Any]) -> str:
    bins = found["calibration"]
    confidence = 100 * np.array([b["confidence"] for b in bins])
    accuracy = 100 * np.array([b["accuracy"] for b in bins])
    even = np.array([0.0, 100.0])
    lines = [
        Curve("raw", [(even, even)], "as sure as right"),
        Curve("main", [(confidence, accuracy)], "measured", dots=True),
    ]
    figures = [
        matrix("Confusion", found["classes"], np.array(found["confusion"]), "rows: the true class, held-out images"),
        plot("Calibration", lines, zero=True, unit="accuracy, % by confidence, %", over="confidence"),
    ]
    return f"<h2>Held-out images</h2><div class=plots>{''.join(figures)}</div>"
