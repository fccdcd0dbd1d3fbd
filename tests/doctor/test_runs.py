"""A run under examination: its files, its weights, and that nothing of it changes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.doctor.examining import codes, examined
from tests.helpers.families import text
from tests.helpers.toy import run
from unpad.doctor.files import check_files
from unpad.doctor.recipe.course import check_origin
from unpad.doctor.subject import TimeBudget, open_subject
from unpad.errors import RunFileError
from unpad.recipes.recipe import stages_of
from unpad.run.folder import run_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("doctor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNPAD_CACHE", str(root / "cache"))
        run(text(root), root / "run")
    return root / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.promise("doctor.writes-nothing")
def test_a_run_is_examined_and_left_as_it_is(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(trained.parent / "cache"))
    before = contents(trained)
    found = examined(trained)
    assert codes(found) == []
    assert found.subject.step > 0
    assert not torch.equal(next(found.subject.model.parameters()), next(found.subject.setup.model.parameters()))
    assert contents(trained) == before


def spoilt(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row of the metrics of a run that went wrong."""
    if row["kind"] == "train":
        if kind == "run_nan" and row["step"] == 20:
            return {**row, "grad_norm": "nan"}
        if kind == "run_flat":
            return {**row, "loss": 5.0}
        if kind == "run_spikes" and row["step"] in (60, 75, 90):
            return {**row, "loss": 40.0}
        if kind == "chosen_unlearned":
            return {**row, "values": {"rejected": 9.0, "cross_entropy": 1.0 + row["step"] / 20}}
    if row["kind"] == "eval" and kind == "overfit":
        return {**row, "loss": 2.0 + (row["step"] > 60)}
    return row


@pytest.mark.promise("doctor.writes-nothing")
@pytest.mark.parametrize("kind", ["run_nan", "run_flat", "run_spikes", "overfit", "chosen_unlearned"])
def test_a_course_that_went_wrong_is_named(trained: Path, tmp_path: Path, kind: str) -> None:
    lines = (trained / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [spoilt(kind, json.loads(line)) for line in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    setup: Any = SimpleNamespace(stages=stages_of(run_recipe(trained)))
    subject: Any = SimpleNamespace(folder=tmp_path, setup=setup)
    assert [one.code for one in check_files(subject)] == [kind]
    subject.folder = trained
    assert [one.code for one in check_files(subject) if one.severity != "note"] == []


def test_what_differs_from_the_run_to_start_from_is_named(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    recipe = text(tmp_path / "data", train={"init_from": str(trained), "max_epochs": 2})

    def found(*overrides: str) -> list[str]:
        subject = open_subject(str(recipe), overrides, TimeBudget(600.0, time.monotonic))
        return [one.code for one in check_origin(subject)]

    assert found() == []
    assert found("data.template.user=Q", "optim.lr=0.5") == ["other_template", "faster_than_origin"]


def test_metrics_that_are_damaged_are_named_and_absent_ones_are_not(tmp_path: Path) -> None:
    subject: Any = SimpleNamespace(folder=tmp_path)
    assert check_files(subject) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, bro\n', encoding="utf-8")
    with pytest.raises(RunFileError, match="this line is damaged") as caught:
        check_files(subject)
    assert (caught.value.where, caught.value.exit_code) == (f"{tmp_path}/metrics.jsonl:1", 4)
