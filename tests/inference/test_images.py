"""`unpad infer`: a class for every image that can be read, a named fault for every other, alone as among others."""

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.pictures import SMALL, recipe_of, write_folder, write_recipe, write_scenes
from tests.helpers.questions import recipe_of as questions_recipe
from tests.helpers.shell import Shell
from tests.helpers.toy import quiet
from unpad.data.sources.split import Split
from unpad.inference.images import classify, list_images
from unpad.inference.loaded import load
from unpad.training.loop import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run directory and the folder of images it was trained on."""
    root = tmp_path_factory.mktemp("infer")
    folder = write_folder(root / "pictures")
    name = write_recipe(root / "r.yaml", recipe_of(folder, optim={"lr": 3e-3}))
    train(name, root / "run", [], console=quiet())
    return root / "run", folder


@pytest.mark.promise("llm.your-data", "images.classes")
def test_a_file_says_its_class_and_probability(unpad: Shell, trained: tuple[Path, Path]) -> None:
    run, folder = trained
    outcome = unpad("infer", run, "--image", folder / "dark" / "0.png", "--top", "1", code=0)
    assert outcome.out.strip().endswith("%")
    assert "dark " in outcome.out
    both = json.loads(unpad("infer", run, "--image", folder / "dark" / "0.png", "--json").out)
    assert [row["class"] for row in both[0]["top"]] == ["dark", "light"]
    assert sum(row["probability"] for row in both[0]["top"]) == pytest.approx(1)


@pytest.mark.promise("llm.your-data", "images.classes")
def test_a_folder_becomes_a_table_and_a_bad_file_a_row_of_it(unpad, trained, tmp_path):
    run, folder = trained
    inside = tmp_path / "mixed"
    inside.mkdir()
    for number, path in enumerate(sorted(folder.rglob("*.png"))[:5]):
        (inside / f"{number}.png").write_bytes(path.read_bytes())
    (inside / "broken.png").write_bytes(b"")
    outcome = unpad("infer", run, "--image", inside, "--csv", tmp_path / "out.csv", code=3)
    assert "E_EMPTY" in outcome.out
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 6
    faults = {Path(row["image"]).name: row["fault"] for row in rows}
    assert faults["broken.png"].startswith("E_EMPTY")
    assert all(not fault for name, fault in faults.items() if name != "broken.png")
    assert all(0 < float(row["probability"]) <= 1 for row in rows if not row["fault"])


@pytest.mark.promise("input.pipes")
def test_pipes_devices_and_odd_names_are_faults_of_their_own_file(unpad, trained, tmp_path):
    run, folder = trained
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    shutil.copy(folder / "dark" / "0.png", mixed / "a\x1b[31m\nb.png")
    os.mkfifo(mixed / "pipe.png")
    (mixed / "zero.png").symlink_to("/dev/zero")
    with (mixed / "vast.png").open("wb") as vast:
        vast.truncate(1 << 29)
    done = unpad("infer", run, "--image", mixed, "--csv", "o.csv")
    assert (done.code, "\x1b" in done.out + done.err) == (3, False)
    assert [line.partition("mixed/")[2].partition(" ")[0] for line in done.out.splitlines()] == [
        r"a\x1b[31m\nb.png:", "pipe.png:", "vast.png:", "zero.png:"
    ]  # fmt: skip
    assert ["not a file" in line for line in done.out.splitlines()] == [False, True, False, True]
    assert "bytes, more than" in done.out.splitlines()[2]
    (mixed / os.fsdecode(b"\xd6\xd0.png")).touch()
    refused = unpad("infer", run, "--image", mixed)
    assert (refused.code, "E_NAME" in refused.err, r"\xd6\xd0.png" in refused.err) == (3, True, True)


def test_an_image_of_one_colour_is_a_fault_and_not_a_class(unpad, trained, tmp_path):
    Image.new("RGB", (20, 12), (250, 250, 250)).save(tmp_path / "blank.png")
    outcome = unpad("infer", trained[0], "--image", tmp_path / "blank.png", "--json", code=3)
    (row,) = json.loads(outcome.out)
    assert row["fault"].startswith("E_BLANK all 20 x 12 pixels have one colour")
    assert row["top"] == []


@pytest.mark.promise("images.classes")
def test_an_image_gets_what_it_would_get_alone(trained: tuple[Path, Path]) -> None:
    run, folder = load(trained[0]), trained[1]
    paths = list_images([folder])
    together = classify(run, paths)
    for path, answer in zip(paths, together, strict=True):
        (alone,) = classify(run, [path])
        assert [name for name, _ in alone.top] == [name for name, _ in answer.top]
        assert alone.top[0][1] == pytest.approx(answer.top[0][1], rel=1e-5)


def test_opacity_and_size_of_a_file_are_those_of_training(tmp_path: Path) -> None:
    folder, rng = write_folder(tmp_path / "pictures"), np.random.default_rng(0)
    for path in sorted(folder.rglob("*.png"))[::2]:
        picture = Image.open(path).convert("RGBA")
        picture.putalpha(Image.fromarray(rng.integers(0, 256, picture.size[::-1], np.uint8)))
        picture.save(path)
    model = {**SMALL, "channels": 4, "size_embed": True}
    recipe = recipe_of(folder, images={"scale": 0.5}, optim={"lr": 3e-2}, model=model)
    train(write_recipe(tmp_path / "r.yaml", recipe), tmp_path / "run", [], console=quiet())
    run = load(tmp_path / "run")
    data = run.data()
    answers = classify(run, [Path(example.where) for example in data.examples], 2)
    for seq, answer in enumerate(answers):
        with torch.no_grad():
            batch = data.alone(seq, 0, int(data.table.positions[seq]), 0)
            p = run.model.classify(batch).double().softmax(-1)[0].tolist()
        assert dict(answer.top) == pytest.approx(dict(zip(data.classes, p, strict=True)), rel=1e-5)
    assert len({round(answer.top[0][1], 6) for answer in answers}) > 6, "the model tells pictures apart"


@pytest.mark.promise("llm.your-data")
def test_what_cannot_be_meant_is_refused(unpad, trained, finished, tmp_path):
    run, _ = trained
    (tmp_path / "empty").mkdir()
    for path, message in ((tmp_path / "empty", "holds no image"), (tmp_path / "nowhere.png", "no such file")):
        outcome = unpad("infer", run, "--image", path, code=3)
        assert message in outcome.err
    refused = unpad("infer", finished("text").run, "--image", trained[1], code=2)
    assert "classifies no images" in refused.err
    asked = unpad("generate", run, "--prompt", "你好", code=2)
    assert "writes no text" in asked.err


@pytest.mark.promise("llm.your-data")
def test_pictures_of_another_mode_or_size_than_those_of_training_are_marked_and_warned_of(unpad, trained, tmp_path):
    run, folder = trained
    seen = json.loads((run / "pictures.json").read_text("utf-8"))
    assert list(seen["modes"]) == ["colour"]
    known = folder / "dark" / "0.png"
    usual = unpad("infer", run, "--image", known, "--json")
    assert (usual.err, json.loads(usual.out)[0]["mark"]) == ("", "")
    inside = tmp_path / "new" / "dark"
    inside.mkdir(parents=True)
    picture = Image.open(known)
    picture.convert("L").save(inside / "grey.png")
    picture.convert("RGBA").save(inside / "alpha.png")
    picture.quantize(16).save(inside / "palette.png")
    deep = np.asarray(picture.convert("L")).astype(np.uint16) * 256
    Image.fromarray(deep).save(inside / "deep.png")
    picture.resize((seen["width"][1] + 1, seen["height"][0])).save(inside / "wide.png")
    (inside / "same.png").write_bytes(known.read_bytes())
    marks = {
        "grey.png": "mode not in training: grey",
        "alpha.png": "mode not in training: colour with alpha",
        "palette.png": "mode not in training: palette",
        "deep.png": "mode not in training: grey of 16 bits",
        "wide.png": f"size outside of training: {seen['width'][1] + 1} x {seen['height'][0]}",
        "same.png": "",
    }
    told = unpad("infer", run, "--image", inside, "--csv", tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text("utf-8").splitlines()))
    assert {Path(row["image"]).name: row["mark"] for row in rows} == marks
    assert all(f"({mark})" in told.out for mark in marks.values() if mark)
    assert "warning: 4 of 6 pictures (66.7%) have a mode that training had not" in told.err
    assert "warning: 1 of 6 pictures (16.7%) have a size that training had not" in told.err
    new = unpad("eval", run, "--data", inside.parent, "--json")
    assert "warning: 4 of 6 pictures (66.7%)" in new.err
    facts = json.loads(new.out)["unlike_training"]
    assert (facts["pictures"], facts["unknown_sizes"], sum(facts["unknown_modes"].values())) == (6, 1, 4)
    old = tmp_path / "old"
    shutil.copytree(run, old)
    (old / "pictures.json").unlink()
    told = unpad("infer", old, "--image", inside, "--json")
    assert (told.code, told.err, {row["mark"] for row in json.loads(told.out)}) == (0, "", {""})
    assert "unlike_training" not in json.loads(unpad("eval", old, "--data", inside.parent, "--json").out)


@pytest.mark.promise("data.parts")
def test_new_pictures_that_are_near_duplicates_of_training_ones_are_named(unpad, trained, tmp_path):
    run, folder = trained
    data = load(run).data()
    learned = [
        Path(one.where) for one, part in zip(data.examples, data.table.split, strict=True) if part == Split.TRAIN
    ]
    inside = tmp_path / "new" / learned[0].parent.name
    inside.mkdir(parents=True)
    (inside / "copy.png").write_bytes(learned[0].read_bytes())
    Image.open(learned[1]).save(inside / "other.bmp")
    rng = np.random.default_rng(7)
    Image.fromarray(rng.integers(0, 255, (16, 16, 3)).astype(np.uint8)).save(inside / "unknown.png")
    told = unpad("eval", run, "--data", inside.parent, "--json")
    found = json.loads(told.out)["near_duplicates"]
    assert (found["compared"], found["equal"], found["near"], found["reason"]) == (3, 1, 1, None)
    pairs = {Path(pair["row"]).name: pair["training_row"] for pair in found["found"]}
    assert pairs == {"copy.png": str(learned[0]), "other.bmp": str(learned[1])}
    assert "new data, 3 pictures: 2 near-duplicates of training ones, 1 of them equal" in told.err
    shown = unpad("eval", run, "--data", inside.parent)
    assert f"{inside / 'copy.png'} is like {learned[0]}" in shown.out
    moved = tmp_path / "moved"
    folder.rename(moved)
    try:
        told = unpad("eval", run, "--data", inside.parent, "--json")
    finally:
        moved.rename(folder)
    assert told.code == 0
    found = json.loads(told.out)["near_duplicates"]
    assert (found["compared"], found["found"]) == (None, [])
    assert "own data cannot be read" in found["reason"]
    assert "are not looked for" in told.err


def test_pictures_of_questions_are_compared_with_those_of_training(unpad: Shell, tmp_path: Path) -> None:
    write_scenes(tmp_path / "set")
    recipe = questions_recipe(tmp_path / "set/questions.jsonl")
    train(write_recipe(tmp_path / "r.yaml", recipe), tmp_path / "run", ["train.max_epochs=1"], console=quiet())
    known = tmp_path / "set" / "nd.png"
    picture = Image.open(known)
    picture.convert("L").save(tmp_path / "grey.png")
    (tmp_path / "same.png").write_bytes(known.read_bytes())
    asked = ("--question", "what", "--json")
    told = unpad("infer", tmp_path / "run", "--image", tmp_path / "grey.png", "--image", known, *asked)
    assert [row["mark"] for row in json.loads(told.out)] == ["mode not in training: grey", ""]
    assert "warning: 1 of 2 pictures (50.0%) have a mode that training had not: grey 1; training had colour" in told.err
    new = [{"image": name, "question": "what", "answer": "a"} for name in ("grey.png", "same.png")]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in new), "utf-8")
    facts = json.loads(unpad("eval", tmp_path / "run", "--data", tmp_path / "new.jsonl", "--json").out)
    assert facts["unlike_training"] == {"pictures": 2, "unknown_modes": {"grey": 1}, "unknown_sizes": 0}
    (pair,) = (pair for pair in facts["near_duplicates"]["found"] if "same.png" in pair["row"])
    assert pair["row"].startswith(f"{tmp_path / 'new.jsonl'}:2: ")
    assert pair["training_row"] == f"{tmp_path / 'set/questions.jsonl'}:4: {known}"
