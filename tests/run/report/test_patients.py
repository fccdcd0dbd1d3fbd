"""The pictures of held-out patients: nothing is drawn that was not measured, and names are text."""

import re

import pytest

from tests.helpers.run_folders import html_of
from unpad.run.report.patients import section

COUNTS = {"patients": 30, "with_outcome": 10, "without_outcome": 18, "of_unknown_outcome": 2}


def test_what_was_not_measured_is_not_drawn():
    page = html_of(section, {"family": "events", "counts": {"patients": 30}})
    assert "30 patients" in page
    assert "<svg" not in page
    bins = [{"predicted": 0.1, "observed": 0.2, "low": 0.05, "high": 0.5, "patients": 28}]
    page = html_of(section, {"family": "events", "counts": COUNTS, "calibration": bins})
    assert page.count("<svg") == 1
    assert "2 of unknown outcome" in page


def test_calibration_shows_the_range_of_the_probabilities_and_joins_no_bins():
    bins = [
        {"predicted": p / 100, "observed": p / 150, "low": 0.05, "high": 0.5, "patients": 9} for p in (33.1, 33.8, 35.2)
    ]
    page = html_of(section, {"family": "events", "counts": COUNTS, "calibration": bins})
    places = [float(x) for x in re.findall(r'<circle class="main" cx=([\d.]+)', page)]
    assert places == [pytest.approx(52 + 990 * (p - 33) / 3, abs=0.1) for p in (33.1, 33.8, 35.2)]
    assert '<path class="main"' not in page
    assert re.findall(r"class=mid[^>]*>(\d+)<", page) == ["33", "34", "35", "36"]


def test_curves_say_what_chance_would_do():
    curve = [[0.0, 0.0], [0.5, 0.9], [1.0, 1.0]]
    page = html_of(section, {"counts": COUNTS, "roc": curve, "precision_recall": curve})
    assert page.count("chance</span>") == 2


def test_chance_of_precision_is_the_share_of_patients_with_the_outcome():
    """A model as good as chance is drawn on the line of chance; patients of unknown outcome do not count."""
    share = COUNTS["with_outcome"] / (COUNTS["with_outcome"] + COUNTS["without_outcome"])
    curve = [[0.0, 0.0], [1.0, 1.0]]
    page = html_of(section, {"counts": COUNTS, "roc": curve, "precision_recall": [[0.0, share], [1.0, share]]})
    figure = page.split("<figure")[2]
    heights = [
        set(re.findall(r"[ML][\d.]+ ([\d.]+)", line)) for line in re.findall(r'<path class="\w+" d="([^"]*)"', figure)
    ]
    assert len(heights) == 2
    assert heights[0] == heights[1]
    assert len(heights[0]) == 1
