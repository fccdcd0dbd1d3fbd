"""Planted troubles: the recipe and data each is made in, and the finding that must name it first or second."""

import io
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
from tests.helpers.families import images, patients, text, write_rows
from tests.helpers.toy import SMALL_MODEL

Recipe = Callable[..., Path]
Row = dict[str, Any]


@dataclass(frozen=True)
class Trouble:
    """One planted trouble.

    Args:
        code: the finding that names it; recipe: writes the recipe, with `sections` changed, and the data.
        plant: changes code; readings: of the machine, in place of those of a quiet core.
    """

    name: str
    code: str
    recipe: Recipe = text
    sections: dict[str, Any] = field(default_factory=dict)
    plant: Callable[[pytest.MonkeyPatch], None] | None = None
    readings: dict[str, Any] = field(default_factory=dict)


# --------------------------------------------------------------------------- data


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


def with_rows(name: str, change: Callable[[list[Row]], list[Row]]) -> Recipe:
    """The toy recipe with the rows of one of its files changed."""

    def written(folder: Path, **sections: Any) -> Path:
        recipe = text(folder, **sections)
        path = folder / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        write_rows(path, change(rows))
        return recipe

    return written


def each_text(change: Callable[[str], str]) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: [{**row, "text": change(row["text"])} for row in rows]


def spoken(change: Callable[[str, str, int], tuple[str, str]]) -> Callable[[list[Row]], list[Row]]:
    """Conversations of one question and its reply, changed together."""

    def changed(rows: list[Row]) -> list[Row]:
        made = []
        for number, row in enumerate(rows):
            question, reply = change(*(turn["content"] for turn in row["messages"]), number)
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
            made.append({"messages": turns})
        return made

    return changed


def altered_copies(rows: list[Row]) -> list[Row]:
    """Held-out texts are training ones with one more character."""
    long = [row for row in rows if len(row["text"]) > 24]
    return [{**row, "split": "train"} for row in rows] + [
        {"text": row["text"] + "啊", "split": "valid"} for row in long
    ]


def with_rare_words(rows: list[Row]) -> list[Row]:
    """Every text has twenty words of its own."""
    letters = np.random.default_rng(2).choice(list("abcdefghijklm"), (len(rows), 20, 8))
    return [{"text": f"{row['text']} {' '.join(map(''.join, own))}"} for row, own in zip(rows, letters, strict=True)]


def with_each_picture(change: Callable[[Path, int], None]) -> Recipe:
    def written(folder: Path, **sections: Any) -> Path:
        recipe = images(folder, **sections)
        for number, path in enumerate(sorted((folder / "pictures").rglob("*.png"))):
            change(path, number)
        return recipe

    return written


def all_alike(path: Path, number: int) -> None:
    """Every file is the same picture, whatever its class."""
    pixels = np.random.default_rng(0).integers(0, 255, (24, 24, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path)


def with_saved_again(folder: Path) -> Path:
    """Held-out pictures are training ones, saved as JPEG."""
    import yaml

    recipe = images(folder)
    rows, draw = [], np.random.default_rng(0)
    for number in range(60):
        label = ("dark", "light")[number % 2]
        coarse = draw.integers(0, 100, (4, 4, 3)) + 150 * (number % 2)
        picture = Image.fromarray(coarse.astype(np.uint8)).resize((32, 32), Image.Resampling.BICUBIC)
        path = folder / "pictures" / f"one{number}.png"
        picture.save(path)
        rows.append({"image": str(path.relative_to(folder)), "label": label, "split": "train"})
        if number % 3 == 0:
            raw = io.BytesIO()
            picture.save(raw, "JPEG", quality=80)
            path.with_suffix(".jpg").write_bytes(raw.getvalue())
            again = {"image": str(path.with_suffix(".jpg").relative_to(folder)), "label": label, "split": "valid"}
            rows.append(again)
    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    values["data"]["images"] = write_rows(folder / "both.jsonl", rows)
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    return recipe


def in_html(content: str) -> str:
    return f'<p class="text">{content.replace("。", "。<br/>")}</p>&nbsp;'


EXCUSE = "对不起，我暂时无法回答这个问题。"


def longer_for_the_ill(rows: list[Row]) -> list[Row]:
    """The ill have a test in each of twelve days."""
    ill = sorted({row["id"] for row in rows if is_ill(row)})
    return rows + [{"id": one, "days": -day, "test": "b", "value": day / 7} for one in ill for day in range(1, 13)]


def hardly_followed(rows: list[Row]) -> list[Row]:
    """A few of the healthy were followed for much longer than the others."""
    return [{**row, "futime": 60_000} if not row["status"] and row["id"] % 10 == 0 else row for row in rows]


THREE_BLOCKS = {**SMALL_MODEL, "blocks": 3}
CHAT = {"data": {"text": []}}
FAR_HORIZON = {"path": "people.parquet", "event": "status", "duration": "futime", "horizon": 50_000}

# Found without a trial, by the rows and the settings alone.
SEEN = [
    Trouble("sees its target", "sees_target", sections={"model": {**SMALL_MODEL, "causal": False}}),
    Trouble("held-out rows in training", "same_rows", with_held_out_rows),
    Trouble("held-out pictures in training", "same_rows", with_held_out_pictures),
    Trouble("patients under two numbers", "same_rows", with_tables(at_two_sites, at_two_sites)),
    Trouble("held-out texts with one more character", "near_rows", with_rows("texts", altered_copies)),
    Trouble("held-out pictures saved again", "near_rows", with_saved_again),
    Trouble("pictures all alike", "clashing_labels", with_each_picture(all_alike)),
    Trouble("two answers to every question", "clashing_labels",
            with_rows("chats", spoken(lambda ask, say, i: (f"第{i // 2}个问题是什么？", say))), CHAT),
    Trouble("one excuse for most questions", "constant_labels",
            with_rows("chats", spoken(lambda ask, say, i: (f"{i}：{ask}", EXCUSE if i % 4 else say))), CHAT),
    Trouble("an outcome that hardly comes", "constant_labels", with_tables(people=hardly_ever)),
    Trouble("cut to almost nothing", "cut_short", sections={"plan": {"max_tokens": 2}}),
    Trouble("histories of one event", "cut_short", patients, {"events": {"max_events": 2}}),
    Trouble("a code of the outcome", "leak", with_tables(with_hospice)),
    Trouble("how the stay ended", "leak", with_tables(people=with_discharge_status),
            {"data": {"events": WITH_DISCHARGE}}),
    Trouble("more events for the ill", "leak", with_tables(longer_for_the_ill)),
    Trouble("a landmark on another clock", "no_history", with_tables(on_another_clock)),
    Trouble("a horizon beyond the follow-up", "no_history", with_tables(people=hardly_followed),
            {"events": {"labels": FAR_HORIZON}}),
    Trouble("values in two units", "far_values", with_tables(in_two_units)),
    Trouble("numbers of orders as codes", "rare_codes", with_tables(with_numbered_codes)),
    Trouble("codes too rare to be known", "rare_codes", patients, {"events": {"min_count": 100000}}),
    Trouble("a vocabulary of words seen once", "tokenizer", with_rows("texts", with_rare_words),
            {"data": {"chat": []}, "tokenizer": {"vocab_size": 4000}}),
    Trouble("UTF-8 read as Latin-1", "garbled",
            with_rows("texts", each_text(lambda one: one.encode().decode("latin-1")))),
    Trouble("UTF-8 read as GB18030", "garbled",
            with_rows("texts", each_text(lambda one: one.encode().decode("gb18030", "replace")))),
    Trouble("GBK read as Latin-1", "garbled",
            with_rows("texts", each_text(lambda one: one.encode("gbk").decode("latin-1")))),
    Trouble("HTML in the texts", "garbled", with_rows("texts", each_text(in_html))),
    Trouble("control characters", "garbled",
            with_rows("texts", each_text(lambda one: one.replace("的", "的\u200b\x03")))),
    Trouble("texts cut after 24 characters", "cut_alike",
            with_rows("texts", each_text(lambda one: f"{one[:-1]}，{one}"[:24]))),
    Trouble("the question holds the answer", "given_answer",
            with_rows("chats", spoken(lambda ask, say, i: (f"{i}{ask}（{say}{i}）", f"{say}{i}"))), CHAT),
    Trouble("rate decays to nothing", "schedule",
            sections={"optim": {"lr": 2e-2, "schedule": "exponential", "decay": 1e-8, "decay_epochs": 0.2}}),
    Trouble("two hundred restarts", "schedule",
            sections={"optim": {"lr": 2e-2, "schedule": "restarts", "restarts": 200}}),
    Trouble("few steps", "few_steps", sections={"train": {"max_epochs": 1, "max_steps": 4}}),
    Trouble("all blocks frozen", "frozen_at_start", sections={"train": {"max_epochs": 12, "freeze": ["blocks.*"]}}),
    Trouble("only the head learns", "frozen_at_start", images,
            {"train": {"max_epochs": 20, "freeze": ["blocks.*", "patch_embed.*"]}}),
    *(Trouble(f"extreme: {name}", "extreme", recipe, sections) for name, recipe, sections in (
        ("smoothing", text, {"train": {"max_epochs": 12, "label_smoothing": 0.9}}),
        ("dropout", text, {"model": {**SMALL_MODEL, "dropout": 0.95}}),
        ("weight of a term", images, {"losses": {"cross_entropy": 1e5}}),
        ("mirrored", images, {"images": {"flip": 1.0}}),
        ("betas", text, {"optim": {"lr": 2e-2, "betas": [0.999, 0.5]}}),
        ("epsilon", text, {"optim": {"lr": 2e-2, "eps": 1.0}}),
        ("clipping", text, {"optim": {"lr": 2e-2, "clip": 1e-6}}),
        ("weight decay", text, {"optim": {"lr": 2e-2, "weight_decay": 10.0}}),
        ("warm-up", text, {"optim": {"lr": 2e-2, "warmup": 0.99}}),
        ("a slow group", text, {"optim": {"lr": 2e-2, "groups": [{"parameters": ["blocks.*"], "lr_scale": 1e-6}]}}),
        ("a window of one token", text, {"model": {**SMALL_MODEL, "sliding_window": 1}}),
    )),
]  # fmt: skip

# Found by trials of the model, or by layers and the machine.
TRIED = [
    Trouble("learning rate x 100", "lr_high", sections={"optim": {"lr": 2.0}}),
    Trouble("learning rate / 1000", "lr_low", sections={"optim": {"lr": 2e-5}}),
    Trouble("frozen by a group without a rate", "frozen",
            sections={"optim": {"lr": 2e-2, "groups": [{"parameters": ["blocks.*"], "lr_scale": 0}]}}),
    Trouble("one thread of two", "threads", readings={"cores": lambda: 2}),
    Trouble("a quota of the control group", "threads",
            readings={"cores": lambda: 8, "threads": lambda: 8, "quota": lambda: 2.0}),
    Trouble("NaN in layer 3", "not_finite", sections={"model": THREE_BLOCKS}, plant=plants.nan_in_layer_3),
    Trouble("an infinite weight", "not_finite", plant=plants.bad_weight),
    Trouble("overflow in fp16", "not_finite", sections={"precision": "fp16"}, plant=plants.overflowing),
    Trouble("exploding norms", "exploding", plant=plants.exploding),
    Trouble("labels shuffled, images", "labels_random", images, plant=plants.shuffled_images),
    Trouble("outcomes of others", "labels_random", with_tables(people=of_others), {"data": {"holdout": 0.7}}),
    Trouble("slow loader", "loader", plant=plants.slow_loader, readings={"now": plants.late_clock}),
]  # fmt: skip
