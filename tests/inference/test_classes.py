"""Outcomes of several classes from the table to every answer of a run: files, rows, the server, the certificate."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.helpers.families import PatientsRun, patients_run
from tests.helpers.serving import instances, served
from tests.helpers.shell import Shell
from unpad.proof.recipe import prove_recipe

pytestmark = pytest.mark.promise("patients.ready-labels")
CLASSES = ["home", "died", "rehab"]
NAMES = [f"probability_{name}" for name in CLASSES]


def go(people: list[dict[str, Any]]) -> None:
    """Who is ill dies, half of the others goes home, and of some nothing is known."""
    for number, person in enumerate(people):
        well = None if number % 10 == 9 else ["Home", "rehab"][number // 3 % 2]
        person["goes"] = "died" if person["status"] else well


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PatientsRun]:
    labels = {"path": "people.parquet", "label": "goes", "classes": CLASSES, "missing": "keep"}
    events = {"labels": {**labels, "event": None, "duration": None, "horizon": None}, "scale": "rank"}
    with patients_run(tmp_path_factory.mktemp("classes"), go, events=events) as found:
        yield found


def test_every_verb_tells_the_probabilities_of_all_classes(made: PatientsRun, unpad: Shell) -> None:
    told = unpad("eval", made.run, "--rows", "rows.parquet", "--json", code=0)
    metrics = json.loads(told.out)
    assert {"loss", "accuracy", "commonest_class", "auroc", *(f"auroc_{name}" for name in CLASSES)} <= metrics.keys()
    assert unpad("embed", made.run, "--out", "own.parquet").code == 0
    assert unpad("embed", made.run, "--data", made.tables, "--out", "new.parquet").code == 0
    people = {row["id"]: row["goes"] for row in pq.read_table(made.tables / "people.parquet").to_pylist()}
    for name in ("rows", "own", "new"):
        table = pq.read_table(f"{name}.parquet")
        found = np.stack([table[name].to_numpy() for name in NAMES])
        np.testing.assert_allclose(found.sum(0), 1, atol=1e-6)
        assert table["prediction"].to_pylist() == [CLASSES[place] for place in found.argmax(0)]
        assert not {"probability", "risk"} & set(table.column_names)
        if name != "new":
            said = [None if people[id] is None else people[id].lower() for id in table["id"].to_pylist()]
            assert table["label"].to_pylist() == said
            assert set(said) == {*CLASSES, None}, "none is missing here"
        died = np.array([people[id] == "died" for id in table["id"].to_pylist()])
        assert found[1, died].mean() > found[1, ~died].mean() + 0.2, "each under its own name"
    rows = pq.read_table("rows.parquet").to_pylist()
    assert [row["right"] for row in rows] == [
        None if row["label"] is None else float(row["label"] == row["prediction"]) for row in rows
    ]
    unpad("data", "check", made.recipe, code=0)
    assert unpad("compare", made.run, made.run, "--rows").code == 0


def test_the_server_and_other_passes_give_these_numbers_bit_for_bit(made: PatientsRun, tmp_path: Path) -> None:
    answers = served(made, instances(made.tables), tmp_path)
    wanted = {row["id"]: row for row in answers.rows}
    for one, course in zip(answers.predictions, answers.explanations, strict=True):
        assert {"prediction", *NAMES} < one.keys()
        assert {name: wanted[one["id"]][name] for name in one} == one
        assert "probability" not in course
        lasts = [course[name][-1] for name in NAMES]
        assert lasts == pytest.approx([one[name] for name in NAMES], abs=1e-6), "the record ends with its last set"


@pytest.mark.nightly
def test_the_certificate_holds(made: PatientsRun) -> None:
    assert [line for line in prove_recipe(str(made.run), []).lines if line.passed is False] == []
