"""Small healthy recipes of the four families, and a machine of one quiet core, for tests of the doctor.

Its clock counts the work of this process alone, so that no verdict depends on what else the machine does.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.patient_tables import FIRST, MODEL, write_tables
from tests.helpers.pictures import write_folder
from tests.helpers.questions import SMALL as SMALL_VQA
from tests.helpers.questions import write_questions
from tests.helpers.toy import SMALL_MODEL, write_recipe, write_toy
from unpad.doctor.examine import Examination, examine
from unpad.doctor.system import System

TEXT: dict[str, Any] = {
    "stages": [],
    "train": {"max_epochs": 12},
    "checkpoint": {"every": 50},
    "plan": {"tokens_per_micro": 200},
    "optim": {"lr": 2e-2},
}
SECONDS = 600.0  # more than any check takes, so that none is cut short on a busy machine


def quiet_machine(**readings: Any) -> System:
    """A machine of one core, on which nothing else works."""
    calm: dict[str, Any] = {
        "cores": lambda: 1, "quota": lambda: None, "threads": lambda: 1, "busy_seconds": time.process_time,
        "swapped_bytes": lambda: 0, "now": time.process_time,
    }  # fmt: skip
    return System(**{**calm, **readings})


def examined(recipe: Path, *overrides: str, system: System | None = None, seconds: float = SECONDS) -> Examination:
    return examine(str(recipe), overrides, seconds, system or quiet_machine())


def codes(found: Examination) -> list[str]:
    """Codes of the findings above a note, in their order."""
    return [one.code for one in found.troubles]


def text(folder: Path, **sections: Any) -> Path:
    """Chinese sentences and conversations; one stage on both."""
    return write_toy(folder, **{**TEXT, **sections})


def images(folder: Path, **sections: Any) -> Path:
    """Bright and dark pictures."""
    model = {"kind": "vit", "patch": 8, "width": 16, "blocks": 1, "heads": 2, "hidden": 24}
    recipe: dict[str, Any] = {
        "data": {"images": str(write_folder(folder / "pictures", 96)), "holdout": 0.4},
        "model": model,
        "plan": {"tokens_per_step": 128, "overflow": "error", "max_tokens": 64},
        "optim": {"lr": 2e-2},
        "train": {"max_epochs": 20, "threads": 1},
        "checkpoint": {"every": 50},
        "precision": "fp32",
    }
    return write_recipe(folder / "images.yaml", merged(recipe, sections))


def questions(folder: Path, **sections: Any) -> Path:
    """Questions about such pictures."""
    recipe: dict[str, Any] = {
        "data": {"vqa": str(write_questions(folder / "pictures")), "holdout": 0.25},
        "model": SMALL_VQA,
        "plan": {"tokens_per_step": 512, "tokens_per_micro": 512, "overflow": "error"},
        "optim": {"lr": 2e-2},
        "train": {"max_epochs": 12, "threads": 1},
        "checkpoint": {"every": 50},
        "precision": "fp32",
    }
    return write_recipe(folder / "vqa.yaml", merged(recipe, sections))


def patients(folder: Path, **sections: Any) -> Path:
    """Patients of whom a third is ill, and has higher values."""
    if not (folder / "tables").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_tables(folder / "tables", FIRST + np.arange(160))
    recipe: dict[str, Any] = {
        "data": {
            "root": str(folder / "tables"),
            "holdout": 0.4,
            "events": [
                {"path": "tests.parquet", "time": "days", "code": "test"},
                {"path": "people.parquet", "static": ["age"]},
            ],
        },
        "events": {
            "landmark": 0,
            "labels": {"path": "people.parquet", "event": "status", "duration": "futime", "horizon": 365},
        },
        "model": MODEL,
        "losses": dict.fromkeys(("reconstruction", "made_code", "next_code", "next_time", "next_value"), 0.0),
        "optim": {"lr": 6e-3},
        "plan": {"tokens_per_step": 200, "tokens_per_micro": 200},
        "train": {"max_epochs": 20, "threads": 1},
        "checkpoint": {"every": 50},
        "precision": "fp32",
    }
    return write_recipe(folder / "patients.yaml", merged(recipe, sections))


def merged(recipe: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    for name, values in sections.items():
        recipe[name] = {**recipe.get(name, {}), **values} if isinstance(values, dict) else values
    return recipe


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


__all__ = ["SMALL_MODEL", "codes", "examined", "images", "patients", "questions", "quiet_machine", "text", "write_rows"]


def rewritten(recipe: Path, sections: dict[str, Any]) -> Path:
    import yaml

    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields} if isinstance(fields, dict) else fields
    recipe.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    return recipe
