"""The pictures of held-out patients: nothing is drawn that was not measured, and names are text."""

import re
from typing import Any

import pytest

from tests.helpers.run_folders import html_of
from unpad.run.report.patients import MAX_CODES, course, section

COUNTS = {"patients": 30, "with_outcome": 10, "without_outcome": 18, "of_unknown_outcome": 2}


def one_patient(**changes: Any) -> dict[str, Any]:
    patient: dict[str, Any] = {
        "days": [-400.0, -30.0, 0.0],
        "probability": [0.25, 0.5, 1.0],
        "attention": [0.1, 0.6, 0.2],
        "events": [[0, "<b>age</b>", 1.5], [1, "glucose", -0.2], [1, "glucose", None], [2, "stroke", None]],
        "outcome": True,
        "p": 0.987,
    }
    return patient | changes


def test_a_course_shows_every_event_and_a_step_per_set():
    drawn = course("patient 1", one_patient())
    assert drawn.count("<circle") == 4
    assert drawn.count("class=weight") == 3
    assert "98.7% in the end; the outcome came" in drawn
    assert "+1.50 standard deviations" in drawn
    assert "<b>age</b>" not in drawn
    assert "&lt;b&gt;age&lt;/b&gt;, day -400" in drawn
    (steps,) = re.findall(r'class=main d="([^"]*)"', drawn)
    heights = [float(y) for y in re.findall(r"(?:V|M[\d.]+ )([\d.]+)", steps)]
    assert heights == [pytest.approx(10 + 110 * (1 - p), abs=0.06) for p in (0.25, 0.5, 1.0)]


def test_small_probabilities_fill_the_height():
    drawn = course("p", one_patient(probability=[0.012, 0.02, 0.038]))
    assert ">4%</text>" in drawn
    assert ">100%" not in drawn


def test_days_stand_in_their_order_and_inside_the_picture():
    places = [float(x) for x in re.findall(r"<circle class=\w+ cx=([\d.]+)", course("p", one_patient()))]
    assert places == sorted(places)
    assert 52 <= places[0] < places[-1] <= 1042
    assert places[1] == places[2]


def test_a_moment_within_a_day_is_told_and_facts_have_none():
    events = [[0, "age", 1.0], [1, "glucose", 0.5], [2, "glucose", 0.5]]
    drawn = course("p", one_patient(days=[None, -0.25, -0.04167], events=events))
    titles = re.findall(r"<title>([^<]*)</title>", drawn)
    assert titles[0].startswith("facts: attention")
    assert titles[3:] == [
        "age, facts: +1.00 standard deviations",
        "glucose, day -0.25: +0.50 standard deviations",
        "glucose, day -0.0417: +0.50 standard deviations",
    ]
    places = [float(x) for x in re.findall(r"<circle class=\w+ cx=([\d.]+)", drawn)]
    assert places[0] == places[1] < places[2]
    assert "1,200" in course("p", one_patient(days=[-1200.0, -30.0, 0.0]))
    bare = course("p", one_patient(days=[None], probability=[0.1], attention=[0.0], events=[[0, "age", 0.0]]))
    assert "nan" not in bare


def test_one_moment_alone_can_be_drawn():
    drawn = course("p", one_patient(days=[0.0], probability=[0.1], attention=[0.0], events=[[0, "age", 0.0]]))
    assert "nan" not in drawn
    assert drawn.count("<circle") == 1


def test_rare_codes_beyond_the_rows_are_counted():
    drawn = course("p", one_patient(events=[[0, f"code {i}", None] for i in range(MAX_CODES + 3)]))
    assert drawn.count("<circle") == MAX_CODES
    assert "not shown: 3 rarer codes" in drawn


def test_what_was_not_measured_is_not_drawn():
    page = html_of(section, {"family": "events", "counts": {"patients": 30}})
    assert "30 patients" in page
    assert "<svg" not in page
    bins = [{"predicted": 0.1, "observed": 0.2, "low": 0.05, "high": 0.5, "patients": 28}]
    page = html_of(section, {"family": "events", "counts": COUNTS, "calibration": bins})
    assert page.count("<svg") == 2  # for wide and for narrow screens
    assert "2 of unknown outcome" in page


def test_calibration_shows_the_range_of_the_probabilities_and_joins_no_bins():
    bins = [
        {"predicted": p / 100, "observed": p / 150, "low": 0.05, "high": 0.5, "patients": 9} for p in (33.1, 33.8, 35.2)
    ]
    page = html_of(section, {"family": "events", "counts": COUNTS, "calibration": bins}).split('class="plot narrow"')[0]
    places = [float(x) for x in re.findall(r'<circle class="main" cx=([\d.]+)', page)]
    assert places == [pytest.approx(52 + 990 * (p - 33) / 3, abs=0.1) for p in (33.1, 33.8, 35.2)]
    assert '<path class="main"' not in page
    assert re.findall(r"class=mid[^>]*>(\d+)<", page) == ["33", "34", "35", "36"]


def test_curves_say_what_chance_would_do():
    curve = [[0.0, 0.0], [0.5, 0.9], [1.0, 1.0]]
    found = {"counts": COUNTS, "roc": curve, "precision_recall": curve, "courses": [one_patient()]}
    page = html_of(section, found)
    assert page.count("<svg") == 3
    assert page.count("chance</span>") == 2
    assert "patient 1" in page
    assert "highest and the one of lowest probability" in page


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


def test_the_heaviest_set_has_the_whole_height_and_a_value_of_the_mean_is_a_value():
    drawn = course(
        "p", one_patient(attention=[0.1, 0.4, 0.2], events=[[0, "age", 0.0], [1, "age", 0.3], [2, "age", None]])
    )
    tops = [float(y) for y in re.findall(r'class=weight d="M[\d.]+ 120V([\d.]+)', drawn)]
    assert tops == [pytest.approx(10 + 110 * (1 - weight), abs=0.06) for weight in (0.25, 1.0, 0.5)]
    assert re.findall(r"<circle class=(\w+)", drawn) == ["low", "high", "bare"]
    assert "+0.00 standard deviations" in drawn


def test_an_event_is_the_stronger_coloured_the_further_its_value_is_from_the_mean():
    given = {None: 1.0, 0.0: 0.15, 0.5: 0.4, -1.0: 0.65, 1.6: 0.95, 3.0: 1.0, -9.0: 1.0}
    drawn = course("p", one_patient(events=[[1, "age", value] for value in given]))
    assert [float(one) for one in re.findall(r'fill-opacity="([^"]*)"', drawn)] == list(given.values())
