"""Near-duplicate pictures on both sides of the split are found and named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.pictures import recipe_of, write_scenes
from tests.helpers.questions import recipe_of as questions_recipe
from unpad.data.family import open_data
from unpad.data.images import ImageData
from unpad.data.pictures import alike
from unpad.data.pictures.alike import COLUMNS, ROWS, near_pictures, small_copies
from unpad.data.sources.split import Wanted
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
    places = {"images": ("images.jsonl:21", "images.jsonl:4"), "vqa": ("larger.png", "nd.png")}
    one, other = places[family]
    assert any(one in line and " is like " in line and line.endswith(other) for line in told.splitlines())


def test_small_copies_are_kept_and_a_changed_picture_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_scenes(tmp_path / "set")
    data = open_data(recipe_of(tmp_path / "set/images.jsonl"), None)
    assert isinstance(data, ImageData)
    first = small_copies(data.examples)
    assert first.shape == (26, ROWS, COLUMNS, 3)
    with monkeypatch.context() as patch:
        patch.setattr(alike, "decode", lambda *_: pytest.fail("decoded again"))
        assert np.array_equal(small_copies(data.examples), first)
    monkeypatch.setattr(alike, "MOST_PAIRS", 1)
    assert "pairs of equal brightness are too many" in data.album.pictures.lines()[0]
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
        "images": r"images\.jsonl:21 is like .*images\.jsonl:4\n",
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


def test_many_equal_pictures_are_tied_without_comparing_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    scenes = rng.integers(0, 250, (50, ROWS, COLUMNS, 3))
    copies = np.concatenate([np.repeat(scenes[:1], 400, 0), scenes, scenes[:20] + 3]).astype(np.uint8)
    monkeypatch.setattr(alike, "small_copies", lambda _: copies)
    monkeypatch.setattr(alike, "MOST_LINKS", 8)  # so that several rounds are joined
    found = list(alike._near(copies, np.ones(470, np.bool_), np.ones(470, np.bool_)))
    asked: list[int] = []
    near = alike._near

    def counting(kept: Any, held: Any, trained: Any) -> Any:
        asked.append(int(held.sum()))
        return near(kept, held, trained)

    monkeypatch.setattr(alike, "_near", counting)
    tied = alike.tie_alike([])
    assert asked == [70], "of 470 pictures 70 differ"
    assert len(np.unique(tied)) == 50
    assert all(len(np.unique(tied[np.append(others, row)])) == 1 for row, others, _ in found)
    assert np.array_equal(tied[400:420], tied[450:470])


def test_flat_pictures_of_other_colours_are_not_alike_and_blocks_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    flat = np.repeat(rng.integers(0, 255, (40, 1, 1, 3)), ROWS * COLUMNS, 1).reshape(40, ROWS, COLUMNS, 3)
    copies = np.concatenate([flat, rng.integers(0, 255, (60, ROWS, COLUMNS, 3))]).astype(np.uint8)
    copies[99] = copies[50]
    held = np.arange(100) >= 30
    held[50] = False
    found = near_pictures(copies, held, ~held)
    assert (99, 50) in found
    colours = copies.reshape(100, -1).astype(np.float64)
    assert all(np.abs(colours[one] - colours[other]).mean() <= 6 for one, other in found)
    monkeypatch.setattr(alike, "BLOCK", 50)
    assert near_pictures(copies, held, ~held) == found


def test_pictures_of_another_brightness_are_compared_as_far_as_they_may_be_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alike, "BLOCK", 1)  # a held-out picture at a time
    rng = np.random.default_rng(1)
    scenes = rng.integers(10, 230, (40, ROWS, COLUMNS, 3))
    copies = np.concatenate([scenes, *(scenes + shift for shift in (6, 5, -6, 7))]).astype(np.uint8)
    held = np.arange(200) >= 40
    found = near_pictures(copies, held, ~held)
    assert found == [(row, row % 40) for row in range(40, 160)], "colours that differ by 7 do so too much"
