"""The drawn pictures are the same everywhere, and show what their labels say."""

import errno
import json
import os
from collections import Counter
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from unpad.errors import DiskError
from unpad.examples import drawn
from unpad.examples.drawn import CHINESE, COLORS, SHAPES, draw, drawn_folder
from unpad.storage import disk


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("color", COLORS)
def test_a_picture_shows_its_shape_in_its_colour(shape, color):
    pixels = np.asarray(draw(shape, color, 96, 80, np.random.default_rng(3))).astype(np.int64)
    inside = np.abs(pixels - COLORS[color]).max(-1) <= 15
    assert ((pixels >= 194).all(-1) | inside).all(), "all else is the pale ground"
    (top, bottom), (left, right) = (np.flatnonzero(inside.any(axis))[[0, -1]] for axis in (1, 0))
    height, width = bottom - top + 1, right - left + 1
    rows, columns = np.mgrid[top : bottom + 1, left : right + 1]
    y, x = (2 * (rows - top) + 1) / height - 1, (2 * (columns - left) + 1) / width - 1  # from -1 to 1
    radius = np.hypot(x, y)
    expected = {
        "circle": radius <= 1, "ring": (radius <= 1) & (radius >= 2 / 3), "square": np.ones_like(x, np.bool_),
        "triangle": np.abs(x) <= (y + 1) / 2, "cross": (np.abs(x) <= 1 / 3) | (np.abs(y) <= 1 / 3),
    }[shape]  # fmt: skip
    assert (inside[rows, columns] == expected).mean() > 0.94
    assert height == pytest.approx(width * (3 / 4 / (3**0.5 / 2) if shape == "triangle" else 1), abs=2)


def test_a_small_set_is_pinned_and_is_drawn_once(tmp_path, monkeypatch):
    """Other pictures under the same VERSION would make other runs of the packaged recipes."""
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path))
    monkeypatch.setattr(drawn, "NUM_IMAGES", 60)
    folder = drawn_folder()
    drawn_at = (folder / "shapes/0000.png").stat().st_mtime_ns
    assert (drawn_folder() / "shapes/0000.png").stat().st_mtime_ns == drawn_at, "a whole set is not drawn again"
    files = [folder / "shapes.jsonl", folder / "shapes_vqa.jsonl"]
    images, questions = ([json.loads(line) for line in file.read_text("utf-8").splitlines()] for file in files)
    assert Counter(row["split"] for row in images) == {"train": 48, "val": 12}
    assert [row["image"] for row in images] == [f"shapes/{number:04d}.png" for number in range(60)]
    pixels = b"".join(np.asarray(Image.open(folder / row["image"])).tobytes() for row in images)
    assert [sha256(part).hexdigest()[:16] for part in (*(file.read_bytes() for file in files), pixels)] == PINNED
    label = {row["image"]: row for row in images}
    for row in questions:
        known = label[row["image"]]
        assert row["split"] == known["split"]
        answers = {
            "Which shape?": known["label"],
            "图里是什么形状？": CHINESE[known["label"]],
            "Is the picture wider than it is high? Answer yes or no.": (
                "yes" if known["width"] > known["height"] else "no"
            ),
        }
        assert row["answer"] == answers.get(row["question"], row["answer"])
    assert len(questions) == 120


PINNED = ["8428a61441a223a6", "d18443fba6cfa177", "759ea5a0a08b055c"]  # the rows of both files, and the pixels


@pytest.mark.promise("input.drawn")
def test_a_picture_that_is_lost_emptied_or_zeroed_is_drawn_again(tmp_path, monkeypatch):
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path))
    monkeypatch.setattr(drawn, "NUM_IMAGES", 12)
    picture = drawn_folder() / "shapes/0007.png"
    sound = picture.read_bytes()
    for damage in (b"", bytes(len(sound)), sound[:-9], None):
        picture.unlink() if damage is None else picture.write_bytes(damage)
        assert drawn_folder() == picture.parents[1]
        assert picture.read_bytes() == sound
    for name in ("shapes.jsonl", "shapes_vqa.jsonl", "shapes.sha256"):
        (drawn_folder() / name).unlink()
        assert (drawn_folder() / name).is_file()


@pytest.mark.promise("input.drawn")
def test_pictures_are_flushed_before_the_files_that_name_them(tmp_path, monkeypatch):
    done: list[tuple[str, str]] = []
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path))
    monkeypatch.setattr(drawn, "NUM_IMAGES", 12)
    monkeypatch.setattr(disk, "operation", lambda name, path: done.append((name, path.name)))
    drawn_folder()
    renamed = [name for kind, name in done if kind == "rename"]
    assert sorted(renamed[:12]) == [f"{number:04d}.png" for number in range(12)]
    assert renamed[12:] == ["shapes.jsonl", "shapes_vqa.jsonl", "shapes.sha256"]
    before = done[: done.index(("rename", "shapes.jsonl"))]
    flushed = [kind == "fsync" and name.startswith(".tmp") for kind, name in before]
    assert sum(flushed) == 13, "every picture, and the first manifest"
    last = max(index for index, step in enumerate(done) if step == ("rename", renamed[11]))
    assert ("fsync", "shapes") in done[last : done.index(("rename", "shapes.jsonl"))], "the names of the pictures"
    assert not list(tmp_path.rglob(".tmp*"))


@pytest.mark.promise("input.drawn")
def test_a_full_disk_while_drawing_is_an_error_of_the_disk(tmp_path, monkeypatch):
    def fill(name: str, path: Path) -> None:
        if name == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path))
    monkeypatch.setattr(drawn, "NUM_IMAGES", 3)
    monkeypatch.setattr(disk, "operation", fill)
    with pytest.raises(DiskError, match="No space left"):
        drawn_folder()
    assert not list(tmp_path.rglob(".tmp*"))
