"""Columns of patients' tables that are not what they seem, and reversed outcomes, are named without a model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.missed import OF_COLUMNS
from tests.doctor.troubles import Trouble
from tests.helpers.families import patients
from unpad.doctor.data.columns import check_columns
from unpad.doctor.data.histories import check_histories
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
