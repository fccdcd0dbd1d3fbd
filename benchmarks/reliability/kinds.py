"""Kinds of small runs that faults are tried on, each with data of its own: a second or two of training."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from tests.helpers.toy import write_recipe, write_toy

SHAPES = ("circle", "square")


def write_text(folder: Path) -> Path:
    """Texts and conversations in two stages, with dropout, micro-batches and evaluations inside of an epoch."""
    return write_toy(
        folder,
        plan={"tokens_per_step": 120, "tokens_per_micro": 70},
        stages=[
            {"name": "pretrain", "use": ["text"], "train": {"max_epochs": 2, "eval_every": 5}},
            {"name": "tune", "use": ["chat"], "optim": {"per": "epoch"}, "train": {"max_epochs": 2}},
        ],
    )


def write_images(folder: Path) -> Path:
    """Pictures of two classes and of many sizes."""
    _draw(folder)
    return write_recipe(
        folder / "images.yaml",
        {
            "data": {"images": str(folder / "pictures"), "holdout": 0.2},
            "images": {"max_tokens": 9},
            "model": {"kind": "vit", "patch": 8, "context": 16, "width": 16, "blocks": 1, "heads": 2, "hidden": 24},
            "plan": {"tokens_per_step": 60, "tokens_per_micro": 200, "overflow": "error"},
            **_common(lr=1e-3),
        },
    )


def write_vqa(folder: Path) -> Path:
    """A question about each of the pictures."""
    rows = [{"image": path, "question": "Which shape?", "answer": shape} for path, shape in _draw(folder)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    vision = {"patch": 8, "width": 16, "blocks": 1, "heads": 2, "hidden": 24, "feature_layer": -1}
    language = {"width": 16, "blocks": 1, "heads": 2, "hidden": 24, "context": 64}
    return write_recipe(
        folder / "vqa.yaml",
        {
            "data": {"vqa": str(folder / "questions.jsonl"), "holdout": 0.2},
            "tokenizer": {"kind": "words"},
            "images": {"max_tokens": 16},
            "model": {"kind": "vision_language", "vision": vision, "language": language},
            "plan": {"tokens_per_step": 256, "tokens_per_micro": 512, "overflow": "error"},
            "generate": {"max_new_tokens": 4},
            **_common(lr=1e-3),
        },
    )


def write_patients(folder: Path) -> Path:
    """Events of forty patients, and what became of them."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "events.csv").open("w", newline="") as events, (folder / "labels.csv").open("w", newline="") as ends:
        event, end = csv.writer(events), csv.writer(ends)
        event.writerow(["id", "time", "code", "value"])
        end.writerow(["id", "died", "days"])
        for patient in range(1, 41):
            for visit in range(int(rng.integers(1, 7))):
                time = visit * 3 + int(rng.integers(3))
                event.writerow([patient, time, "abcd"[int(rng.integers(4))], f"{rng.normal():.3f}"])
            end.writerow([patient, int(rng.random() < 0.5), int(rng.integers(20, 60))])
    labels = {"path": str(folder / "labels.csv"), "event": "died", "duration": "days", "horizon": 20}
    model = {"kind": "set_sequence", "width": 16, "heads": 2, "levels": 1, "inducing": 2, "latent": 8, "blocks": 1}
    return write_recipe(
        folder / "patients.yaml",
        {
            "data": {"events": [{"path": str(folder / "events.csv"), "unit": "days"}], "holdout": 0.2},
            "events": {"landmark": 15, "labels": {**labels, "censored": "keep"}},
            "model": model,
            "plan": {"tokens_per_step": 40, "tokens_per_micro": 200},
            **_common(lr=1e-3),
        },
    )


KINDS: dict[str, Callable[[Path], Path]] = {
    "text": write_text,
    "images": write_images,
    "patients": write_patients,
    "vqa": write_vqa,
}


def command(recipe: Path, folder: Path, *, resume: bool) -> list[str]:
    """Arguments of `unpad` that begin or go on with a run; one that does not exist yet may be resumed, too."""
    return ["train", str(recipe), "--out", str(folder), *["--resume"] * resume]


def _common(lr: float) -> dict[str, Any]:
    """Sections of a recipe that the kinds share."""
    train = {"threads": 1, "max_epochs": 2}
    return {"optim": {"lr": lr}, "train": train, "checkpoint": {"every": 2}, "precision": "fp32"}


def _draw(folder: Path) -> list[tuple[str, str]]:
    """Draw 24 pictures, each in the folder of its shape: their paths within `folder`, and shapes."""
    rng = np.random.default_rng(0)
    drawn = []
    for shape in SHAPES:
        (folder / "pictures" / shape).mkdir(parents=True, exist_ok=True)
        for number in range(12):
            width, height = (int(side) for side in rng.integers(16, 40, 2))
            picture = Image.new("RGB", (width, height), "white")
            pen, color = ImageDraw.Draw(picture), tuple(int(value) for value in rng.integers(0, 200, 3))
            (pen.ellipse if shape == "circle" else pen.rectangle)((3, 3, width - 4, height - 4), fill=color)
            path = f"pictures/{shape}/{number}.png"
            picture.save(folder / path)
            drawn.append((path, shape))
    return drawn
