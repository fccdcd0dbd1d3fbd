"""Checks of the tables of patients: each trouble is named without a model, and nothing of sound tables."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.doctor.missed import OF_MORE_TABLES, longer_for_the_ill
from tests.doctor.troubles import OF_TABLES, Row, Trouble, is_ill, with_discharge_status, with_hospice, with_tables
from unpad.doctor.data.columns import check_columns
from unpad.doctor.data.histories import check_histories
from unpad.doctor.subject import TimeBudget, open_subject
from unpad.terminal.finding import Finding


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))


def found_in(recipe: Path) -> list[Finding]:
    return check_histories(open_subject(str(recipe), (), TimeBudget(600.0, time.monotonic)))


@pytest.mark.promise("doctor.patients")
@pytest.mark.parametrize("trouble", [*OF_TABLES, *OF_MORE_TABLES], ids=lambda trouble: trouble.name)
def test_a_trouble_of_tables_is_the_only_finding(trouble: Trouble, tmp_path: Path) -> None:
    assert [one.code for one in found_in(trouble.recipe(tmp_path, **trouble.sections))] == [trouble.code]


def weaker(rows: list[Row]) -> list[Row]:
    """Values of the ill are higher by one standard deviation, not by three."""
    return [{**row, "value": row["value"] - 2 * is_ill(row)} for row in rows]


def some_ill_have_it(rows: list[Row]) -> list[Row]:
    """Most of the ill have a code that no other has."""
    ill = sorted({row["id"] for row in rows if is_ill(row)})
    return rows + [{"id": one, "days": -1, "test": "morphine", "value": None} for one in ill if one % 8]


def many_have_it(rows: list[Row]) -> list[Row]:
    """A code is three times as common among the ill: a finding of medicine, not of the doctor."""
    everyone = sorted({row["id"] for row in rows})
    having = [one for one in everyone if (one % 9 if one % 3 == 0 else one % 5 == 0)]
    return rows + [{"id": one, "days": -1, "test": "ward", "value": None} for one in having]


def with_placeholder(rows: list[Row]) -> list[Row]:
    """One value is what a program writes where there is none."""
    first = next(i for i, row in enumerate(rows) if row["test"] == "a")
    return [{**row, "value": 99_999.0} if i == first else row for i, row in enumerate(rows)]


def skewed(rows: list[Row]) -> list[Row]:
    """Values spread over five powers of ten, as those of some enzymes do."""
    return [{**row, "value": float(np.exp(2 * row["value"]))} for row in rows]


def at_one_visit(rows: list[Row]) -> list[Row]:
    """All tests of a patient are of one day, and each is there once."""
    first = {(row["id"], f"{row['test']}{i % 3}"): row for i, row in enumerate(rows)}
    return [{**row, "test": test, "days": -30} for (_, test), row in first.items()]


@pytest.mark.promise("doctor.patients")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (at_one_visit, []),
        (some_ill_have_it, [("leaking_code", "warning")]),
        (many_have_it, []),
        (with_placeholder, [("far_values", "warning")]),
        (skewed, []),
        (lambda rows: rows, []),
    ],
)
def test_codes_and_values_are_told_from_their_limits(
    change: Callable[[list[Row]], list[Row]], expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    found = found_in(with_tables(lambda rows: change(weaker(rows)))(tmp_path))
    assert [(one.code, one.severity) for one in found] == expected, found


@pytest.mark.promise("doctor.patients")
@pytest.mark.parametrize(
    ("tests", "people", "expected"),
    [
        (with_hospice, None, "leaking_code"),
        (None, with_discharge_status, "leaking_value"),
        (longer_for_the_ill, None, "leaking_course"),
    ],
)
def test_what_gives_away_one_of_several_classes_is_found(
    tests: Callable[[list[Row]], list[Row]] | None,
    people: Callable[[list[Row]], list[Row]] | None,
    expected: str,
    tmp_path: Path,
) -> None:
    def of_classes(rows: list[Row]) -> list[Row]:
        return [{**row, "status": "died" if is_ill(row) else ("home", "moved")[row["id"] % 2]} for row in rows]

    def changed(rows: list[Row]) -> list[Row]:
        return of_classes(people(rows) if people is not None else rows)

    labels = {"path": "people.parquet", "label": "status", "classes": ["home", "moved", "died"]}
    events = [
        {"path": "tests.parquet", "time": "days", "code": "test"},
        {"path": "people.parquet", "static": ["age", *(["discharge"] if people else [])]},
    ]
    recipe = with_tables(tests, changed)(tmp_path, events={"labels": labels}, data={"events": events})
    subject: Any = open_subject(str(recipe), (), TimeBudget(600.0, time.monotonic))
    [found] = [one for one in [*check_histories(subject), *check_columns(subject)] if one.code == expected]
    assert found.values.get("target", "died") == "died"
