"""Planted troubles: the recipe and data each is made in, and the finding that must name it first or second."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.doctor import plants
from tests.helpers.families import images, patients, questions, text, write_rows
from tests.helpers.toy import SMALL_MODEL
from unpad.data.tokens.tokenizer import train_tokenizer
from unpad.recipes.data import TokenizerSettings

Recipe = Callable[..., Path]
Row = dict[str, Any]


@dataclass(frozen=True)
class Trouble:
    """One planted trouble.

    Args:
        code: the finding that names it; recipe: writes the recipe, with `sections` changed, and the data.
        plant: changes code; readings: of the machine, in place of those of a quiet core.
        is_more: whether benchmarks/doctor.py alone tries it.
    """

    name: str
    code: str
    recipe: Recipe = text
    sections: dict[str, Any] = field(default_factory=dict)
    plant: Callable[[pytest.MonkeyPatch], None] | None = None
    readings: dict[str, Any] = field(default_factory=dict)
    is_more: bool = False


# --------------------------------------------------------------------------- data


def with_other_tokenizer(folder: Path) -> Path:
    """The tokenizer of a run on English."""
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "while",
        "seven",
        "wizards",
        "make",
        "toxic",
        "brew",
        "for",
        "evil",
        "kings",
    ]
    english = [" ".join(words[i % 7 :] + words[: i % 5]) for i in range(200)]
    folder.mkdir(parents=True, exist_ok=True)
    made = train_tokenizer(TokenizerSettings(kind="bpe", vocab_size=400), english, [])
    (folder / "english.json").write_bytes(made.to_bytes())
    return text(folder, tokenizer={"kind": "file", "path": str(folder / "english.json")})


def with_held_out_rows(folder: Path) -> Path:
    """Half of the held-out texts are trained on too."""
    recipe = text(folder)
    rows = [json.loads(line) for line in (folder / "texts.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [{**row, "split": "train"} for row in rows] + [{**row, "split": "valid"} for row in rows[::3]]
    write_rows(folder / "texts.jsonl", rows)
    return recipe


def with_held_out_pictures(folder: Path) -> Path:
    """A third of the pictures are on both sides."""
    recipe = images(folder)
    paths = sorted((folder / "pictures").rglob("*.png"))
    rows = [{"image": str(path.relative_to(folder)), "label": path.parent.name, "split": "train"} for path in paths]
    manifest = write_rows(folder / "both.jsonl", rows + [{**row, "split": "valid"} for row in rows[::3]])
    return _pointed(recipe, "images", manifest)


def with_one_answer(folder: Path) -> Path:
    """All questions have the same answer."""
    recipe = questions(folder)
    file = folder / "pictures" / "questions.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    kept = [row for row in rows if "answer" in row and isinstance(row["image"], str)]
    write_rows(file, [{**row, "answer": "yes"} for row in kept])
    return recipe


def with_black_pictures(folder: Path) -> Path:
    """Every picture is one dark value throughout, whatever its class."""
    recipe = images(folder)
    for number, path in enumerate(sorted((folder / "pictures").rglob("*.png"))):
        Image.fromarray(np.full((16 + 8 * (number % 7), 24, 3), number, np.uint8)).save(path)
    return recipe


def with_rare_source(folder: Path) -> Path:
    """Conversations are drawn once where texts are drawn 400 times."""
    return text(
        folder,
        data={
            "text": [{"path": str(folder / "texts.jsonl"), "weight": 400}],
            "chat": [{"path": str(folder / "chats.jsonl"), "weight": 0.5}],
        },
        train={"max_epochs": 1, "max_steps": 100},
    )


# --------------------------------------------------------------------------- patients


def with_tables(
    tests: Callable[[list[Row]], list[Row]] | None = None, people: Callable[[list[Row]], list[Row]] | None = None
) -> Recipe:
    """Patients whose events or outcomes are changed, row by row."""

    def written(folder: Path, **sections: Any) -> Path:
        recipe = patients(folder, **sections)
        for name, change in (("tests", tests), ("people", people)):
            if change is not None:
                path = folder / "tables" / f"{name}.parquet"
                pq.write_table(pa.Table.from_pylist(change(pq.read_table(path).to_pylist())), path)
        return recipe

    return written


def is_ill(row: Row) -> bool:
    return bool(row["id"] % 3 == 0)


def with_hospice(rows: list[Row]) -> list[Row]:
    """The ill have an event that is written when the outcome is known."""
    ill = sorted({row["id"] for row in rows if is_ill(row)})
    return rows + [{"id": one, "days": -1, "test": "hospice", "value": None} for one in ill]


def with_discharge_status(rows: list[Row]) -> list[Row]:
    """A number of how the stay ended, 20 for death, is among the facts."""
    return [{**row, "discharge": 20 if row["status"] else 1 + row["age"] % 6} for row in rows]


def on_another_clock(rows: list[Row]) -> list[Row]:
    """Days are counted from the first visit of the study, and not from the landmark."""
    return [{**row, "days": row["days"] + 501} for row in rows]


def in_minutes(rows: list[Row]) -> list[Row]:
    """Minutes of some weeks stand in the column of days."""
    return [{**row, "days": row["days"] * 144} for row in rows]


def in_two_units(rows: list[Row]) -> list[Row]:
    """A laboratory reports one test in a unit of which 1 is 1,000 of the others'."""
    return [{**row, "value": row["value"] * 1000} if row["test"] == "b" and i % 20 == 0 else row
            for i, row in enumerate(rows)]  # fmt: skip


def with_numbered_codes(rows: list[Row]) -> list[Row]:
    """Codes hold the number of the order."""
    return [{**row, "test": f"{row['test']}-{i}"} for i, row in enumerate(rows)]


def at_two_sites(rows: list[Row]) -> list[Row]:
    """Every patient is in the tables of two hospitals, under two numbers."""
    both = rows + [{**row, "id": row["id"] + 3_000_000} for row in rows]
    return both + [{**row, "days": row["days"] - 600} for row in both] if "days" in rows[0] else both


def of_others(rows: list[Row]) -> list[Row]:
    """Outcomes are joined by the place in the file, and the file was sorted by another column."""
    order = np.random.default_rng(1).permutation(len(rows)).tolist()
    return [
        {**row, "status": rows[i]["status"], "futime": rows[i]["futime"]} for row, i in zip(rows, order, strict=True)
    ]


def hardly_ever(rows: list[Row]) -> list[Row]:
    """Within the horizon hardly an outcome comes."""
    return [{**row, "futime": 800} if row["status"] and row["id"] % 24 else row for row in rows]


WITH_DISCHARGE = [
    {"path": "tests.parquet", "time": "days", "code": "test"},
    {"path": "people.parquet", "static": ["age", "discharge"]},
]


def _pointed(recipe: Path, kind: str, file: str) -> Path:
    import yaml

    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    values["data"][kind] = file
    recipe.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
    return recipe


# --------------------------------------------------------------------------- the machine


def busy_neighbour() -> dict[str, Any]:
    """Another process takes a whole core of two, whatever this one does."""
    ticks = iter(range(0, 10**9, 1000))
    return {"cores": lambda: 2, "threads": lambda: 2, "busy_seconds": lambda: float(next(ticks))}


THREE_BLOCKS = {**SMALL_MODEL, "blocks": 3}
WIDE_CONTEXT = {**SMALL_MODEL, "context": 128}
GELU = {**SMALL_MODEL, "activation": "gelu", "bias": True}

# Named by the tables of patients alone, without a model.
OF_TABLES = [
    Trouble("a code of the outcome", "leaking_code", with_tables(with_hospice), is_more=True),
    Trouble("how the stay ended", "leaking_value", with_tables(people=with_discharge_status),
            {"data": {"events": WITH_DISCHARGE}}, is_more=True),
    Trouble("a landmark on another clock", "no_history", with_tables(on_another_clock), is_more=True),
    Trouble("minutes as days", "long_history", with_tables(in_minutes), is_more=True),
    Trouble("values in two units", "far_values", with_tables(in_two_units), is_more=True),
    Trouble("numbers of orders as codes", "rare_codes", with_tables(with_numbered_codes), is_more=True),
    Trouble("histories of one event", "cut_short", patients, {"events": {"max_events": 2}}, is_more=True),
]  # fmt: skip

TROUBLES = [
    Trouble("wrong shift", "targets_shifted", plant=plants.wrong_shift),
    Trouble("sees its target", "sees_target", sections={"model": {**SMALL_MODEL, "causal": False}}, is_more=True),
    Trouble("learning rate x 100", "lr_high", sections={"optim": {"lr": 2.0}}),
    Trouble("learning rate / 1000", "lr_low", sections={"optim": {"lr": 2e-5}}),
    Trouble("learning rate x 100, questions", "lr_high", questions, {"optim": {"lr": 2.0}}, is_more=True),
    Trouble("learning rate / 1000, questions", "lr_low", questions, {"optim": {"lr": 2e-5}}, is_more=True),
    Trouble("double BOS", "double_marks", plant=plants.double_bos),
    Trouble("labels on padding", "padding_labels", sections={"plan": {"strategy": "dynamic"}},
            plant=plants.labels_on_padding),
    Trouble("frozen by accident", "frozen", plant=plants.no_gradient),
    Trouble("a group without a rate", "frozen",
            sections={"optim": {"lr": 2e-2, "groups": [{"parameters": ["blocks.*"], "lr_scale": 0}]}}, is_more=True),
    Trouble("tokenizer of another run", "other_tokenizer", with_other_tokenizer),
    Trouble("one thread of two", "threads", readings={"cores": lambda: 2}),
    Trouble("more threads than cores", "too_many_threads", readings={"threads": lambda: 8}, is_more=True),
    Trouble("a quota of the control group", "too_many_threads",
            readings={"cores": lambda: 8, "threads": lambda: 8, "quota": lambda: 2.0}, is_more=True),
    Trouble("busy neighbour", "neighbour", readings=busy_neighbour()),
    Trouble("NaN in layer 3", "not_finite", sections={"model": THREE_BLOCKS}, plant=plants.nan_in_layer_3),
    Trouble("an infinite weight", "weights_not_finite", plant=plants.bad_weight, is_more=True),
    Trouble("dead gates", "dead_units", sections={"model": GELU}, plant=plants.dead_gates),
    Trouble("collapsed attention", "attention_sharp", plant=plants.collapsed_attention),
    Trouble("attention to all alike", "attention_uniform", images, plant=plants.uniform_attention, is_more=True),
    Trouble("weight decay x 1000", "decay", sections={"optim": {"lr": 2e-2, "weight_decay": 10.0}}),
    Trouble("held-out rows in training", "same_rows", with_held_out_rows),
    Trouble("held-out pictures in training", "same_rows", with_held_out_pictures, is_more=True),
    Trouble("labels shuffled, images", "labels_random", images, plant=plants.shuffled_images),
    Trouble("constant label", "constant_labels", with_one_answer),
    Trouble("black images", "constant_inputs", with_black_pictures),
    Trouble("clip 1e-6", "clip", sections={"optim": {"lr": 2e-2, "clip": 1e-6}}),
    Trouble("dropout 0.95", "dropout", sections={"model": {**SMALL_MODEL, "dropout": 0.95}}),
    Trouble("warm-up as long as the run", "warmup", sections={"optim": {"lr": 2e-2, "warmup": 0.99}}),
    Trouble("cut to almost nothing", "cut_short", sections={"plan": {"max_tokens": 2}}),
    Trouble("a swallowed source", "swallowed", with_rare_source),
    Trouble("slow loader", "loader", plant=plants.slow_loader, readings={"now": plants.late_clock}),
    Trouble("80 % padding", "padding", sections={"plan": {"strategy": "fixed"}, "model": WIDE_CONTEXT}),
    Trouble("overflow in fp16", "overflow", sections={"precision": "fp16"}, plant=plants.overflowing),
    Trouble("a checkpoint every step", "saving", sections={"checkpoint": {"every": 1}}, plant=plants.slow_disk,
            readings={"now": plants.late_clock}),
    Trouble("exploding norms", "exploding", plant=plants.exploding),
    Trouble("few steps", "few_steps", sections={"train": {"max_epochs": 1, "max_steps": 4}}, is_more=True),
    Trouble("an evaluation every step", "evaluating",
            sections={"data": {"holdout": 0.5}, "train": {"eval_every": 1, "max_epochs": 20}}, is_more=True),
    *OF_TABLES,
    Trouble("patients under two numbers", "same_rows", with_tables(at_two_sites, at_two_sites), is_more=True),
    Trouble("outcomes of others", "labels_random", with_tables(people=of_others), {"data": {"holdout": 0.7}}),
    Trouble("an outcome that hardly comes", "imbalance", with_tables(people=hardly_ever), is_more=True),
    Trouble("an outcome without weight", "starved", patients, {"losses": {"classification": 1e-4, "next_code": 1.0}}),
    Trouble("learning rate x 100, patients", "lr_high", patients, {"optim": {"lr": 0.6}}, is_more=True),
    Trouble("learning rate / 1000, patients", "lr_low", patients, {"optim": {"lr": 6e-6}}, is_more=True),
    Trouble("memory on the disk", "swap", readings={"swapped_bytes": lambda: 1 << 30}, is_more=True),
]  # fmt: skip
