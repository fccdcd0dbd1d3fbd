"""Competing events from the table to every answer of a run: files, rows, the server, the certificate."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from tests.helpers.families import PatientsRun, patients_run
from tests.helpers.patients import SET_SEQUENCES, random_patients, tiny_patients_model
from tests.helpers.serving import instances, served
from tests.helpers.shell import Shell
from unpad.batching.batch import RaggedBatch
from unpad.inference.patients import outcomes
from unpad.models.set_sequence.heads import PatientHeads, risk
from unpad.proof.recipe import prove_recipe

pytestmark = pytest.mark.promise("patients.competing")
OTHERS = ["discharged", "moved"]
NAMES = [f"probability_{name}" for name in OTHERS]


def part(people: list[dict[str, Any]]) -> None:
    """Of those who stay well, a quarter is discharged and half moves away."""
    for person in people:
        other = ["well", "discharged", "moved", "moved"][person["id"] // 3 % 4]
        person["status"] = "ill" if person["status"] else other
        person["futime"] = 200 if other != "well" and person["status"] != "ill" else person["futime"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PatientsRun]:
    labels = {
        "path": "people.parquet", "event": "status", "duration": "futime", "horizon": 365, "competing": OTHERS,
        "map": {"well": 0, "ill": 1},
    }  # fmt: skip
    events, model = {"landmark": 0, "labels": labels, "scale": "rank"}, {"bins": [0, 90, 365, 1000]}
    with patients_run(tmp_path_factory.mktemp("competing"), part, events=events, model=model) as found:
        yield found


def test_every_verb_tells_the_probabilities_of_all_causes(made: PatientsRun, unpad: Shell, tmp_path: Path) -> None:
    logged = [json.loads(line)["values"] for line in (made.run / "metrics.jsonl").read_text().splitlines()]
    assert any(0 < values.get("cause", 0) < values["hazard"] for values in logged if "hazard" in values)
    told = unpad("eval", made.run, "--rows", "rows.parquet", code=0)
    assert "observed until a competing event" in told.out
    assert all(f"{measure}_{name}" in told.out for measure in ("concordance", "brier") for name in OTHERS)
    assert unpad("embed", made.run, "--out", "own.parquet").code == 0
    assert unpad("embed", made.run, "--data", made.tables, "--out", "new.parquet").code == 0
    tables = {name: pq.read_table(f"{name}.parquet") for name in ("rows", "own", "new")}
    for table in tables.values():
        assert {"probability", "risk", *NAMES} <= set(table.column_names)
        found = np.stack([table[name].to_numpy() for name in ("probability", *NAMES)])
        assert (found > 0).all()
        assert (found.sum(0) < 1).all(), "beside them, that nothing comes"
        assert found[2].mean() > 1.3 * found[1].mean(), "each under its own name"
        p, risk = (table[name].to_numpy() for name in ("probability", "risk"))
        assert np.corrcoef(p.argsort().argsort(), risk.argsort().argsort())[0, 1] > 0.95
    rows = tables["rows"].to_pylist()
    assert {row["label"] for row in rows if row["competing"]} == {0}, "decided, and not without a label"
    assert unpad("data", "check", made.recipe).code == 0


def test_the_server_and_other_passes_give_these_numbers_bit_for_bit(made: PatientsRun, tmp_path: Path) -> None:
    answers = served(made, instances(made.tables), tmp_path)
    wanted = {row["id"]: row for row in answers.rows}
    assert answers.facts["predictions"] == ["probability", *NAMES, "risk"]
    assert answers.facts["horizon_days"] == 365
    for one in answers.predictions:
        assert set(answers.facts["predictions"]) <= one.keys()
        assert set(NAMES) < one.keys(), "several patients of one request, each with its own numbers"
        assert {name: wanted[one["id"]][name] for name in one} == one


@pytest.mark.nightly
def test_the_certificate_holds_and_fails_where_causes_of_other_patients_move_the_hazards(made, monkeypatch):
    def failed() -> set[str]:
        return {line.name for line in prove_recipe(str(made.run), []).lines if line.passed is False}

    assert failed() == set()
    own = PatientHeads.hazards

    def mixed(heads: PatientHeads, readouts: Tensor, shift: Tensor | None) -> Tensor | None:
        logits = own(heads, readouts, shift)
        return torch.cat([logits[..., :2], logits[..., 2:].roll(1, 0)], 2)  # of the last competing event alone

    monkeypatch.setattr(PatientHeads, "hazards", mixed)
    assert failed()


@pytest.mark.parametrize("kind", ["plain", "filter", "competing", "vectors"])
def test_one_pass_gives_what_classes_and_hazards_give_alone_bit_for_bit(kind, monkeypatch):
    fields = SET_SEQUENCES[kind]
    model, batch = tiny_patients_model(torch.float32, **fields), random_patients([5, 0, 9, 1, 14])
    model.trained = {"classification": 1.0, "hazard": 1.0}
    passes, read = list[RaggedBatch](), type(model)._read
    monkeypatch.setattr(type(model), "_read", lambda own, given: passes.append(given) or read(own, given))
    with torch.no_grad():
        found = outcomes(model, batch)
        assert len(passes) == 1
        log_p, hazards = model.classify(batch).double().log_softmax(-1), model.hazards(batch)
    expected = {"log_p": log_p, "competing": log_p[:, 2:], "risk": log_p[:, 1]}
    if hazards is not None:
        expected |= {"competing": model.competing(hazards.double()).exp(), "risk": risk(hazards.double())}
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], values.detach().numpy()) for name, values in expected.items())
