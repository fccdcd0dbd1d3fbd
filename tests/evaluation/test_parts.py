"""Parts of the data: rows of the test part are read by `unpad eval` alone, and every figure says of what it is."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.helpers.families import patients
from tests.helpers.patient_tables import FIRST, write_tables
from tests.helpers.pictures import recipe_of, write_folder
from tests.helpers.toy import quiet, rows, run, write_toy
from unpad.data.family import open_data
from unpad.data.sources.split import Split, Wanted
from unpad.errors import RecipeError, ResumeError, SourceError
from unpad.evaluation.metrics import metric_lines
from unpad.evaluation.run import SPLITS, evaluate_new, evaluate_run
from unpad.inference.loaded import load
from unpad.recipes.file import load_recipe
from unpad.training.loop import train

pytestmark = [pytest.mark.slow, pytest.mark.promise("data.parts")]

ONE_STAGE: dict[str, Any] = {
    "stages": [],
    "train": {"max_steps": 6, "eval_every": 2, "threads": 1},
    "data": {"chat": None},
}


def declare(path: Path, parts: dict[int, str]) -> None:
    """Write `split` into the rows of a file of JSON lines, by number from 0."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    for number, part in parts.items():
        lines[number]["split"] = part
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of texts of which five are of the test part; `toy.yaml` and the texts beside it."""
    folder = tmp_path_factory.mktemp("texts")
    recipe = write_toy(folder, **ONE_STAGE)
    declare(folder / "texts.jsonl", {3: "test", 10: "held_out", 11: "test", 40: "test", 41: "TEST"})
    run(recipe, folder / "run")
    return folder


def test_the_test_part_is_scored_if_there_is_one_and_a_chosen_part_is_the_best_of_its_checks(texts):
    folder = str(texts / "run")
    found, _ = evaluate_run(folder)
    assert (found["loss"].num, found["loss"].part, found["loss"].best_of) == (5, "test", None)
    valid, _ = evaluate_run(folder, part="valid")
    checks = len(rows(texts / "run", "eval"))
    assert checks > 1
    num_valid = round(0.1 * 55)
    assert (valid["loss"].num, valid["loss"].part, valid["loss"].best_of) == (num_valid, "valid", checks)
    assert min(row["loss"] for row in rows(texts / "run", "eval")) == pytest.approx(valid["loss"].value, rel=1e-4)
    trained, _ = evaluate_run(folder, part="train")
    assert (trained["loss"].num, trained["loss"].part) == (55 - num_valid, "train")
    told = " ".join(line.strip() for line in metric_lines(valid))
    assert told.count(f"of {num_valid} valid") == len(valid)
    assert "valid chose the weights" in told
    assert "of 5 test" in metric_lines(found)[0]
    assert not any("best of" in line for line in metric_lines(found))


def test_neither_the_tokenizer_nor_a_step_sees_the_test_part(texts):
    data = open_data(load_recipe(str(texts / "toy.yaml")), None)
    assert data.table.num_test == 5
    assert any("5 of the test part" in line for line in data.lines())
    tested = np.flatnonzero(data.table.split == Split.TEST).tolist()
    assert [data.where(one).rpartition(":")[2] for one in tested] == ["4", "11", "12", "41", "42"]
    lines = (texts / "texts.jsonl").read_text("utf-8").splitlines()
    other = texts / "other"
    write_toy(other, **ONE_STAGE)
    (other / "texts.jsonl").write_text("\n".join([*lines[:41], '{"text": "龘靐齉", "split": "test"}']), "utf-8")
    opened = open_data(load_recipe(str(other / "toy.yaml")), None)
    assert opened.table.num_test == 5
    assert "龘".encode() not in b"".join(opened.files.values())


def test_new_data_is_read_as_the_run_reads_its_own(texts, tmp_path, unpad):
    lines = (texts / "texts.jsonl").read_text("utf-8").splitlines()
    new = tmp_path / "new.jsonl"
    chosen = [json.loads(lines[number]) for number in (3, 10, 11, 40, 41)]
    new.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen), "utf-8")
    found, _ = evaluate_run(str(texts / "run"), data=new)
    own, _ = evaluate_run(str(texts / "run"), part="test")
    assert found["loss"].value == pytest.approx(own["loss"].value, rel=1e-6)
    assert found["loss"].part == str(new)
    declare(new, {0: "valid", 1: "train"})
    assert evaluate_run(str(texts / "run"), data=new, part="valid")[0]["loss"].num == 1
    with pytest.raises(SourceError, match="no row declares"):
        evaluate_run(str(texts / "run"), data=_without_split(new, tmp_path / "bare.jsonl"), part="valid")
    with pytest.raises(RecipeError, match="no such file"):
        evaluate_run(str(texts / "run"), data=tmp_path / "nowhere.jsonl")
    metrics = json.loads(unpad("eval", texts / "run", "--split", "valid", "--json").out)
    assert {"value", "low", "high", "num", "part", "best_of", "num_groups"} <= set(metrics["loss"])
    assert metrics["loss"]["part"] == "valid"
    assert unpad("eval", texts / "run", "--data", new).out.startswith("1 file: 5 rows read = 5 used")
    assert unpad("eval", texts / "run", "--split", "some").code == 2


@pytest.mark.parametrize("joined", [False, True])
def test_new_texts_that_are_near_duplicates_of_training_ones_are_named(texts, tmp_path, unpad, monkeypatch, joined):
    folder = texts / "run"
    if joined:
        run(texts / "toy.yaml", tmp_path / "run", "plan.cross_documents=true")
        folder = tmp_path / "run"
    data = open_data(load_recipe(str(texts / "toy.yaml")), None)
    learned = [data.where(one) for one in np.flatnonzero(data.table.split == Split.TRAIN).tolist()]
    lines = (texts / "texts.jsonl").read_text("utf-8").splitlines()
    first, second = (json.loads(lines[int(place.rpartition(":")[2]) - 1])["text"] for place in learned[:2])
    new = tmp_path / "new.jsonl"
    rows = [{"text": "龘靐齉" * 9, "split": "valid"}, {"text": first}, {"text": second + "完", "split": "valid"}]
    new.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    told = unpad("eval", folder, "--data", new, "--json")
    found = json.loads(told.out)["near_duplicates"]
    assert (found["unit"], found["compared"], found["equal"]) == ("documents", 3, 1)
    pairs = {pair["row"]: pair["training_row"] for pair in found["found"]}
    assert pairs[f"{new}:2"] == learned[0]
    assert f"{new}:3" in pairs
    assert "new data, 3 documents: 1 equal to a trained one" in told.err
    assert f"{new}:2: equal to {learned[0]}" in told.err
    assert "do: leave these rows out of the new data" in told.err
    held = data.where(int(np.flatnonzero(data.table.split == Split.HOLDOUT)[0]))
    only = _without_split(_copy(lines[int(held.rpartition(":")[2]) - 1], tmp_path / "held"), tmp_path / "held.jsonl")
    assert json.loads(unpad("eval", folder, "--data", only, "--json").out)["near_duplicates"]["equal"] == 0
    part = json.loads(unpad("eval", folder, "--data", new, "--json", "--split", "valid").out)["near_duplicates"]
    assert (part["compared"], part["equal"]) == (2, 0)
    monkeypatch.setattr("unpad.data.text.MOST_CHARACTERS", 1)
    found = json.loads(unpad("eval", folder, "--data", new, "--json").out)["near_duplicates"]
    assert "characters of the run's data are too many" in found["reason"]


def _copy(line: str, out: Path) -> Path:
    out.write_text(line + "\n", "utf-8")
    return out


def _without_split(path: Path, out: Path) -> Path:
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    out.write_text("".join(json.dumps({"text": line["text"]}) + "\n" for line in lines), "utf-8")
    return out


def test_a_run_of_an_earlier_version_keeps_the_part_it_held_out(tmp_path):
    recipe = write_toy(tmp_path, **ONE_STAGE)
    train(str(recipe), tmp_path / "run", ["data.split_version=1", "train.max_steps=2"], console=quiet())
    command = tmp_path / "run" / "run.json"
    told = json.loads(command.read_text("utf-8"))
    command.write_text(json.dumps({**told, "overrides": ["train.max_steps=2"]}), "utf-8")
    kept = tmp_path / "run" / "recipe.yaml"
    values = yaml.safe_load(kept.read_text("utf-8"))
    del values["data"]["split_version"]
    kept.write_text(yaml.safe_dump(values, allow_unicode=True), "utf-8")
    old = open_data(load_recipe(str(recipe), ["data.split_version=1"]), None)
    held = np.flatnonzero(old.table.split == Split.HOLDOUT)
    now = open_data(load_recipe(str(recipe)), None).table.split
    assert not np.array_equal(np.flatnonzero(now == Split.HOLDOUT), held), "the rules differ on this data"
    assert np.array_equal(np.flatnonzero(load(tmp_path / "run").data().table.split == Split.HOLDOUT), held)
    assert evaluate_run(str(tmp_path / "run"))[0]["loss"].num == len(held)
    train(str(recipe), tmp_path / "run", ["train.max_steps=4"], resume=True, console=quiet())
    assert len(rows(tmp_path / "run", "train")) == 4
    assert yaml.safe_load(kept.read_text("utf-8"))["data"]["split_version"] == 1
    with pytest.raises(ResumeError, match="split_version"):
        train(str(recipe), tmp_path / "run", ["data.split_version=2"], resume=True, console=quiet())


def test_images_of_the_test_part_are_counted_and_evaluated_and_unknown_classes_are_named(tmp_path):
    folder = write_folder(tmp_path / "pictures", 32)
    listed = [
        {"image": str(path.relative_to(folder)), "label": path.parent.name, "split": ("train", "dev", "test")[n % 3]}
        for n, path in enumerate(sorted(folder.rglob("*.png")))
    ]
    (folder / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed), "utf-8")
    recipe = recipe_of(folder, data={"images": str(folder / "images.jsonl")})
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"max_epochs": None, "max_steps": 4})})
    (tmp_path / "r.yaml").write_text(recipe.to_yaml(), "utf-8")
    train(str(tmp_path / "r.yaml"), tmp_path / "run", [], console=quiet())
    num = len(listed[2::3])
    assert any(f"{num} of the test part" in line for line in open_data(recipe, None).lines())
    found, _ = evaluate_run(str(tmp_path / "run"))
    assert (found["accuracy"].num, found["accuracy"].part) == (num, "test")
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text("utf-8"))["part"] == "test"
    assert "of the part test" in (tmp_path / "run" / "report.html").read_text("utf-8")
    shutil.copytree(folder / "light", tmp_path / "new" / "blue")
    shutil.copytree(folder / "dark", tmp_path / "new" / "dark")
    new, lines = evaluate_run(str(tmp_path / "run"), data=tmp_path / "new")
    assert new["accuracy"].num == len(list((folder / "dark").glob("*.png")))
    assert any("16 of classes that the run does not know (blue)" in line for line in lines)
    shutil.rmtree(tmp_path / "new" / "dark")
    with pytest.raises(SourceError, match="knows none of the classes: blue"):
        evaluate_run(str(tmp_path / "run"), data=tmp_path / "new")


def test_what_is_measured_of_the_training_part_is_not_augmented(tmp_path):
    folder = write_folder(tmp_path / "pictures", 32)
    changes = {"scale": 0.5, "flip": 0.5, "shift": 0.3}
    recipe = recipe_of(folder, images=changes, train={"max_epochs": None, "max_steps": 1})
    (tmp_path / "r.yaml").write_text(recipe.to_yaml(), "utf-8")
    train(str(tmp_path / "r.yaml"), tmp_path / "run", [], console=quiet())
    found, _ = evaluate_run(str(tmp_path / "run"), part="train")
    data = load(tmp_path / "run").data()
    trained = [folder / data.where(seq) for seq in np.flatnonzero(data.table.split == Split.TRAIN)]
    listed = [{"image": str(path.relative_to(folder)), "label": path.parent.name, "split": "train"} for path in trained]
    (folder / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed), "utf-8")
    same, _ = evaluate_run(str(tmp_path / "run"), data=folder / "same.jsonl")
    assert found["loss"].num == len(listed)
    assert found["loss"].value == pytest.approx(same["loss"].value, abs=1e-12)

    augmented = {**ONE_STAGE, "augment": {"multiplier": 2, "delete": 0.3}, "train": {"max_steps": 1, "threads": 1}}
    run(write_toy(tmp_path, **augmented), tmp_path / "texts")
    found, _ = evaluate_run(str(tmp_path / "texts"), part="train")
    assert found["loss"].num == 54, "documents without their copies"


def test_patients_of_the_test_part_teach_no_code_and_are_evaluated(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_tables(tmp_path / "tables", FIRST + np.arange(40))
    people = pq.read_table(tmp_path / "tables" / "people.parquet")
    parts = pa.array([("train", "tuning", "held_out", None)[n % 4] for n in range(40)], pa.string())
    pq.write_table(people.append_column("split", parts), tmp_path / "tables" / "people.parquet")
    measured = {"path": "tests.parquet", "time": "days", "code": "test"}
    short = {"data": {"holdout": 0.3, "events": [measured]}, "train": {"max_steps": 2, "threads": 1}}
    recipe = load_recipe(str(patients(tmp_path, **short)), [])
    data = open_data(recipe, None)
    assert data.table.num_test == 10
    assert any("10 left out as the test part" in line for line in data.lines())
    held = data.table.split == Split.HOLDOUT
    assert int(held.sum()) == 10 + round(0.3 * 10)
    tested = open_data(recipe, data.files, Wanted.TEST)
    assert len(tested.table) == 10
    assert (tested.table.split == Split.TEST).all()
    run(tmp_path / "patients.yaml", tmp_path / "run")
    found, _ = evaluate_run(str(tmp_path / "run"))
    assert (found["accuracy"].num, found["accuracy"].part) == (10, "test")
    write_tables(tmp_path / "new", FIRST + 100 + np.arange(20))
    new, lines = evaluate_run(str(tmp_path / "run"), data=tmp_path / "new")
    assert new["accuracy"].num == 20
    assert any("20 patients" in line for line in lines)
    assert "new data, 20 ids: none is of the run's data" in lines
    write_tables(tmp_path / "known", FIRST + 10 + np.arange(40))
    known = evaluate_new(str(tmp_path / "run"), 0, None, tmp_path / "known")
    ids = set((FIRST + 10 + np.arange(30)).tolist())
    counts = {
        name: len(ids.intersection(data.ids[data.table.split == split].tolist())) for name, split in SPLITS.items()
    }
    counts["test"] = len(ids.intersection(tested.ids.tolist()))
    assert sum(counts.values()) == 30
    assert known.facts["known_ids"] == {"compared": 40, **counts, "reason": None}
    told = next(line for line in known.lines if "of them" in line)
    assert told.startswith("new data, 40 ids: the run's data has 30 of them, ")
    assert f"{counts['train']} of train" in told
    assert not any(str(one) in "\n".join(known.lines) for one in ids), "ids are nobody's business"
    (tmp_path / "new" / "people.parquet").unlink()
    with pytest.raises(RecipeError, match=r"people\.parquet"):
        evaluate_run(str(tmp_path / "run"), data=tmp_path / "new")
