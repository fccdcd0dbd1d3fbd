"""Near-duplicate pictures on both sides of the split are found and named."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.test_images import recipe_of
from tests.data.test_vqa import recipe_of as questions_recipe
from unpad.data import alike_pictures as alike
from unpad.data.alike_pictures import COLUMNS, ROWS, describe_alike, near_pictures, small_copies
from unpad.data.family import open_data
from unpad.data.images import ImageData


def scene(seed: int, size: tuple[int, int] = (64, 48)) -> Image.Image:
    """A smooth picture, as photographs are."""
    coarse = np.random.default_rng(seed).integers(0, 255, (6, 6, 3)).astype(np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def write(root: Path) -> None:
    """Twenty training pictures and six held-out ones, of which four are changed copies of training pictures."""
    root.mkdir()
    rows, questions = [], []
    for number in range(26):
        if number == 20:
            picture, name = scene(3, (128, 96)), "larger.png"
        elif number == 21:
            picture, name = scene(5), "quality.jpg"
        elif number == 22:
            pixels = np.asarray(scene(7)).astype(np.int16) + 4
            picture, name = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)), "brighter.png"
        elif number == 23:
            picture, name = scene(9).convert("RGBA"), "opaque.png"
        else:
            picture, name = scene(number), f"n{chr(97 + number)}.png"
        picture.save(root / name, **({"quality": 60} if name.endswith("jpg") else {}))
        row = {"image": name, "split": "valid" if number >= 20 else "train"}
        rows.append({**row, "label": str(number % 2)})
        questions.append({**row, "question": "what", "answer": str(number)})
    (root / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))


@pytest.mark.parametrize("family", ["images", "vqa"])
def test_other_sizes_qualities_and_shades_are_found_and_nothing_else(tmp_path: Path, family: str) -> None:
    write(tmp_path / "set")
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
    write(tmp_path / "set")
    data = open_data(recipe_of(tmp_path / "set/images.jsonl"), None)
    assert isinstance(data, ImageData)
    first = small_copies(data.examples)
    assert first.shape == (26, ROWS, COLUMNS, 3)
    with monkeypatch.context() as patch:
        patch.setattr(alike, "decode", lambda *_: pytest.fail("decoded again"))
        assert np.array_equal(small_copies(data.examples), first)
    everywhere = np.ones(26, np.bool_)
    monkeypatch.setattr(alike, "MOST_PIXELS", 1000)
    assert "are not looked for" in describe_alike(data.examples, everywhere, everywhere)[0]


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
