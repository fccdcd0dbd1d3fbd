"""Small set of pictures drawn by code: shapes in colours, of every size and aspect, with questions about them.

The packaged image recipes train on it by default. Drawing is a pure function of the number below, so the set is the
same everywhere.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from unpad import storage

NUM_IMAGES = 1500
MANIFESTS, CHECKSUM = ("shapes.jsonl", "shapes_vqa.jsonl"), "shapes.sha256"
VERSION = 1  # of the drawing; a change makes a new folder
SHAPES = ("circle", "square", "triangle", "cross", "ring")
COLORS = {
    "red": (205, 45, 40), "green": (40, 150, 70), "blue": (45, 85, 200), "yellow": (235, 200, 50),
    "purple": (130, 60, 170), "black": (25, 25, 30),
}  # fmt: skip
CHINESE = {
    "circle": "圆形", "square": "正方形", "triangle": "三角形", "cross": "十字", "ring": "圆环",
    "red": "红色", "green": "绿色", "blue": "蓝色", "yellow": "黄色", "purple": "紫色", "black": "黑色",
}  # fmt: skip


def drawn_folder() -> Path:
    """Return the folder of the set (shapes.jsonl, shapes_vqa.jsonl and the pictures).

    It is drawn if it is missing, or if a picture is not as it was drawn. The checksum is written last, so a partial
    folder is drawn again.
    """
    folder = storage.cache_folder() / f"drawn-{VERSION}"
    if not _is_whole(folder):
        _draw_all(folder)
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        if not all((folder / name).is_file() for name in MANIFESTS):
            return False
        pictures = ((folder / "shapes" / _name(number)).read_bytes() for number in range(NUM_IMAGES))
        return (folder / CHECKSUM).read_text(encoding="utf-8") == _checksum(pictures)
    except (OSError, UnicodeDecodeError):
        return False


def _checksum(pictures: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for picture in pictures:
        digest.update(hashlib.sha256(picture).digest())
    return digest.hexdigest()


def _name(number: int) -> str:
    return f"{number:04d}.png"


def _draw_all(folder: Path) -> None:
    rng = np.random.default_rng(VERSION)
    storage.make_folder(folder, private=True)
    storage.make_folder(folder / "shapes")
    images: list[dict[str, Any]] = []
    questions: list[dict[str, Any]] = []
    pictures: dict[str, bytes] = {}
    for number in range(NUM_IMAGES):
        shape = SHAPES[int(rng.integers(len(SHAPES)))]
        color = list(COLORS)[int(rng.integers(len(COLORS)))]
        width, height = (int(8 * rng.integers(3, 13)) for _ in range(2))
        name = f"shapes/{_name(number)}"
        pictures[_name(number)] = _png(draw(shape, color, width, height, rng))
        split = "val" if number % 5 == 0 else "train"
        images.append({"image": name, "label": shape, "width": width, "height": height, "split": split})
        for question, answer in _questions(shape, color, width, height, rng):
            questions.append({"image": name, "question": question, "answer": answer, "split": split})
    storage.write_files(folder / "shapes", pictures)
    for file, rows in zip(MANIFESTS, (images, questions), strict=True):
        storage.write_atomic(folder / file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    storage.write_atomic(folder / CHECKSUM, _checksum(pictures.values()))


def _png(picture: Image.Image) -> bytes:
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()


def draw(shape: str, color: str, width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """Draw a shape at a random place and size on a pale ground with a little noise."""
    ground = rng.integers(200, 256, 3)
    noise = rng.integers(-6, 7, (height, width, 3))
    picture = Image.fromarray(np.clip(ground + noise, 0, 255).astype(np.uint8))
    radius = min(width, height) * rng.uniform(0.25, 0.45)
    x, y = (rng.uniform(radius, side - radius) for side in (width, height))
    box = (x - radius, y - radius, x + radius, y + radius)
    fill = tuple(int(value) for value in np.clip(np.array(COLORS[color]) + rng.integers(-15, 16, 3), 0, 255))
    pen = ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse(box, fill=fill)
    elif shape == "ring":
        pen.ellipse(box, outline=fill, width=max(2, round(radius / 3)))
    elif shape == "square":
        pen.rectangle(box, fill=fill)
    elif shape == "triangle":
        turns = (-math.pi / 2 + k * 2 * math.pi / 3 for k in range(3))
        pen.polygon([(x + radius * math.cos(turn), y + radius * math.sin(turn)) for turn in turns], fill=fill)
    else:
        thin = radius / 3
        pen.rectangle((x - thin, y - radius, x + thin, y + radius), fill=fill)
        pen.rectangle((x - radius, y - thin, x + radius, y + thin), fill=fill)
    return picture


def _questions(shape: str, color: str, width: int, height: int, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Choose two questions about a picture, of very unequal lengths."""
    known = [
        ("Which shape?", shape),
        ("图里是什么形状？", CHINESE[shape]),
        ("Look at the picture and name the color of the only shape in it. Answer with one word.", color),
        ("图形是什么颜色？", CHINESE[color]),
        ("Is the picture wider than it is high? Answer yes or no.", "yes" if width > height else "no"),
    ]
    return [known[int(i)] for i in rng.permutation(len(known))[:2]]
