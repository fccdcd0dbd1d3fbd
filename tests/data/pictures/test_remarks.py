"""Readable pictures that are of little use are named by check and training: dark, blank, of two labels, shrunk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.pictures import images_of, recipe_of, write_folder
from tests.helpers.shell import Shell
from unpad.data.check import check

Change = Callable[[Path], object]


def deep(most: int) -> Change:
    """Adds 24 pictures of 16 bits with values up to `most`."""

    def write(folder: Path) -> None:
        rng = np.random.default_rng(0)
        for number in range(24):
            pixels = rng.integers(0, most + 1, (12, 12 + number)).astype(np.uint16)
            pixels[0, 0] = most
            Image.fromarray(pixels).save(folder / ("dark", "light")[number % 2] / f"deep{number}.png")

    return write


def flat(name: str, mode: str, colour: tuple[int, ...], drawn: bool = False) -> Change:
    def write(folder: Path) -> None:
        picture = Image.new(mode, (20, 20), colour)
        if drawn:
            picture.paste((255, 255, 255, 255), (5, 5, 15, 15))
        (folder / name).parent.mkdir(exist_ok=True)
        picture.save(folder / name)

    return write


def copied(folder: Path) -> None:
    (folder / "light" / "again.png").write_bytes((folder / "dark" / "0.png").read_bytes())


def turned(folder: Path) -> None:
    """All pictures of one class are JPEG."""
    for path in sorted((folder / "light").glob("*.png")):
        Image.open(path).save(path.with_suffix(".jpg"))
        path.unlink()


CASES: dict[str, tuple[Change, str]] = {
    "8 bits in 16": (deep(248), "no value of 24 pictures of 16 bits reaches 256 of 65,535: black or nearly so"),
    "12 bits in 16": (deep(3968), "  do: set images.grey_bits=12 if they are grey"),
    "16 bits": (deep(9000), ""),
    "blank": (flat("dark/b.png", "RGB", (7, 8, 9)), "1 picture of one colour as the model sees them: {}/dark/b.png"),
    "white on nothing": (flat("dark/b.png", "RGBA", (255, 255, 255, 0), True), "1 picture of one colour as the"),
    "two labels": (copied, "1 picture under two labels: {0}/dark/0.png (dark) and {0}/light/again.png (light)"),
    "single": (flat("sofa/x.png", "RGB", (0, 0, 0)), "1 class of a single picture: sofa ({}/sofa/x.png)"),
    "kind of file": (turned, "warning: the kind of file of a picture alone tells the class of 100% of them"),
    "nothing": (lambda folder: None, ""),
}


@pytest.mark.promise("data.check")
@pytest.mark.parametrize("name", CASES)
def test_pictures_of_little_use_are_named_by_check_and_training(name: str, tmp_path: Path) -> None:
    change, expected = CASES[name]
    folder = write_folder(tmp_path / "set", 48)
    change(folder)
    of_folder = check(folder).notes
    trained = images_of(recipe_of(folder)).lines()  # of a model without opacity
    lines = [*of_folder, *(line for line in trained if line.startswith(("warning", "  do: set images")))]
    if not expected:
        assert not lines
        return
    expected = expected.format(folder)
    assert sum(expected in line for line in trained) == 1
    assert sum(expected in line for line in of_folder) == (name != "white on nothing")
    only = {line for line in lines if line.startswith("warning")}
    assert len(only) == (2 if name == "single" else 1), only


def test_grey_bits_read_pictures_of_fewer_bits_rightly(unpad: Shell, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "set", 4)
    deep(3968)(folder)
    assert "black or nearly so" in unpad("data", "check", "images", f"data.images={folder}", code=0).out
    settings = f"data.images={folder}", "images.grey_bits=12"
    assert "black or nearly so" not in unpad("data", "check", "images", *settings, code=0).out
    data = images_of(recipe_of(folder, images={"grey_bits": 12}))
    deepest = next(index for index, one in enumerate(data.examples) if one.path.name == "deep0.png")
    shown = data.album.picture(deepest)
    pixels = np.asarray(Image.open(data.examples[deepest].path))
    assert shown.shape[:2] == (16, 16)
    assert abs(float(shown.mean()) - float((pixels >> 4).mean())) < 4


@pytest.mark.parametrize(
    ("settings", "by"),
    [
        ({"max_tokens": 4}, "about 16 x 16 by images.max_tokens=4"),
        ({"size": "square", "square": 8}, "8 x 8 by images.square=8"),
    ],
)
def test_the_size_to_which_pictures_are_shrunk_is_told(settings: dict[str, object], by: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "set")
    recipe = recipe_of(folder, images=settings)
    line = next(line for line in images_of(recipe).lines() if "shrunk" in line)
    assert line.endswith(f"shrunk to {by}")
    assert " of 24 pictures, median " in line
    assert line in check(_written(tmp_path / "r.yaml", recipe.to_yaml())).notes
    assert not any("shrunk" in line for line in images_of(recipe_of(folder)).lines())


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
