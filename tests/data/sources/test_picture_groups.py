"""Pictures of one thing at several sizes stay on one side of the split."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.pictures import recipe_of
from tests.helpers.questions import recipe_of as questions_recipe
from unpad.data.family import open_data
from unpad.data.sources.images import ImageExample, group_names


def picture(path: str, size: tuple[int, int], label: str = "a", group: str = "") -> ImageExample:
    return ImageExample(path, label, None, *size, (), path, Path(path), None, group)


def test_names_at_several_sizes_are_groups_and_others_are_not() -> None:
    examples = [
        picture("a/16/open.png", (16, 16)),
        picture("a/32/open.png", (32, 32)),
        picture("a/open_64.png", (64, 64)),
        picture("b/open@2x.png", (48, 48), "b"),  # a name of letters is the same thing in another class
        picture("a/shut.png", (16, 16)),
        picture("b/shut.png", (16, 16), "b"),  # of one size only
        picture("a/0001.png", (16, 16)),
        picture("a/x/0001.png", (32, 32)),  # a mere number
        picture("a/16/7.png", (16, 16)),
        picture("a/32/7.png", (32, 32)),  # but not in folders of sizes
        picture("a/IMG_5.png", (640, 480)),
        picture("b/IMG_5.png", (320, 240), "b"),  # a camera's name in another class
        picture("a/open.png", (8, 8), group="mine"),
    ]
    names = group_names(examples)
    assert len(set(names[:4])) == 1
    assert names[0]
    assert names[4:8] == [""] * 4
    assert names[8] == names[9] != ""
    assert names[10:] == ["", "", "mine"]


def draw(root: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(20):
        for size in (16, 32):
            path = root / ("dark", "light")[number % 2] / str(size) / f"{'abcdefghijklmnopqrst'[number]}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (size, size, 3)).astype(np.uint8)).save(path)


@pytest.mark.promise("data.holdout")
def test_the_sizes_of_an_icon_share_a_side_and_count_as_one(tmp_path: Path) -> None:
    draw(tmp_path / "icons")
    data = open_data(recipe_of(tmp_path / "icons"), None)
    assert int((data.table.split == 1).sum()) == 10
    side: dict[str, set[int]] = {}
    for example, part in zip(data.examples, data.table.split.tolist(), strict=True):
        side.setdefault(example.path.stem, set()).add(part)
    assert all(len(parts) == 1 for parts in side.values())
    assert len(np.unique(data.table.group)) == 20
    assert any("40 images are in 20 groups" in line and "each is on one side" in line for line in data.lines())
    earlier = open_data(recipe_of(tmp_path / "icons", data={"split_version": 1}), None)
    assert earlier.chosen.shared_groups > 0
    assert any(f"{earlier.chosen.shared_groups} of them are both in training" in line for line in earlier.lines())


@pytest.mark.parametrize("declared", [False, True])
def test_groups_of_rows_hold_for_images_and_questions_and_declared_exceptions_are_counted(tmp_path, declared):
    draw(tmp_path)
    files = sorted(tmp_path.rglob("*.png"))
    images, questions = [], []
    for number, path in enumerate(files):
        name = str(path.relative_to(tmp_path))
        row = {"image": name, "group": f"g{number // 5}"}
        if declared and number < 2:
            row["split"] = ("train", "valid")[number]
        images.append({**row, "label": name.partition("/")[0]})
        questions.append({**row, "question": f"what is {number}", "answer": "x"})
    for file, lines in (("images.jsonl", images), ("questions.jsonl", questions)):
        (tmp_path / file).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    seen = open_data(recipe_of(tmp_path / "images.jsonl"), None)
    asked = open_data(questions_recipe(tmp_path / "questions.jsonl"), None)
    groups = np.arange(len(files)) // 5
    split = seen.table.split
    mixed = [group for group in range(8) if len(set(split[groups == group].tolist())) > 1]
    assert mixed == ([0] if declared else [])
    assert seen.chosen.shared_groups == asked.chosen.shared_groups == int(declared)
