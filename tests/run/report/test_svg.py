"""Figures place what they are given: positions are read back from the drawing and compared with the numbers."""

import re
from itertools import product

import numpy as np
import pytest

from tests.helpers.run_folders import html_of
from unpad.run.report.images import section
from unpad.run.report.svg import Axes, Bar, Bars, Curve, bars_picture, matrix, plot

X, Y = np.array([0.0, 25.0, 100.0]), np.array([4.0, 0.0, 10.0])


def grid_marks(drawn: str) -> dict[str, float]:
    """Height of every mark of the vertical axis, by its label."""
    lines = re.findall(r'class=grid d="M([\d.]+) ([\d.]+)H([\d.]+)"', drawn)
    labels = re.findall(r"<text class=end x=[\d.]+ y=([\d.]+)>([^<]*)</text>", drawn)[: len(lines)]
    assert [float(y) for y, _ in labels] == pytest.approx([float(at) + 4 for _, at, _ in lines])
    return {label: float(at) for (_, at, _), (_, label) in zip(lines, labels, strict=True)}


@pytest.mark.parametrize("size", [(520, 220), (520, 251), (1060, 340)])
def test_points_and_marks_lie_at_the_heights_of_their_values(size):
    figure = plot("Loss", [Curve("main", [(X, Y)], dots=True)], Axes("nats", size, zero=True))
    [drawn] = figure.split("<svg")[1:]
    left, right, top, bottom = 52, size[0] - 18, 10, size[1] - 26
    assert f'viewBox="0 0 {size[0]} {size[1]}"' in drawn
    marks = grid_marks(drawn)
    assert list(marks) == ["0", "2", "4", "6", "8", "10"]
    for label, at in marks.items():
        assert at == pytest.approx(bottom - float(label) / 10 * (bottom - top), abs=0.06)
    dots = re.findall(r'<circle class="main" cx=([\d.]+) cy=([\d.]+) r=[\d.]+><title>([^<]*)</title>', drawn)
    expected = [(left + x / 100 * (right - left), bottom - y / 10 * (bottom - top)) for x, y in zip(X, Y, strict=True)]
    assert [(float(x), float(y)) for x, y, _ in dots] == [pytest.approx(place, abs=0.06) for place in expected]
    assert [title for _, _, title in dots] == ["step 0: 4", "step 25: 0", "step 100: 10"]
    [path] = re.findall(r'<path class="main" d="([^"]*)"', drawn)
    assert path == "M" + "L".join(f"{x} {y}" for x, y, _ in dots)
    steps = re.findall(r"<text class=mid x=([\d.]+) y=([\d.]+)>(\d+)</text>", drawn)
    assert len(steps) >= 3
    for x, y, step in steps:
        assert float(x) == pytest.approx(left + int(step) / 100 * (right - left), abs=0.06)
        assert float(y) == bottom + 18


@pytest.mark.parametrize(("highest", "height", "step"), [(7, 250, 2), (7, 251, 1), (8, 251, 2)])
def test_a_higher_figure_may_have_more_marks(highest, height, step):
    drawn = plot("x", [Curve("main", [(X, highest / 10 * Y)])], Axes("", (520, height), zero=True))
    assert list(grid_marks(drawn)) == [str(mark) for mark in range(0, highest + step, step)]


def test_a_logarithmic_axis_has_equal_powers_at_equal_distances():
    drawn = plot("KL", [Curve("main", [(X, np.array([0.01, 1.0, 100.0]))], dots=True)], Axes(log=True))
    marks = grid_marks(drawn)
    assert list(marks) == ["0.01", "0.1", "1", "10", "100"]
    assert list(marks.values()) == pytest.approx([194 - 46 * power for power in range(5)], abs=0.06)
    heights = re.findall(r"<circle[^>]* cy=([\d.]+)", drawn)
    assert [float(y) for y in heights] == [marks[label] for label in ("0.01", "1", "100")]


def test_a_level_is_drawn_where_it_is_and_only_inside_the_axis():
    for limit, shown in ((5.0, True), (0.0, False), (10.0, False), (11.0, False)):
        drawn = plot("Norm", [Curve("main", [(X, Y)])], Axes(zero=True), limit=limit)
        assert ("warning level" in drawn) == shown
        if shown:
            assert '<path class=limit d="M52 102.0H502"/>' in drawn


def test_stages_begin_at_their_steps_and_wide_figures_name_them():
    stages = [("first", 1.0), ("<second>", 50.0)]
    for size, named in (((520, 220), False), ((1060, 340), True)):
        drawn = plot("Loss", [Curve("main", [(X, Y)])], Axes(size=size), stages=stages).split("<svg")[1]
        x = 52 + 0.5 * (size[0] - 18 - 52)
        assert re.findall(r'class=stage d="M([\d.]+) ', drawn) == [f"{x:.1f}"]
        assert re.findall(r"class=name[^>]*>([^<]*)<", drawn) == (["first", "&lt;second&gt;"] if named else [])


def test_a_confusion_matrix_has_every_count_in_its_row_and_column():
    names, counts = ["cat", "dog", "<bird>"], np.array([[8, 2, 0], [1, 0, 3], [0, 0, 0]])
    drawn = matrix("Confusion", names, counts, "held out")
    cells = re.findall(
        r'<rect class="(\w+)" x=([\d.]+) y=([\d.]+) width=(\d+) height=(\d+) fill-opacity="([\d.]+)"><title>([^<]*)<',
        drawn,
    )
    assert len(cells) == 9
    width, height = (int(one) for one in re.findall(r'viewBox="0 0 (\d+) (\d+)"', drawn)[0])
    step = float(cells[1][1]) - float(cells[0][1])
    escaped = ["cat", "dog", "&lt;bird&gt;"]
    for (row, column), (css, x, y, *sides, opacity, title) in zip(product(range(3), range(3)), cells, strict=True):
        assert css == ("hit" if row == column else "miss")
        assert (float(x), float(y)) == (float(cells[0][1]) + column * step, 24 + row * step)
        assert all(0 < float(side) <= step for side in sides)
        assert float(x) + step <= width
        assert float(y) + step <= height
        assert float(opacity) == pytest.approx(counts[row, column] / max(counts[row].sum(), 1), abs=0.001)
        assert title == f"{escaped[row]} taken for {escaped[column]}: {counts[row, column]}"
    numbers = re.findall(r'<text class="mid( on)?" x=([\d.]+) y=([\d.]+)>(\d+)</text>', drawn)
    assert [(number, bool(on)) for on, _, _, number in numbers] == [
        ("8", True), ("2", False), ("1", False), ("3", True),
    ]  # fmt: skip
    middles = [
        (float(cells[0][1]) + (c + 0.5) * step, 24 + (r + 0.5) * step) for r, c in ((0, 0), (0, 1), (1, 0), (1, 2))
    ]
    assert [(float(x), float(y)) for _, x, y, _ in numbers] == [pytest.approx(at, abs=4) for at in middles]
    rows = re.findall(r"<text class=end x=[\d.]+ y=([\d.]+)>([^<]*)</text>", drawn)
    assert [name for _, name in rows] == escaped
    assert [float(y) for y, _ in rows] == [pytest.approx(24 + (row + 0.5) * step, abs=4.1) for row in range(3)]


def test_the_page_of_images_has_confusion_and_calibration_in_percent():
    bins = [{"confidence": 0.5, "accuracy": 0.25}, {"confidence": 0.9, "accuracy": 1.0}]
    drawn = html_of(section, {"calibration": bins, "classes": ["a", "b"], "confusion": [[3, 1], [0, 2]]})
    assert drawn.count("<svg") == 2
    assert drawn.count('<rect class="') == 4
    figure = drawn.split("<b>Calibration</b>")[1]
    assert re.findall(r'<i class="(\w+)"></i>([^<]*)<', figure) == [("raw", "as sure as right"), ("main", "measured")]
    assert re.findall(r"<title>([^<]*)</title>", figure) == ["confidence 50: 25", "confidence 90: 100"]
    [even] = re.findall(r'<path class="raw" d="([^"]*)"', figure)
    assert even == "M52.0 194.0L502.0 10.0"


def test_bars_stand_on_the_axis_at_their_places_and_are_as_high_as_their_numbers():
    bars = [Bar(0, 2, 10, note="a<b"), Bar(2, 2, 20, "miss"), Bar(4, 2, 0)]
    drawn = bars_picture([Bars("Other", "", []), Bars("Some", "of these", bars, over="words")], (400, 300))
    assert 'width="800" height="330"' in drawn
    other, some = drawn.split("<g transform=")[1:]
    assert "translate(400 0)" in some
    assert "<rect" not in other
    found = re.findall(r'class="(hit|miss)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', some)
    left, right, top, bottom = 52, 400 - 18, 34, 300 - 44
    assert [css for css, *_ in found] == ["hit", "miss", "hit"]
    for (_, *sides), bar in zip(found, bars, strict=True):  # the axis ends at 25, above the notes
        x, y, width, height = map(float, sides)
        assert x == pytest.approx(left + bar.left / 6 * (right - left), abs=0.06)
        assert width == pytest.approx((right - left) / 3, abs=0.06)
        assert y + height == pytest.approx(bottom, abs=0.11)
        assert height == pytest.approx(bar.height / 25 * (bottom - top), abs=0.06)
    assert "a&lt;b" in some
    assert ">25<" in some


def test_bars_of_few_sequences_have_marks_of_whole_numbers():
    drawn = bars_picture([Bars("Few", "", [Bar(0, 1, 1)])])
    assert re.findall(r'class="end" x="44" [^>]*>([^<]*)<', drawn) == ["0", "1", "2", "3", "4", "5"]
