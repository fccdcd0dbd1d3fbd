"""Small folders of pictures, and recipes and data of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from unpad.batching.plan import Micro
from unpad.data.family import open_data
from unpad.data.images import ImageData
from unpad.recipes.recipe import Recipe

SMALL = {"kind": "vit", "patch": 8, "width": 16, "blocks": 1, "heads": 2, "hidden": 24}
SIZES = [(8, 8), (40, 16), (16, 40), (24, 24), (9, 30), (64, 8), (17, 17), (33, 12)]


def write_folder(root: Path, num: int = 24) -> Path:
    """Bright pictures in one folder, dark ones in another, of eight sizes."""
    rng = np.random.default_rng(0)
    for number in range(num):
        label, (width, height) = ("dark", "light")[number % 2], SIZES[number % len(SIZES)]
        low = 0 if label == "dark" else 150
        pixels = rng.integers(low, low + 100, (height, width, 3)).astype(np.uint8)
        path = root / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


def recipe_of(folder: Path, **sections: Any) -> Recipe:
    values: dict[str, Any] = {
        "data": {"images": str(folder), "holdout": 0.25}, "model": SMALL, "precision": "fp32",
        "plan": {"tokens_per_step": 64, "overflow": "error", "max_tokens": 64},
        "train": {"max_epochs": 8, "threads": 1},
    }  # fmt: skip
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields} if isinstance(fields, dict) else fields
    return Recipe(**values)


def write_recipe(path: Path, recipe: Recipe) -> str:
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    return str(path)


def images_of(recipe: Recipe, files: dict[str, bytes] | None = None) -> ImageData:
    return open_data(recipe, files)


def micro_of(data: ImageData, ids: list[int]) -> Micro:
    seqs = np.array(ids, np.int64)
    stops = data.table.positions[seqs].astype(np.int32)
    return Micro(seqs, np.zeros_like(stops), stops, np.zeros_like(stops), 0, 0)


def scene(seed: int, size: tuple[int, int] = (64, 48)) -> Image.Image:
    """A smooth picture, as photographs are."""
    coarse = np.random.default_rng(seed).integers(0, 255, (6, 6, 3)).astype(np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def write_scenes(root: Path) -> None:
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
