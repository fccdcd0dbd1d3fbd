"""Classes of pictures, answers about them, and codes and values of patients: troubles, and their sound neighbours."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.doctor.troubles import Recipe, is_ill, with_discharge_status, with_hospice, with_tables
from tests.doctor.troubles import Row as Fields
from tests.helpers.families import images, rewritten, write_rows
from unpad.doctor.examine import look
from unpad.doctor.subject import TimeBudget, open_subject


def codes(recipe: Path) -> list[str]:
    found = look(open_subject(str(recipe), (), TimeBudget(600.0, time.monotonic)))
    return [one.code for one in found if one.severity != "note"]


def labelled(change: Callable[[Fields, int], Fields], side: Callable[[str], int] = lambda label: 24) -> Recipe:
    """Noise of two classes, half of it brighter, whose rows are changed."""

    def written(folder: Path) -> Path:
        folder.mkdir(parents=True)
        draw, rows = np.random.default_rng(1), []
        for number in range(120):
            label = ("dark", "light")[number % 2]
            pixels = draw.integers(0, 100, (side(label), 24, 3)) + 60 * (number % 2)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"p{number}.png")
            rows.append(change({"image": f"p{number}.png", "label": label}, number))
        return rewritten(images(folder), {"data": {"images": write_rows(folder / "rows.jsonl", rows)}})

    return written


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (labelled(lambda row, i: row), []),
        (labelled(lambda row, i: row, lambda label: len(label) * 6), ["shortcut"]),
    ],
)
def test_classes_of_pictures(recipe, expected, tmp_path):
    assert [code for code in codes(recipe(tmp_path / "data")) if code != "same_rows"] == expected


def weaker(rows: list[Fields]) -> list[Fields]:
    """Values of the ill are higher by one standard deviation, not by three."""
    return [{**row, "value": row["value"] - 2 * is_ill(row)} for row in rows]


def some_ill_have_it(rows: list[Fields]) -> list[Fields]:
    """Most of the ill have a code that no other has."""
    ill = sorted({row["id"] for row in rows if is_ill(row)})
    return rows + [{"id": one, "days": -1, "test": "morphine", "value": None} for one in ill if one % 8]


def many_have_it(rows: list[Fields]) -> list[Fields]:
    """A code is three times as common among the ill: a finding of medicine, not of the doctor."""
    having = [one for one in sorted({row["id"] for row in rows}) if (one % 9 if one % 3 == 0 else one % 5 == 0)]
    return rows + [{"id": one, "days": -1, "test": "ward", "value": None} for one in having]


def with_placeholder(rows: list[Fields]) -> list[Fields]:
    """One value is what a program writes where there is none."""
    first = next(i for i, row in enumerate(rows) if row["test"] == "a")
    return [{**row, "value": 99_999.0} if i == first else row for i, row in enumerate(rows)]


def skewed(rows: list[Fields]) -> list[Fields]:
    """Values spread over five powers of ten, as those of some enzymes do."""
    return [{**row, "value": float(np.exp(2 * row["value"]))} for row in rows]


@pytest.mark.promise("doctor.patients")
@pytest.mark.parametrize(
    ("change", "expected"),
    [(some_ill_have_it, ["leak"]), (many_have_it, []), (with_placeholder, ["far_values"]), (skewed, []),
     (lambda rows: [{**row, "split": "test" if row["id"] % 2 else None} for row in rows], []), (lambda rows: rows, [])],
)  # fmt: skip
def test_codes_and_values_are_told_from_their_limits(change, expected, tmp_path):
    assert codes(with_tables(lambda rows: change(weaker(rows)))(tmp_path)) == expected


@pytest.mark.promise("doctor.patients")
@pytest.mark.parametrize(("tests", "people"), [(with_hospice, None), (None, with_discharge_status)])
def test_what_gives_away_one_of_several_classes_is_found(tests, people, tmp_path):
    def changed(rows: list[Fields]) -> list[Fields]:
        rows = people(rows) if people is not None else rows
        return [{**row, "status": "died" if is_ill(row) else ("home", "moved")[row["id"] % 2]} for row in rows]

    labels = {"path": "people.parquet", "label": "status", "classes": ["home", "moved", "died"]}
    events = [
        {"path": "tests.parquet", "time": "days", "code": "test"},
        {"path": "people.parquet", "static": ["age", *(["discharge"] if people else [])]},
    ]
    recipe = with_tables(tests, changed)(tmp_path, events={"labels": labels}, data={"events": events})
    found = look(open_subject(str(recipe), (), TimeBudget(600.0, time.monotonic)))
    assert [one.values["target"] for one in found if one.code == "leak"] == ["died"]
