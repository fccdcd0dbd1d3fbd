"""Near-duplicate pictures on both sides of the split are found and named."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.helpers.pictures import recipe_of, scene, write_scenes
from tests.helpers.questions import recipe_of as questions_recipe
from unpad.data.family import open_data
from unpad.data.pictures import alike
from unpad.data.pictures.alike import SIDE, small_copies, tie_alike
from unpad.data.sources.split import Split, Wanted
from unpad.errors import SourceError
from unpad.recipes.recipe import Recipe


@pytest.mark.promise("data.near-duplicates")
@pytest.mark.parametrize("family", ["images", "vqa"])
def test_other_sizes_qualities_and_shades_are_found_and_nothing_else(tmp_path: Path, family: str) -> None:
    write_scenes(tmp_path / "set")
    recipe = recipe_of(tmp_path / "set/images.jsonl") if family == "images" else questions_recipe(
        tmp_path / "set/questions.jsonl"
    )  # fmt: skip
    told = "\n".join(open_data(recipe, None).lines())
    assert "held out 6 pictures: 4 near-duplicates of training ones" in told
    places = {"images": ("images.jsonl:21", "jsonl:4, under another label: 0, 1"), "vqa": ("larger.png", "nd.png")}
    one, other = places[family]
    assert any(one in line and " is like " in line and line.endswith(other) for line in told.splitlines())


def test_small_copies_are_kept_and_a_changed_picture_is_looked_at_again(tmp_path, monkeypatch):
    write_scenes(tmp_path / "set")
    data = open_data(recipe_of(tmp_path / "set/images.jsonl"), None)
    first = small_copies(data.examples)
    assert first.shape == (26, SIDE, SIDE, 4)
    with monkeypatch.context() as patch:
        patch.setattr(alike, "decode", lambda *_: pytest.fail("decoded again"))
        assert np.array_equal(small_copies(data.examples), first)
    monkeypatch.setattr(alike, "MOST_PIXELS", 1000)
    assert "are not looked for" in data.album.pictures.lines()[0]
    for rule in ("together", "refuse"):  # and are not passed over where the recipe asks for them
        with pytest.raises(SourceError, match="cannot be looked for"):
            open_data(recipe_of(tmp_path / "set/images.jsonl", data={"near_duplicates": rule}), None)


def make(folder: Path, family: str, parts: dict[int, str | None] | None = None, **data: str) -> Recipe:
    """Recipe of the pictures of `write_scenes` as classes or questions, with other parts of some rows."""
    if not folder.exists():
        write_scenes(folder)
    name = {"images": "images.jsonl", "vqa": "questions.jsonl"}[family]
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    for number, part in (parts or {}).items():
        rows[number] = {key: value for key, value in rows[number].items() if key != "split"}
        rows[number] |= {} if part is None else {"split": part}
    changed = folder / f"changed-{name}"
    changed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (recipe_of if family == "images" else questions_recipe)(changed, data=data)


@pytest.mark.promise("data.near-duplicates")
@pytest.mark.parametrize("family", ["images", "vqa"])
def test_pictures_that_are_alike_stay_together_on_request(tmp_path: Path, family: str) -> None:
    free = dict.fromkeys(range(26))
    apart = open_data(make(tmp_path / "set", family, free), None)
    together = open_data(make(tmp_path / "set", family, free, near_duplicates="together"), None)
    pairs = [(20, 3), (21, 5), (22, 7), (23, 9)]
    assert any(apart.table.split[one] != apart.table.split[other] for one, other in pairs)
    assert all(together.table.split[one] == together.table.split[other] for one, other in pairs)
    assert all(together.table.group[one] == together.table.group[other] for one, other in pairs)
    assert len(np.unique(together.table.group)) == 22
    assert ": 0 near-duplicates of training ones" in "\n".join(together.lines())
    declared = open_data(make(tmp_path / "set", family, near_duplicates="together"), None)
    assert "held out 6 pictures: 4 near-duplicates" in "\n".join(declared.lines()), (
        "rows that declare their part keep it"
    )
    follows = make(tmp_path / "set", family, {**free, 20: "test"}, near_duplicates="together")
    assert open_data(follows, None).table.num_test == 2, "a picture goes with one that declares its part"
    assert len(open_data(follows, None, Wanted.TEST).table) == 2


@pytest.mark.promise("data.near-duplicates")
@pytest.mark.parametrize("family", ["images", "vqa"])
def test_pictures_that_are_alike_are_refused_on_request(tmp_path: Path, family: str) -> None:
    recipe = make(tmp_path / "set", family, near_duplicates="refuse")
    first = {
        "images": r"images\.jsonl:21 is like .*images\.jsonl:4, under another label: 0, 1\n",
        "vqa": r"jsonl:21: .*larger\.png is like .*:4: .*nd\.png\n",
    }
    with pytest.raises(SourceError, match=f"E_LEAK 4 held-out pictures .*{first[family]}") as refused:
        open_data(recipe, None)
    assert "set data.near_duplicates=together" in refused.value.fix
    open_data(recipe, None, compare=False)
    tested = dict.fromkeys(range(20, 26), "test")
    with pytest.raises(SourceError, match="E_LEAK 4 test-part pictures"):
        open_data(make(tmp_path / "set", family, tested, near_duplicates="refuse"), None)
    open_data(make(tmp_path / "set", family, tested, near_duplicates="report"), None)
    sound = dict.fromkeys(range(20, 24), "train")
    open_data(make(tmp_path / "set", family, sound, near_duplicates="refuse"), None)


@pytest.mark.promise("data.near-duplicates")
@pytest.mark.parametrize("family", ["images", "vqa"])
def test_pictures_of_the_test_part_are_compared_with_those_of_training(tmp_path: Path, family: str) -> None:
    data = open_data(make(tmp_path / "set", family, {20: "test", 21: "test", 24: "test"}), None)
    lines = data.lines()
    at = next(number for number, line in enumerate(lines) if line.startswith("  test part, 3 pictures: 2 near-dup"))
    assert "21" in lines[at + 1]
    assert " is like " in lines[at + 1]
    assert any("held out 3 pictures: 2 near-duplicates" in line for line in lines)


def test_a_picture_in_rows_of_both_parts_is_named(tmp_path: Path) -> None:
    write_scenes(tmp_path / "set")
    questions = tmp_path / "set/questions.jsonl"
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    rows.append({**rows[0], "split": "valid", "question": "why"})
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = "\n".join(open_data(questions_recipe(questions), None).lines())
    assert "held out 7 pictures: 5 near-duplicates of training ones, 1 of them equal" in told


def sparse(kind: str, number: int) -> Image.Image:
    """White discs and crosses on transparent ground, thin drawings, and patches of a smooth photograph."""
    rng = np.random.default_rng(number)
    if kind == "patch":
        return scene(99, (640, 640)).crop((x := 64 * (number % 10), y := 64 * (number // 10), x + 64, y + 64))
    picture = Image.new("RGBA", (64, 64), (255, 255, 255, 0 if kind == "white" else 255))
    draw, (x, y) = ImageDraw.Draw(picture), rng.integers(4, 40, 2).tolist()
    if kind == "drawing":
        for _ in range(4):
            draw.line(rng.integers(2, 62, 4).tolist(), fill="black")
    elif number % 2:
        draw.ellipse((x, y, x + 16, y + 16), fill="white")
    else:
        draw.line((x, y, x + 16, y + 16), fill="white", width=2)
        draw.line((x, y + 16, x + 16, y), fill="white", width=2)
    return picture


@pytest.mark.promise("data.near-duplicates")
@pytest.mark.parametrize("kind", ["white", "drawing", "patch"])
def test_sparse_transparent_and_smooth_pictures_are_alike_only_as_copies(tmp_path: Path, kind: str) -> None:
    rows = []
    for number in range(40):
        picture, part = sparse(kind, number), "train" if number % 2 else "valid"
        picture.save(tmp_path / f"{number}.png")
        rows.append({"image": f"{number}.png", "label": str(number % 2), "split": part})
        if number < 4:
            picture.resize((128, 128), Image.Resampling.BICUBIC).save(tmp_path / f"copy{number}.png")
            rows.append({**rows[-1], "image": f"copy{number}.png", "split": "valid" if part == "train" else "train"})
    (tmp_path / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = "\n".join(open_data(recipe_of(tmp_path / "images.jsonl"), None).lines())
    assert "held out 22 pictures: 4 near-duplicates" in lines
    assert "set data.near_duplicates=together" in lines


@pytest.mark.promise("data.near-duplicates")
def test_no_chain_ties_pictures_and_what_would_tie_many_is_not_advised(tmp_path: Path) -> None:
    one, last = (np.asarray(scene(seed)).astype(float) for seed in (1, 2))
    rows = []
    for number in range(30):  # each like those beside it
        mixed = one + (last - one) * number / 29
        Image.fromarray(mixed.astype(np.uint8)).save(tmp_path / f"{number}.png")
        rows.append({"image": f"{number}.png", "label": str(number % 2)})
    (tmp_path / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = "\n".join(open_data(recipe_of(tmp_path / "images.jsonl"), None).lines())
    assert "data.near_duplicates=together would tie" in lines
    assert "under another label: " in lines
    together = open_data(recipe_of(tmp_path / "images.jsonl", data={"near_duplicates": "together"}), None)
    assert (together.table.split == Split.HOLDOUT).any()
    tied = tie_alike(together.examples)
    assert 3 <= len(np.unique(tied)) <= 15
    again = tie_alike(together.examples[::-1])[::-1]
    assert np.array_equal(tied[:, None] == tied, again[:, None] == again), "the order of files does not matter"


def test_equal_copies_are_tied_and_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scenes = np.random.default_rng(0).integers(10, 250, (50, SIDE, SIDE, 4))
    copies = np.concatenate([np.repeat(scenes[:1], 400, 0), scenes, scenes[:20] + 3]).astype(np.uint8)
    tied = alike._tied(copies)
    assert len(np.unique(tied)) == 50
    assert np.array_equal(tied[400:420], tied[450:470])
    monkeypatch.setattr(alike, "BLOCK", 1)
    assert np.array_equal(alike._tied(copies), tied)
