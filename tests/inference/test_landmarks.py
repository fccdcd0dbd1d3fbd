"""Patients at several landmarks from the tables to every answer of a run: files, rows, the server, the certificate."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.families import PatientsRun, patients_run
from tests.helpers.serving import instances, served
from tests.helpers.shell import Shell
from unpad.data.family import open_data
from unpad.data.measuring import Measuring
from unpad.data.patients import EventData
from unpad.inference.loaded import LoadedRun, load
from unpad.inference.patients import PatientPredictions, predict
from unpad.nn.linear import independent_rows
from unpad.recipes.training import PlanSettings
from unpad.serving.patients import Tables, predictions
from unpad.serving.protocol import Instance, RequestError

pytestmark = pytest.mark.promise("patients.landmarks")
TIMES = [-250, -100, 0]
NUM = 60


def leave(people: list[dict[str, Any]]) -> None:
    """A part of the patients has left before the second landmark."""
    for number, person in enumerate(people):
        person["futime"] = -150 if number % 4 == 3 else person["futime"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PatientsRun]:
    labels = {"path": "people.parquet", "event": "status", "duration": "futime", "horizon": 365}
    events, model = {"landmark": TIMES, "labels": labels, "scale": "rank"}, {"bins": [0, 90, 365, 1000]}
    with patients_run(tmp_path_factory.mktemp("landmarks"), leave, events=events, model=model) as found:
        yield found


def predicted(loaded: LoadedRun, data: EventData, plan: PlanSettings) -> PatientPredictions:
    with independent_rows():
        return predict(Measuring(loaded.model, data, np.arange(len(data.table)), plan))


def test_an_example_is_predicted_as_by_a_recipe_with_its_landmark_alone_bit_for_bit(made: PatientsRun) -> None:
    loaded = load(made.run)
    data, plan = loaded.data(), loaded.recipe.plan
    told = predicted(loaded, data, plan)
    single = predicted(loaded, data, PlanSettings(tokens_per_micro=1))
    assert np.array_equal(told.log_p, single.log_p), "one at a time"
    assert data.landmarks is not None
    assert len(np.unique(told.log_p[:, 1])) > 2 * NUM, "another prediction at every landmark"
    for landmark in TIMES:
        events = loaded.recipe.events.model_copy(update={"landmark": float(landmark)})
        recipe = loaded.recipe.model_copy(update={"events": events})
        alone = open_data(recipe, loaded.files)
        mine = data.landmarks == landmark
        assert alone.ids.tolist() == data.ids[mine].tolist()
        found = predicted(loaded, alone, plan)
        for name, values in vars(found).items():
            if isinstance(values, np.ndarray) and name != "patient":  # a number within the cohort
                assert np.array_equal(values, getattr(told, name)[mine], equal_nan=True), name


def test_a_request_has_the_landmarks_of_a_column_each_with_an_answer(made: PatientsRun, tmp_path: Path) -> None:
    people = pq.read_table(made.tables / "people.parquet").to_pylist()[:20]
    own = [{**person, "at": at} for person in people for at in ((-300, -20) if person["id"] % 2 else (0,))]
    pq.write_table(pa.Table.from_pylist(own), tmp_path / "own.parquet")
    trained = load(made.run)
    labels = trained.recipe.events.labels.model_copy(
        update={"path": str(tmp_path / "own.parquet"), "missing": "exclude"}
    )
    events = trained.recipe.events.model_copy(update={"landmark": "at", "labels": labels})
    loaded = replace(trained, recipe=trained.recipe.model_copy(update={"events": events}))
    data, tables = open_data(loaded.recipe, loaded.files), Tables.of(loaded)
    found = predicted(loaded, data, loaded.recipe.plan)
    kept, asked = set(zip(map(str, data.ids.tolist()), data.landmarks.tolist(), strict=True)), []
    for one in reversed(instances(made.tables, 20)):
        if marks := [{"at": at} for at in (-300, -20, 0) if (str(one["id"]), at) in kept]:
            asked.append(Instance(id=str(one["id"]), events=[*one["events"], *marks]))
    assert tables.columns == ["id", "days", "test", "value", "age", "at"]
    tables.check(asked)
    read = tables.read(asked)
    assert read.landmarks is not None
    told = predicted(loaded, read, loaded.recipe.plan)
    answers = predictions(loaded, read, asked, [(np.arange(len(read.table)), vars(told))])
    wanted = {(str(one), at): p for one, at, p in zip(data.ids.tolist(), data.landmarks.tolist(), found.p, strict=True)}
    assert [(one["id"], one["landmark"]) for one in answers] == sorted(wanted, key=lambda key: (-int(key[0]), key[1]))
    for one in answers:
        assert one["probability"] == wanted[one["id"], one["landmark"]]
    assert sum(one["after_landmark"] for one in answers) > 0
    rows = [row for row in asked[1].events if "at" not in row]
    with pytest.raises(RequestError, match="the patient has no at, the time of the prediction") as bare:
        tables.read([asked[0], Instance(id="x", events=rows)])
    assert bare.value.param == "instances[1].events"
    with pytest.raises(RequestError, match='E_TYPE "at" is a text of 4 characters') as odd:
        tables.read([asked[0], Instance(id="x", events=[*rows, {"at": "soon"}])])
    assert odd.value.param == "instances[1].events"


def test_every_verb_tells_examples_and_patients_apart(made: PatientsRun, unpad: Shell, tmp_path: Path) -> None:
    num = NUM * 3 - NUM // 4 * 2
    checked = unpad("data", "check", made.recipe)
    assert f"{num} examples of {NUM} patients: " in checked.out
    assert f"; {NUM // 4 * 2} left out whose observation ended before the landmark" in checked.out
    planned = unpad("plan", made.recipe)
    assert f"{num} examples of {NUM} patients" in planned.out
    told = unpad("eval", made.run, "--rows", "rows.parquet", code=0)
    held_out = round(0.4 * NUM)
    assert f" examples, {held_out} patients, " in told.out
    assert f", {held_out} groups" in told.out, "intervals are over patients"
    own = unpad("embed", made.run, "--out", "own.parquet")
    assert f"{num} examples of {NUM} patients" in own.out
    new = unpad("embed", made.run, "--data", made.tables, "--out", "new.parquet")
    assert f"{3 * NUM} examples of {NUM} patients" in new.out, "outcomes of new patients are not known"
    assert f"the run trained on {NUM - held_out} of {NUM} patients" in new.out
    assert unpad("embed", made.run, "--level", "set", "--out", "sets.parquet").code == 0
    tables = {name: pq.read_table(f"{name}.parquet") for name in ("rows", "own", "new", "sets")}
    for table in tables.values():
        assert table.column_names[:2] == ["id", "landmark"]
        assert set(table["landmark"].to_pylist()) == set(TIMES)
    for name in ("rows", "own", "new"):
        pairs = list(zip(tables[name]["id"].to_pylist(), tables[name]["landmark"].to_pylist(), strict=True))
        assert len(set(pairs)) == len(pairs), "one row for each"
    rows = {(row["id"], row["landmark"]): row for row in tables["rows"].to_pylist()}
    whole = {(row["id"], row["landmark"]): row for row in tables["own"].to_pylist()}
    assert {(row["id"], row["group"]) for row in rows.values()} == {(key[0], rows[key]["group"]) for key in rows}
    assert len({row["group"] for row in rows.values()}) == held_out
    for key, row in rows.items():
        assert row["probability"] == pytest.approx(whole[key]["probability"], abs=1e-6)
    parts = {row["id"]: row["split"] for row in whole.values()}
    assert all(parts[row["id"]] == row["split"] for row in whole.values())
    compared = unpad("compare", made.run, made.run, "--rows")
    assert f"on {len(rows)} rows that both hold out" in " ".join(compared.out.split()), compared.err
    assert unpad("runs", made.run).code == 0
    drawn = json.loads((made.run / "evaluation.json").read_text())
    assert drawn["counts"]["examples"] == len(rows)


def test_the_server_answers_at_every_landmark_with_the_numbers_of_the_files(made: PatientsRun, tmp_path: Path) -> None:
    asked = [{**one, "id": f"p{one['id']}"} for one in reversed(instances(made.tables))]
    told, courses, _, rows = served(made, asked, tmp_path)
    wanted = {(f"p{row['id']}", row["landmark"]): row for row in rows}
    order = [(one["id"], at) for one in asked for at in TIMES]
    assert [(one["id"], one["landmark"]) for one in told] == order
    assert [(one["id"], one["landmark"]) for one in courses] == order
    for one in told:
        mine = wanted[one["id"], one["landmark"]]
        assert {name: mine[name] for name in one if name != "id"} == {k: v for k, v in one.items() if k != "id"}
    for one, course in zip(told, courses, strict=True):
        assert all(day is None or day <= 0 for day in course["days"])
        if course["probability"]:
            assert course["probability"][-1] == pytest.approx(one["probability"], abs=1e-5)
