"""Columns of patients' tables that are not what they seem, and reversed outcomes, are named without a model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.missed import OF_COLUMNS
from tests.doctor.troubles import Recipe, Row, Trouble, with_tables
from tests.helpers.families import patients
from unpad.doctor.data.columns import check_columns
from unpad.doctor.data.histories import check_histories
from unpad.doctor.data.sides import check_codes
from unpad.doctor.data.values import check_values
from unpad.doctor.subject import TimeBudget, open_subject


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))


def found_in(recipe: Path) -> list[str]:
    subject: Any = open_subject(str(recipe), (), TimeBudget(600.0, time.monotonic))
    found = [*check_histories(subject), *check_columns(subject), *check_values(subject)]
    return [one.code for one in found if one.severity != "note"]


@pytest.mark.parametrize("trouble", OF_COLUMNS, ids=lambda trouble: trouble.name)
def test_a_trouble_of_columns_is_found(trouble: Trouble, tmp_path: Path) -> None:
    assert trouble.code in found_in(trouble.recipe(tmp_path, **trouble.sections))


def test_sound_tables_have_no_finding(tmp_path: Path) -> None:
    assert found_in(patients(tmp_path)) == []


def of_success(rows: list[Row]) -> list[Row]:
    """A column of success, in which the outcome to be predicted is a no."""
    return [{**row, "completed": "no" if row["status"] else "yes"} for row in rows]


def on_one_day(rows: list[Row]) -> list[Row]:
    """All tests are of the first visit."""
    return [{**row, "days": 0} for row in rows]


def as_row_numbers(rows: list[Row]) -> list[Row]:
    """The value of a test is the number of its row."""
    return [{**row, "value": i} for i, row in enumerate(rows)]


def spelt(rows: list[Row]) -> list[Row]:
    return [{**row, "test": f"{'Test' if i % 2 else 'test'} {row['test']}"} for i, row in enumerate(rows)]


def with_signs(rows: list[Row]) -> list[Row]:
    """Results whose names differ in a sign alone."""
    return [{**row, "test": f"test {row['test']}{'+-'[i % 2]}"} for i, row in enumerate(rows)]


def test_numbers_of_rows_and_spellings_of_codes_are_told(tmp_path: Path) -> None:
    assert "row_value" in found_in(with_tables(as_row_numbers)(tmp_path / "rows"))
    for name, change, expected in (("spelt", spelt, True), ("signs", with_signs, False)):
        subject = open_subject(str(with_tables(change)(tmp_path / name)), (), TimeBudget(600.0, time.monotonic))
        assert bool(check_codes(subject)) is expected, name


COMPLETED = {"path": "people.parquet", "label": "completed", "map": {"yes": 0, "no": 1}}
STATUS = {"path": "people.parquet", "label": "status"}
SOUND = [
    (with_tables(people=of_success), {"events": {"labels": COMPLETED}}),
    (with_tables(on_one_day), {"events": {"landmark": 30, "labels": STATUS}}),
]


@pytest.mark.parametrize(("recipe", "sections"), SOUND, ids=["success", "one visit"])
def test_outcomes_of_success_and_tables_of_one_visit_are_sound(
    recipe: Recipe, sections: dict[str, Any], tmp_path: Path
) -> None:
    found = found_in(recipe(tmp_path, **sections))
    assert not {"map_reversed", "far_landmark"} & set(found)
