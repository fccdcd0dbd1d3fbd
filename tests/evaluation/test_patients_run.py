"""A run of patients from its tables to measures, a report and vectors, through the commands."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.helpers.event_tables import FIRST_ID, draw_rows, put, put_meds
from tests.helpers.families import patients
from tests.helpers.patient_tables import FIRST, MODEL, PEOPLE, write_tables
from tests.helpers.toy import quiet
from tests.helpers.untrained_patients import Guess, draw
from unpad.batching.batch import RaggedBatch
from unpad.data.family import open_data
from unpad.data.measuring import Measuring
from unpad.data.patients import EventData
from unpad.errors import NOT_PROVED
from unpad.evaluation.patients import outcome_rows
from unpad.evaluation.sets import score_sets, summarise_sets
from unpad.inference.patients import predict
from unpad.models import model_config
from unpad.models.set_sequence.model import SetSequence
from unpad.recipes.recipe import Recipe
from unpad.recipes.training import PlanSettings
from unpad.training.loop import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps, beside the tables that it was trained on."""
    root = tmp_path_factory.mktemp("patients")
    short: dict[str, Any] = {
        "model": {"bins": [0, 90, 365]}, "losses": None, "optim": None, "plan": {"tokens_per_micro": 90},
        "train": {"max_steps": 6, "threads": 1},
    }  # fmt: skip
    train(str(patients(root, PEOPLE, **short)), root / "run", [], console=quiet())
    return root / "run"


def test_everything_it_trains_is_measured(unpad, run):
    metrics = json.loads(unpad("eval", run, "--json", code=0).out)
    for name in ("loss", "auroc", "average_precision", "brier", "accuracy", "concordance",
                 "reconstruction", "made_code", "next_set_auroc"):  # fmt: skip
        assert metrics[name]["low"] <= metrics[name]["value"] <= metrics[name]["high"], name
    assert metrics["calibration_error"]["reason"].startswith("perfect probabilities: ")
    shown = unpad("eval", run, "--replies", "2")
    assert shown.out.startswith("evaluated: ")
    told = shown.out + (run / "evaluation.json").read_text() + (run / "report.html").read_text()
    assert not [person for person in range(FIRST, FIRST + PEOPLE) if str(person) in told]


@pytest.mark.promise("patients.verbs")
def test_own_patients_are_checked_planned_and_proven(unpad, run, tmp_path, monkeypatch):
    recipe = run.with_name("patients.yaml")
    assert f"{PEOPLE} of {PEOPLE} rows usable" in unpad("data", "check", recipe, code=0).out
    for strategy in json.loads(unpad("plan", recipe, "--json", code=0).out)["strategies"]:
        assert strategy["ledger"]["sequences"]["whole"] == round(PEOPLE * 0.6), strategy["name"]
    assert "FAIL" not in unpad("prove", recipe, code=0).out

    def of_another_patient(batch: RaggedBatch) -> RaggedBatch:
        return replace(batch, seq_labels=batch.seq_labels.roll(1))

    load = EventData.load
    monkeypatch.setattr(EventData, "load", lambda data, micro: of_another_patient(load(data, micro)))
    assert "FAIL  plan pack = alone" in unpad("prove", recipe, code=NOT_PROVED).out


def test_vectors_of_other_patients_are_those_they_would_have_had(unpad, run, tmp_path):
    write_tables(tmp_path / "others", FIRST + np.array([PEOPLE + 5, 3, 1, PEOPLE + 1]))
    own, others = tmp_path / "own.parquet", tmp_path / "others.parquet"
    assert unpad("embed", run, "--out", own).code == 0
    assert unpad("embed", run, "--data", tmp_path / "others", "--out", others).code == 0
    known, found = (pq.read_table(path).to_pydict() for path in (own, others))
    assert sorted(known["id"]) == (FIRST + np.arange(PEOPLE)).tolist()
    assert sorted(found["id"]) == [FIRST + i for i in (1, 3, PEOPLE + 1, PEOPLE + 5)]
    for person in (FIRST + 1, FIRST + 3):
        before, now = (table["embedding"][table["id"].index(person)] for table in (known, found))
        assert now == pytest.approx(before, rel=1e-4, abs=1e-5)
    split = dict(zip(known["id"], known["split"], strict=True))
    assert found["trained"] == [split.get(person) == "train" for person in found["id"]]
    assert set(found["trained"]) == {True, False}
    sets = tmp_path / "sets.parquet"
    assert unpad("embed", run, "--data", tmp_path / "others", "--level", "set", "--out", sets).code == 0
    table = pq.read_table(sets)
    marks = ["events", "unknown_codes", "outside_range", "mark", "trained"]
    assert table.column_names == ["id", "set_index", "days_from_landmark", *marks, "embedding"]
    first = [index == 0 for index in table["set_index"].to_pylist()]
    assert [day is None for day in table["days_from_landmark"].to_pylist()] == first, "ages have no time"
    assert list(known) == ["id", "probability", "risk", "split", "label", "embedding"]
    marks.insert(3, "after_landmark")
    assert list(found) == ["id", "probability", "risk", *marks, "embedding"], (
        "of others neither side nor label is known"
    )


def test_the_recipe_for_own_tables_reads_such_tables_and_every_measure_is_explained(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "patients.md").read_text(encoding="utf-8")
    recipe = yaml.safe_load(page.split("```yaml")[1].split("```")[0])
    recipe["data"]["root"] = str(tmp_path)
    tables = {
        "labs": ("patient_id,hour,test,result", "{n},2.5,glucose,90", "{n},30,glucose,80"),
        "diagnoses": ("patient_id,hour,icd", "{n},0,I10"),
        "patients": ("patient_id,age,sex,died", "{n},60,f,{died}"),
    }
    for name, (head, *rows) in tables.items():
        lines = [row.format(n=n, died=n % 2) for n in range(12) for row in rows]
        (tmp_path / f"{name}.csv").write_text("\n".join([head, *lines, ""]))
    data = open_data(Recipe(**recipe), None)
    assert data.table.positions.tolist() == 12 * [4]  # what is after the landmark is not read
    found = predict(Measuring(Guess(), draw(), np.arange(40), PlanSettings()))
    sets = score_sets(Measuring(Guess(), draw(), np.arange(40), PlanSettings()), True, True)
    measures = {
        *outcome_rows(found, True, True).metrics(),
        *summarise_sets(sets),
        *SetSequence(model_config(MODEL), 3).weights,
    }
    for name in [name for name in measures if ":" not in name]:
        assert f"`{name}`" in page, name


@pytest.mark.promise("patients.missing")
def test_a_missing_table_is_named(unpad, run, tmp_path):
    refused = unpad("embed", run, "--data", tmp_path, "--out", tmp_path / "out.parquet", code=2)
    assert "there is nothing in the place of tests.parquet" in refused.err


def test_what_a_run_of_patients_cannot_do_is_refused(unpad, run, tmp_path):
    (tmp_path / "image.png").write_bytes(b"")
    for verb in (("infer", run, "--image", tmp_path / "image.png"), ("generate", run, "--prompt", "a")):
        assert "Traceback" not in unpad(*verb, code=2).err
    assert "unpad predict" in unpad("generate", run, "--prompt", "a").err


def test_a_meds_dataset_trains_and_evaluates_as_it_is(unpad, tmp_path):
    rows = draw_rows(40)
    splits = {FIRST_ID + i: ("train", "train", "tuning", "held_out")[i % 4] for i in range(40)}
    root = put_meds(tmp_path / "meds", rows, [(FIRST_ID + i, 0.0, "GENDER//F", None) for i in range(0, 40, 2)], splits)
    ids = pa.array([FIRST_ID + i for i in range(40)], pa.int64())
    labels = pa.table({"subject_id": ids, "boolean_value": pa.array([i % 5 < 2 for i in range(40)])})
    put(root / "labels.parquet", labels)
    recipe = {
        "data": {"events": str(root)},
        "events": {"labels": {"path": str(root / "labels.parquet"), "id": "subject_id", "label": "boolean_value"}},
        "model": MODEL,
        "plan": {"tokens_per_step": 40},
        "train": {"max_epochs": 1, "threads": 1},
        "precision": "fp32",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    begun = unpad("train", tmp_path / "recipe.yaml", "--out", tmp_path / "run", code=0)
    assert "20 to train on, 10 held out; 10 left out as the test part" in begun.out
    assert json.loads(unpad("eval", tmp_path / "run", "--json", code=0).out)["auroc"]["num"] == 10
