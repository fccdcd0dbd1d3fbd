"""The small healthy recipe of each family with its files, and a finished run of it.

`unpad doctor` finds nothing in these recipes (`tests/doctor/test_troubles.py`): they learn in seconds, with one thread.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.helpers import pictures
from tests.helpers.pairs import write_pairs
from tests.helpers.patient_tables import FIRST, MODEL, write_tables
from tests.helpers.questions import SMALL as SMALL_VQA
from tests.helpers.questions import write_questions
from tests.helpers.toy import run, write_recipe, write_toy

TEXT: dict[str, Any] = {
    "stages": [], "train": {"max_epochs": 12}, "checkpoint": {"every": 50}, "plan": {"tokens_per_micro": 200},
    "optim": {"lr": 2e-2},
}  # fmt: skip
PREFERENCES = [{"name": "answer", "use": ["chat"]}, {"name": "prefer", "use": ["pairs"], "optim": {"lr_scale": 0.5}}]


def text(folder: Path, **sections: Any) -> Path:
    """Chinese sentences and conversations; one stage on both."""
    return write_toy(folder, **{**TEXT, **sections})


def conversations(folder: Path, **sections: Any) -> Path:
    """Chinese conversations alone."""
    return text(folder, **{**sections, "data": {"text": [], **sections.get("data", {})}})


def pairs(folder: Path, **sections: Any) -> Path:
    """Chinese conversations, and then pairs of replies, one of which is right."""
    changed = merged(
        {name: TEXT[name] for name in ("checkpoint", "optim", "train")}, {"stages": PREFERENCES, **sections}
    )
    return write_pairs(folder, **{**changed, "data": {"chat": str(folder / "chats.jsonl"), **changed.get("data", {})}})


def images(folder: Path, num: int = 96, **sections: Any) -> Path:
    """Bright and dark pictures."""
    recipe: dict[str, Any] = {
        "data": {"holdout": 0.4},
        "model": pictures.SMALL,
        "plan": {"tokens_per_step": 128, "overflow": "error", "max_tokens": 64},
        "optim": {"lr": 2e-2},
        "train": {"max_epochs": 20, "threads": 1},
        "checkpoint": {"every": 50},
        "precision": "fp32",
    }
    if "images" not in sections.get("data", {}):
        recipe["data"]["images"] = str(pictures.write_folder(folder / "pictures", num))
    return write_recipe(folder / "images.yaml", merged(recipe, sections))


def questions(folder: Path, **sections: Any) -> Path:
    """Questions about such pictures."""
    recipe: dict[str, Any] = {
        "data": {"holdout": 0.25},
        "model": SMALL_VQA,
        "plan": {"tokens_per_step": 512, "tokens_per_micro": 512, "overflow": "error"},
        "optim": {"lr": 2e-2},
        "train": {"max_epochs": 12, "threads": 1},
        "checkpoint": {"every": 50},
        "precision": "fp32",
    }
    if "vqa" not in sections.get("data", {}):
        recipe["data"]["vqa"] = str(write_questions(folder / "pictures"))
    return write_recipe(folder / "vqa.yaml", merged(recipe, sections))


def patients(folder: Path, num: int = 160, **sections: Any) -> Path:
    """Patients of whom a third is ill, and has higher values."""
    if not (folder / "tables").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_tables(folder / "tables", FIRST + np.arange(num))
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


@dataclass(frozen=True)
class PatientsRun:
    """A run of patients, and its recipe, beside whose folder `tables` is."""

    recipe: Path
    run: Path

    @property
    def tables(self) -> Path:
        return self.recipe.parent / "tables"


@contextmanager
def patients_run(
    folder: Path, change: Callable[[list[dict[str, Any]]], None], **sections: Any
) -> Iterator[PatientsRun]:
    """A run of two steps on 60 patients, of whom `change` changes the rows of people in place."""
    recipe = patients(folder, num=60, train={"threads": 1, "max_steps": 2}, **sections)
    path = folder / "tables" / "people.parquet"
    people = pq.read_table(path).to_pylist()
    change(people)
    pq.write_table(pa.Table.from_pylist(people), path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNPAD_CACHE", str(folder / "cache"))
        run(recipe, folder / "run")
        yield PatientsRun(recipe, folder / "run")


FAMILIES: dict[str, Callable[..., Path]] = {
    "text": text, "conversations": conversations, "pairs": pairs, "images": images, "questions": questions,
    "patients": patients,
}  # fmt: skip


def merged(recipe: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """The recipe with fields of sections changed; a section that is None is left out."""
    for name, values in sections.items():
        recipe[name] = {**recipe.get(name, {}), **values} if isinstance(values, dict) else values
    return {name: values for name, values in recipe.items() if values is not None}


def rewritten(recipe: Path, sections: dict[str, Any]) -> Path:
    """The file of a recipe, with fields of sections changed."""
    values = merged(yaml.safe_load(recipe.read_text(encoding="utf-8")), sections)
    recipe.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    return recipe


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# --------------------------------------------------------------------------- finished runs

STEPS = 3  # of a run of one stage; pairs come in a second one, which is trained to its end
SHORT: dict[str, Any] = {"train": {"threads": 1, "max_epochs": 2, "eval_every": 2}, "checkpoint": {"every": 2}}


@dataclass(frozen=True)
class Family:
    """A recipe, a finished run of it, and the cache of its data; to be read, and copied."""

    recipe: Path
    run: Path
    cache: Path


class Finished:
    """Finished runs by family, each made when it is asked for first.

    Args:
        root: an empty folder for them.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, tuple[Family, dict[str, str]]] = {}

    def __call__(self, family: str) -> Family:
        """The finished run of a family of FAMILIES."""
        if family not in self._made:
            folder = self._root / family
            made = Family(FAMILIES[family](folder, **SHORT), folder / "run", folder / "cache")
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("UNPAD_CACHE", str(made.cache))
                run(made.recipe, made.run, *([] if family == "pairs" else [f"train.max_steps={STEPS}"]))
            self._made[family] = made, digests(folder)
        return self._made[family][0]

    def changed(self) -> list[str]:
        """Files that a test wrote, changed or removed, although all tests share them."""
        now = {family: (before, digests(self._root / family)) for family, (_, before) in self._made.items()}
        return [
            f"{family}/{name}"
            for family, (before, after) in now.items()
            for name in sorted(before.keys() | after.keys())
            if before.get(name) != after.get(name)
        ]


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file by its path, without the cache, which any test fills."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] != "cache"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
