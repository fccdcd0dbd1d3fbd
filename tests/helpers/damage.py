"""Small finished runs of three families, and damages of every kind to their files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.helpers.toy import run, write_recipe, write_toy

WRONG: tuple[Any, ...] = (None, "x", -1, 10**400, [], {"a": [1]}, True, "\ud800", 1.5)
DEEP = b"[" * 100_000
SMALL = {"width": 16, "blocks": 1, "heads": 2}


def finished_runs(folder: Path) -> dict[str, Path]:
    """Train a run of a few steps for each of three families, in a folder of its own; {family: recipe}."""
    recipes = {"text": write_toy(folder / "text"), "images": _images(folder), "events": _events(folder)}
    for family, recipe in recipes.items():
        run(recipe, folder / "runs" / family, "train.max_steps=3")
    return recipes


def _images(folder: Path) -> Path:
    for number in range(16):
        path = folder / "pictures" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((16, 16 + number, 3), 10 * number, np.uint8)).save(path)
    model = {"kind": "vit", "patch": 8, "context": 32, "hidden": 24, **SMALL}
    plan = {"tokens_per_step": 60, "tokens_per_micro": 200, "overflow": "error"}
    data = {"images": str(folder / "pictures"), "holdout": 0.25}
    return write_recipe(folder / "images.yaml", _recipe(data, model, plan))


def _events(folder: Path) -> Path:
    draw = np.random.default_rng(0)
    lines = [
        f"{p},{3 * k},{'abcd'[draw.integers(4)]},{draw.normal():.3f}" for p in range(1, 25) for k in range(1 + p % 5)
    ]
    (folder / "events.csv").write_text("\n".join(["id,time,code,value", *lines]) + "\n")
    model = {"kind": "set_sequence", "levels": 1, "inducing": 2, "latent": 4, **SMALL}
    data = {"events": [{"path": str(folder / "events.csv"), "unit": "days"}], "holdout": 0.25}
    plan = {"tokens_per_step": 40, "tokens_per_micro": 200}
    more = {"losses": {"classification": 0}, "collapse": {"every": 1, "policy": "warn"}, "events": {"min_count": 1}}
    return write_recipe(folder / "events.yaml", {**_recipe(data, model, plan), **more})


def _recipe(data: dict[str, Any], model: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    train = {"threads": 1, "max_epochs": 2, "eval_every": 2}
    return {"data": data, "model": model, "plan": plan, "train": train, "precision": "fp32", "checkpoint": {"every": 2}}


def damage(path: Path, content: bytes | str | None) -> None:
    """Replace a file: by bytes, nothing (None), a "folder", a "pipe", a "device", or a link to itself ("loop")."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    match content:
        case bytes():
            path.write_bytes(content)
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path.name)


def damages(path: Path) -> Iterator[tuple[str, bytes | str | None]]:
    """Names and contents of damages to a file: every way of not being a readable text, and every field of its JSON."""
    data = path.read_bytes()
    wholes = {"empty": b"", "junk": bytes(range(256)), "deep": DEEP, "half": data[: len(data) // 2], "gone": None}
    yield from wholes.items()
    yield from ((kind, kind) for kind in ("folder", "pipe", "device", "loop"))
    if path.suffix == ".json":
        for name, value in mutations(json.loads(data)):
            yield name, json.dumps(value).encode()
    elif path.suffix == ".jsonl":
        lines, kinds = data.splitlines(keepends=True), set()
        for index, line in enumerate(lines):
            row = json.loads(line)
            if row.get("kind") not in kinds:
                kinds.add(row.get("kind"))
                for name, value in mutations(row, depth=2):
                    changed = [*lines[:index], json.dumps(value).encode() + b"\n", *lines[index + 1 :]]
                    yield f"{row.get('kind')} {name}", b"".join(changed)


def mutations(value: Any, depth: int = 3, turn: int = 0) -> Iterator[tuple[str, Any]]:
    """Names and results of changes to a JSON value: fields that are missing, and fields with a wrong value."""
    wrong = WRONG[turn % len(WRONG)]
    yield repr(wrong)[:10], wrong
    if depth == 0:
        return
    if isinstance(value, dict):
        for index, key in enumerate(value):
            yield f"without {key}", {name: one for name, one in value.items() if name != key}
            for name, inner in mutations(value[key], depth - 1, turn + index):
                yield f"{key}.{name}", {**value, key: inner}
    elif isinstance(value, list) and value:
        yield "shorter", value[:-1]
        for name, inner in mutations(value[-1], depth - 1, turn + 1):
            yield f"[-1].{name}", [*value[:-1], inner]
