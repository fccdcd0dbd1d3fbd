"""Marks of the class in a corner or border of pictures are told, and classes that show in pictures are not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.families import images, rewritten, write_rows
from unpad.doctor.data.pictures import check_regions
from unpad.doctor.subject import TimeBudget, open_subject

SHADES = [(255, 0, 255), (0, 255, 255), (255, 128, 0)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))


def found(tmp_path: Path, paint: Callable[[np.ndarray, int, bool], None], side: int = 48) -> list[str]:
    """Places of the findings on noise of three classes, painted by class and side of the split."""
    draw, rows = np.random.default_rng(2), []
    (tmp_path / "data").mkdir()
    for number in range(180):
        pixels = draw.integers(60, 200, (side, side, 3)).astype(np.uint8)
        is_held = number % 4 == 3
        paint(pixels, number % 3, is_held)
        Image.fromarray(pixels).save(tmp_path / "data" / f"p{number}.png")
        split = "valid" if is_held else "train"
        rows.append({"image": f"p{number}.png", "label": f"class {number % 3}", "split": split})
    recipe = rewritten(images(tmp_path / "data"), {"data": {"images": write_rows(tmp_path / "data" / "m.jsonl", rows)}})
    told = check_regions(open_subject(str(recipe), (), TimeBudget(600.0, time.monotonic)))
    assert all(one.severity == "warning" for one in told)
    return [str(one.values["place"]) for one in told]


def corner(pixels: np.ndarray, label: int, is_held: bool) -> None:
    if not is_held:
        pixels[-6:, -6:] = SHADES[label]


def border(pixels: np.ndarray, label: int, is_held: bool) -> None:
    for part in (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:]):
        part[:] = SHADES[label]


def watermark(pixels: np.ndarray, label: int, is_held: bool) -> None:
    """Letters that let the picture shine through."""
    if not is_held:
        for at in range(3):
            part = pixels[2 : 4 + 3 * label, 3 + 4 * at : 5 + 4 * at]
            part[:] = part // 4 + 190


def background(pixels: np.ndarray, label: int, is_held: bool) -> None:
    pixels[:] = pixels // 4 + 60 * label


def lamp(pixels: np.ndarray, label: int, is_held: bool) -> None:
    """One of three lamps at its own place is lit, as of a traffic light."""
    pixels[12 + 8 * label : 18 + 8 * label, 20:28] = SHADES[label]


def bar(pixels: np.ndarray, label: int, is_held: bool) -> None:
    """A bar of one colour anywhere, of another direction in each class."""
    at = int(pixels[0, 0, 0]) % 30
    pixels[(slice(at, at + 8), slice(None), slice(at, at + 14))[label]] = 20


@pytest.mark.promise("doctor.questions")
@pytest.mark.parametrize(
    ("paint", "place"),
    [(corner, "@at_lower_right"), (border, "@at_upper_left"), (watermark, "@at_upper_left")],
)
def test_a_mark_of_the_class_is_told(
    paint: Callable[[np.ndarray, int, bool], None], place: str, tmp_path: Path
) -> None:
    assert found(tmp_path, paint) == [place]


@pytest.mark.parametrize("paint", [background, lamp, bar])
@pytest.mark.parametrize("side", [16, 48])
def test_what_shows_in_both_sides_is_no_mark(
    paint: Callable[[np.ndarray, int, bool], None], side: int, tmp_path: Path
) -> None:
    assert found(tmp_path, paint, side) == []
