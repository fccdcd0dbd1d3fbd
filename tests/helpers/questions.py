"""Questions about small pictures, and recipes and data of them."""

import json
from pathlib import Path
from typing import Any

from tests.helpers.pictures import write_folder
from unpad.data.family import open_data
from unpad.data.vqa import VqaData
from unpad.recipes.recipe import Recipe

SMALL = {
    "kind": "vision_language",
    "vision": {"patch": 8, "width": 16, "blocks": 1, "heads": 2, "hidden": 24, "feature_layer": -1},
    "language": {"width": 32, "blocks": 2, "heads": 2, "hidden": 48, "context": 256},
}
LONG = "Look at the picture for as long as you like and say in one single word whether it is dark or light?"


def write_questions(root: Path) -> Path:
    """Two questions about each of 24 pictures, some about two at once, some about none, some captions."""
    folder = write_folder(root)
    paths = sorted(folder.rglob("*.png"))
    rows: list[dict[str, Any]] = []
    for number, path in enumerate(paths):
        name, label = str(path.relative_to(folder)), path.parent.name
        rows.append({"image": name, "question": "亮不亮？", "answer": "亮" if label == "light" else "暗"})
        rows.append({"image": name, "question": LONG, "answers": [label, label, "dark"]})
        if number % 6 == 0:
            other = paths[-1 - number]
            both = [name, str(other.relative_to(folder))]
            rows.append(
                {"image": both, "question": "Are both alike?", "answer": "yes" if other.parent == path.parent else "no"}
            )
            rows.append({"image": None, "question": f"What is {number} plus 1?", "answer": f"number {number + 1}"})
            rows.append({"image": name, "caption": f"a {label} picture"})
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def recipe_of(file: Path, **sections: Any) -> Recipe:
    values: dict[str, Any] = {
        "data": {"vqa": str(file), "holdout": 0.25}, "model": SMALL, "precision": "fp32",
        "plan": {"tokens_per_step": 512, "tokens_per_micro": 512, "overflow": "error"},
        "train": {"max_epochs": 12, "threads": 1}, "optim": {"lr": 5e-3, "schedule": "constant"},
        "generate": {"max_new_tokens": 6},
    }  # fmt: skip
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields}
    return Recipe(**values)


def questions_of(recipe: Recipe) -> VqaData:
    return open_data(recipe, None)
