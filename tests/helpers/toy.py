"""A tiny corpus and recipe that train in a second, for tests of whole runs."""

import json
import random
from collections.abc import Callable, Iterator
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from unpad.evaluation.metrics import HeldOut
from unpad.recipes.recipe import Recipe
from unpad.run import checkpoint
from unpad.run.report.history import read_log
from unpad.training.loop import Result, train

LOOP = import_module("unpad.training.stage_loop")  # tests replace its functions
WHO = ["小猫", "老师", "河水", "月亮", "春天", "书店", "火车", "爷爷"]
DOES = ["喜欢", "看见", "走过", "想起", "画出", "听到"]
WHAT = ["红色的花", "一座桥", "下雨的早晨", "很远的山", "新的一天", "安静的夜晚", "热茶"]
TWO_STAGES = [
    {"name": "pretrain", "use": ["text"], "train": {"max_epochs": 2}},
    {"name": "tune", "use": ["chat"], "optim": {"lr_scale": 0.5}, "train": {"max_epochs": 3}},
]
SMALL_MODEL = {"kind": "decoder", "width": 16, "blocks": 1, "heads": 2, "hidden": 24, "context": 64, "dropout": 0.1}


def quiet() -> Console:
    return Console(file=StringIO())


def write_toy(folder: Path, **sections: Any) -> Path:
    """Write 60 short texts, 40 conversations and a two-stage recipe; `sections` change sections of the recipe."""
    draw = random.Random(7)

    def sentence() -> str:
        return draw.choice(WHO) + draw.choice(DOES) + draw.choice(WHAT) + "。"

    texts = [{"text": "".join(sentence() for _ in range(1 + i % 4)) + f"第{i}篇"} for i in range(60)]
    chats = [
        {"messages": [{"role": "user", "content": f"{i}、{sentence()}"}, {"role": "assistant", "content": sentence()}]}
        for i in range(40)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("texts", texts), ("chats", chats)):
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    recipe: dict[str, Any] = {
        "data": {"text": str(folder / "texts.jsonl"), "chat": str(folder / "chats.jsonl"), "holdout": 0.1},
        "tokenizer": {"kind": "words", "vocab_size": 400},
        "model": SMALL_MODEL,
        "plan": {"tokens_per_step": 200, "tokens_per_micro": 90},
        "optim": {"lr": 1e-2},
        "stages": TWO_STAGES,
        "train": {"threads": 1},
        "checkpoint": {"every": 3},
        "generate": {"max_new_tokens": 6},
        "precision": "fp32",
    }
    for name, values in sections.items():
        recipe[name] = {**recipe.get(name, {}), **values} if isinstance(values, dict) else values
    return write_recipe(folder / "toy.yaml", recipe)


def write_recipe(path: Path, recipe: dict[str, Any]) -> Path:
    Recipe(**recipe)
    path.write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
    return path


def run(recipe: Path, folder: Path, *overrides: str, resume: bool = False) -> Result:
    return train(str(recipe), folder, list(overrides), resume=resume, console=quiet())


def scripted_heldout(losses: list[float]) -> Callable[..., HeldOut]:
    """Stands for the held-out evaluation: the given losses, one per check."""
    following: Iterator[float] = iter(losses)

    def held_out(*args: object) -> HeldOut:
        loss = next(following)
        return HeldOut(loss, {"loss": loss, "bits_per_char": loss}, 1)

    return held_out


def rows(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, all or of one kind."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if kind in (None, row["kind"])]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Entries of one kind in the log of a run."""
    return [entry for entry in read_log(folder) if entry["kind"] == kind]


def weights(folder: Path, name: str = "best") -> dict[str, torch.Tensor]:
    tensors = checkpoint.load(folder / "checkpoints" / name, ["model.*"]).tensors
    return {key.removeprefix("model."): value for key, value in tensors.items()}


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
