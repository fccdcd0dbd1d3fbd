"""A run under examination: its files, its weights, and that nothing of it changes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.doctor.examining import codes, examined
from tests.helpers.families import text
from tests.helpers.toy import run
from unpad.doctor.finding import Finding
from unpad.doctor.images import gap, never_predicted
from unpad.doctor.settings import overfit, run_flat
from unpad.evaluation.classes import ClassPredictions
from unpad.recipes.recipe import stages_of
from unpad.run.folder import run_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("doctor")
    run(text(root), root / "run")
    return root / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.promise("doctor.writes-nothing")
def test_a_run_is_examined_and_left_as_it_is(trained):
    before = contents(trained)
    found = examined(trained)
    assert codes(found) == []
    assert found.subject.step > 0
    assert not torch.equal(next(found.subject.model.parameters()), next(found.subject.setup.model.parameters()))
    assert contents(trained) == before


def spoilt(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row of the metrics of a run that went wrong."""
    if row["kind"] == "train" and kind == "nan" and row["step"] == 20:
        return {**row, "loss": "nan"}
    if row["kind"] == "train" and kind == "run_flat":
        return {**row, "loss": 5.0}
    if row["kind"] == "eval" and kind == "overfit":
        return {**row, "loss": 2.0 + (row["step"] > 60)}
    return row


@pytest.mark.promise("doctor.writes-nothing")
@pytest.mark.parametrize(("kind", "code"), [("nan", "run_flat"), ("run_flat", "run_flat"), ("overfit", "overfit")])
def test_a_course_that_went_wrong_is_named(trained, kind, code):
    setup: Any = SimpleNamespace(stages=stages_of(run_recipe(trained)))
    subject: Any = SimpleNamespace(setup=setup)
    logged = [json.loads(line) for line in (trained / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def found(rows: list[dict[str, Any]]) -> list[Finding]:
        return [*run_flat("train", [row for row in rows if row["kind"] == "train"]), *overfit(subject, rows)]

    assert [one.code for one in found([spoilt(kind, row) for row in logged])] == [code]
    assert [one.code for one in found(logged) if one.severity != "note"] == []
    flat = [spoilt("run_flat", row) for row in logged if row["kind"] == "train"]
    assert run_flat("train", flat)
    assert not run_flat("train", flat, regressed=True)


def predictions(right: float, num: int, lost: int | None = None) -> ClassPredictions:
    """Of three classes in turn, a share of them right, the class `lost` taken for the next one."""
    labels = np.arange(num) % 3
    chosen = np.where(np.arange(num) < right * num, labels, (labels + 1) % 3)
    if lost is not None:
        chosen[chosen == lost] = (lost + 1) % 3
    return ClassPredictions(np.log(np.eye(3)[chosen] + 1e-3), labels)


def test_a_class_that_a_run_never_predicts_and_what_it_knows_by_heart_are_named():
    classes, good = ("a", "b", "c"), predictions(0.9, 60)
    (lost,) = never_predicted(predictions(0.9, 60, lost=1), classes)
    assert lost.sentences("en")[0] == "The class 'b' is never predicted, though 20 of 60 held-out pictures are of it."
    assert "'c'" in lost.sentences("en")[1]
    assert never_predicted(good, classes) == never_predicted(predictions(1.0, 12, lost=1), classes) == []
    (by_heart,) = gap(good, predictions(0.5, 60))
    assert "90% of the pictures that it trained on and in 50% of the held-out ones" in by_heart.sentences("en")[0]
    assert gap(good, predictions(0.8, 60)) == gap(good, predictions(0.5, 6)) == []
