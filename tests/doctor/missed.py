"""Troubles that the doctor once missed, planted by people who had not written its checks; and others of their kinds."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.doctor.troubles import Recipe, Row, Trouble, is_ill, with_tables
from tests.helpers.families import images, patients, questions, text, write_rows
from tests.helpers.toy import SMALL_MODEL


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


def scrambled(rows: list[Row]) -> list[Row]:
    """Texts of characters that were shuffled."""
    draw = np.random.default_rng(4)
    return [{"text": "".join(draw.permutation(list(row["text"] * 3)))} for row in rows]


def altered_copies(rows: list[Row]) -> list[Row]:
    """Held-out texts are training ones with one more character."""
    long = [row for row in rows if len(row["text"]) > 24]
    return [{**row, "split": "train"} for row in rows] + [
        {"text": row["text"] + "啊", "split": "valid"} for row in long
    ]


def other_language(rows: list[Row]) -> list[Row]:
    """Held-out texts are Russian."""
    draw = np.random.default_rng(5)
    words = ["сегодня", "хорошая", "погода", "старый", "парк", "много", "деревьев"]
    others = [{"text": " ".join(draw.permutation(words)) + ".", "split": "valid"} for _ in range(24)]
    return [*({**row, "split": "train"} for row in rows), *others]


def with_asked(answer: Callable[[Row, int], Row]) -> Recipe:
    """Questions about pictures, each row changed."""

    def written(folder: Path, **sections: Any) -> Path:
        recipe = questions(folder, **sections)
        file = folder / "pictures" / "questions.jsonl"
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        rows = [row for row in rows if "answer" in row and isinstance(row["image"], str)]
        write_rows(file, [answer(row, number) for number, row in enumerate(rows)])
        return recipe

    return written


def with_pictures_of_others(folder: Path, **sections: Any) -> Path:
    """Pictures are joined to questions by the place in a list that was sorted otherwise."""
    recipe = questions(folder, **{**sections, "data": {"holdout": 0.4}})
    file = folder / "pictures" / "questions.jsonl"
    paths = sorted(str(path.relative_to(folder / "pictures")) for path in (folder / "pictures").rglob("*.png"))
    draw = np.random.default_rng(3)
    rows = [{"image": name, "question": "亮不亮？", "answer": "亮" if draw.integers(2) else "暗"} for name in paths]
    for number in range(72):
        made = folder / "pictures" / f"more{number}.png"
        low = 150 * (number % 2)
        Image.fromarray(draw.integers(low, low + 100, (16, 16, 3)).astype(np.uint8)).save(made)
        rows.append({"image": made.name, "question": "亮不亮？", "answer": "亮" if draw.integers(2) else "暗"})
    write_rows(file, rows)
    return recipe


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


def as_dates(rows: list[Row]) -> list[Row]:
    """The value column holds the time of the test, in seconds since 1970."""
    return [{**row, "value": 1.7e9 + row["days"] * 86400.0} for row in rows]


def all_equal(rows: list[Row]) -> list[Row]:
    return [{**row, "value": 5.0 if row["value"] is not None else None} for row in rows]


def at_one_time(rows: list[Row]) -> list[Row]:
    """Dates are years alone."""
    return [{**row, "days": -30} for row in rows]


def in_html(content: str) -> str:
    return f'<p class="text">{content.replace("。", "。<br/>")}</p>&nbsp;'


HEADER = "本文版权所有，未经许可不得转载，违者必究。"
EXCUSE = "对不起，我暂时无法回答这个问题。"
ASKED = ["你去哪里？", "谁来了？", "今天怎么样？", "你为什么笑？", "几点了？"]

# Named by the tables of patients alone, without a model.
OF_MORE_TABLES = [
    Trouble("times as values", "dates_as_values", with_tables(as_dates), is_more=True),
    Trouble("values all equal", "equal_values", with_tables(all_equal), is_more=True),
    Trouble("all events at one time", "one_time", with_tables(at_one_time), is_more=True),
    Trouble("codes too rare to be known", "unknown_codes", patients, {"events": {"min_count": 100000}}, is_more=True),
]  # fmt: skip


def of_time(rows: list[Row]) -> list[Row]:
    """The column of values is that of times."""
    return [{**row, "value": float(row["days"])} for row in rows]


def of_patient(rows: list[Row]) -> list[Row]:
    """Every test has the weight of its patient as a value."""
    return [{**row, "value": 50.0 + row["id"] % 97 / 3} for row in rows]


def again_later(rows: list[Row]) -> list[Row]:
    """A second export has all events a day later."""
    made = [{**row, "value": row["value"] and round(row["value"], 4)} for row in rows]
    return made + [{**row, "days": row["days"] - 1} for row in made]


def longer_for_the_ill(rows: list[Row]) -> list[Row]:
    """The ill have a test in each of twelve days."""
    ill = sorted({row["id"] for row in rows if is_ill(row)})
    return rows + [{"id": one, "days": -day, "test": "b", "value": day / 7} for one in ill for day in range(1, 13)]


def often(rows: list[Row]) -> list[Row]:
    """Every test is taken three times."""
    return [{**row, "days": row["days"] - part, "value": row["value"] and row["value"] + part / 7}
            for row in rows for part in range(3)]  # fmt: skip


def hardly_followed(rows: list[Row]) -> list[Row]:
    """A few of the healthy were followed for much longer than the others."""
    return [{**row, "futime": 60_000} if not row["status"] and row["id"] % 10 == 0 else row for row in rows]


def with_record(rows: list[Row]) -> list[Row]:
    """A number of the record is among the facts."""
    return [{**row, "record": 10_000 + 3 * number} for number, row in enumerate(rows)]


def with_words(rows: list[Row]) -> list[Row]:
    return [{**row, "end": "dead" if row["status"] else "alive"} for row in rows]


WITH_RECORD = [
    {"path": "tests.parquet", "time": "days", "code": "test"},
    {"path": "people.parquet", "static": ["age", "record"]},
]
WORDS_REVERSED = {"path": "people.parquet", "label": "end", "map": {"dead": 0, "alive": 1}}
FAR_HORIZON = {"path": "people.parquet", "event": "status", "duration": "futime", "horizon": 50_000}

# Named by the tables of patients alone, without a model.
OF_COLUMNS = [
    Trouble("times in the column of values", "times_as_values", with_tables(of_time), is_more=True),
    Trouble("one value for all tests of a patient", "one_value", with_tables(of_patient), is_more=True),
    Trouble("a second export a day later", "events_twice", with_tables(again_later), is_more=True),
    Trouble("more events for the ill", "leaking_course", with_tables(longer_for_the_ill), is_more=True),
    Trouble("a number of the record among the facts", "id_value", with_tables(people=with_record),
            {"data": {"events": WITH_RECORD}}, is_more=True),
    Trouble("a landmark in another unit", "far_landmark", patients,
            {"events": {"landmark": 90_000, "labels": {"path": "people.parquet", "label": "status"}}}, is_more=True),
    Trouble("one set of a whole history", "one_set", with_tables(often), {"events": {"window": 100_000}}, is_more=True),
    Trouble("a map the wrong way round", "map_reversed", with_tables(people=with_words),
            {"events": {"labels": WORDS_REVERSED}}, is_more=True),
    Trouble("a horizon beyond the follow-up", "beyond_follow_up", with_tables(people=hardly_followed),
            {"events": {"labels": FAR_HORIZON}}, is_more=True),
]  # fmt: skip

MISSED = [
    Trouble("rate decays to nothing", "schedule",
            sections={"optim": {"lr": 2e-2, "schedule": "exponential", "decay": 1e-8, "decay_epochs": 0.2}}),
    Trouble("label smoothing 0.9", "smoothing", sections={"train": {"max_epochs": 12, "label_smoothing": 0.9}}),
    Trouble("all blocks frozen", "frozen_at_start", sections={"train": {"max_epochs": 12, "freeze": ["blocks.*"]}}),
    Trouble("only the head learns", "frozen_at_start", images,
            {"train": {"max_epochs": 20, "freeze": ["blocks.*", "patch_embed.*"]}}, is_more=True),
    Trouble("loss weight 1e5", "loss_weight", images, {"losses": {"cross_entropy": 1e5}}),
    Trouble("loss weight 1e5, patients", "loss_weight", patients, {"losses": {"next_code": 1e5}}, is_more=True),
    Trouble("weight of a class 1e4", "class_weight", patients,
            {"model": {"positive_weight": 1e4}}, is_more=True),
    Trouble("held-out texts in another language", "held_out_unlike", with_rows("texts", other_language)),
    Trouble("texts cut after 24 characters", "cut_alike",
            with_rows("texts", each_text(lambda one: f"{one[:-1]}，{one}"[:24])), is_more=True),
    Trouble("one excuse for most questions", "same_reply",
            with_rows("chats", spoken(lambda ask, say, i: (f"{i}：{ask}", EXCUSE if i % 4 else say))),
            {"data": {"text": []}}, is_more=True),
    Trouble("roles swapped", "swapped_roles",
            with_rows("chats", spoken(lambda ask, say, i: (say, f"{i}、{ASKED[i % 5]}"))), {"data": {"text": []}}),
    Trouble("UTF-8 read as Latin-1", "read_as",
            with_rows("texts", each_text(lambda one: one.encode().decode("latin-1")))),
    Trouble("UTF-8 read as GB18030", "read_as",
            with_rows("texts", each_text(lambda one: one.encode().decode("gb18030", "replace"))), is_more=True),
    Trouble("GBK read as Latin-1", "bytes_as_letters",
            with_rows("texts", each_text(lambda one: one.encode("gbk").decode("latin-1"))), is_more=True),
    Trouble("HTML in the texts", "markup", with_rows("texts", each_text(in_html)), is_more=True),
    Trouble("control characters", "unseen",
            with_rows("texts", each_text(lambda one: one.replace("的", "的\u200b\x03"))), is_more=True),
    Trouble("one header before every text", "common_part", with_rows("texts", each_text(lambda one: HEADER + one))),
    Trouble("one closing after every reply", "common_part",
            with_rows("chats", spoken(lambda ask, say, i: (ask, say + HEADER))), {"data": {"text": []}}, is_more=True),
    Trouble("the question holds the answer", "given_answer",
            with_rows("chats", spoken(lambda ask, say, i: (f"{ask}（{say}）", say))), {"data": {"text": []}}),
    Trouble("two answers to every question", "two_answers",
            with_rows("chats", spoken(lambda ask, say, i: (f"第{i // 2}个问题是什么？", say))), {"data": {"text": []}},
            is_more=True),
    Trouble("held-out texts with one more character", "near_rows", with_rows("texts", altered_copies)),
    Trouble("held-out pictures saved again", "near_rows", with_saved_again),
    Trouble("images.std 0.001", "picture_scale", images, {"images": {"std": [0.001] * 3}}),
    Trouble("images.std 1000", "picture_scale", images, {"images": {"std": [1000.0] * 3}}, is_more=True),
    Trouble("one token per picture", "one_patch", images, {"images": {"max_tokens": 1}}),
    Trouble("pictures of other questions", "labels_random", with_pictures_of_others, is_more=True),
    Trouble("a group at a millionth of the rate", "slow_group", sections={"optim": {
        "lr": 2e-2, "groups": [{"parameters": ["blocks.*"], "lr_scale": 1e-6}]}}, is_more=True),
    Trouble("letters in any order", "no_order", with_rows("texts", scrambled), is_more=True),
    Trouble("pictures all alike", "clashing_labels", with_each_picture(all_alike)),
    *OF_MORE_TABLES,
    *OF_COLUMNS,
    Trouble("the words of another tokenizer's pieces", "word_pieces",
            with_rows("texts", each_text(lambda one: " ".join(f"{part}@@" for part in one))), is_more=True),
    Trouble("plain text after conversations", "stage_order", sections={"stages": [
        {"name": "tune", "use": ["chat"], "train": {"max_epochs": 12}},
        {"name": "pretrain", "use": ["text"], "train": {"max_epochs": 12}}]}, is_more=True),
    Trouble("two hundred restarts", "many_restarts",
            sections={"optim": {"lr": 2e-2, "schedule": "restarts", "restarts": 200}}, is_more=True),
    Trouble("an evaluation after the end", "never_evaluated",
            sections={"train": {"max_epochs": 12, "patience": 2, "eval_every": 100000}}, is_more=True),
    Trouble("a feed-forward part of one channel", "narrow_hidden", sections={"model": {**SMALL_MODEL, "hidden": 1}},
            is_more=True),
    Trouble("norms with an epsilon of 1", "norm_eps", sections={"model": {**SMALL_MODEL, "eps": 1.0}}, is_more=True),
    Trouble("no prefix of replies", "no_prefix", sections={"data": {"template": {"assistant": ""}}}, is_more=True),
    Trouble("every picture mirrored", "augmentation", images, {"images": {"flip": 1.0}}, is_more=True),
    Trouble("rate 0.5 without clipping", "step_size", sections={"optim": {"lr": 0.5, "clip": None}}),
    Trouble("betas 0.999 and 0.5", "betas", sections={"optim": {"lr": 2e-2, "betas": [0.999, 0.5]}}),
    Trouble("epsilon 1", "eps", sections={"optim": {"lr": 2e-2, "eps": 1.0}}),
    Trouble("heads of two channels", "narrow_heads", sections={"model": {**SMALL_MODEL, "heads": 8}}, is_more=True),
    Trouble("a window of one token", "short_window", sections={"model": {**SMALL_MODEL, "sliding_window": 1}},
            is_more=True),
    Trouble("a vocabulary of bytes", "small_vocabulary", sections={"tokenizer": {"kind": "bpe", "vocab_size": 300}},
            is_more=True),
    Trouble("one sequence in a step", "tiny_steps", sections={"plan": {"tokens_per_step": 1, "tokens_per_micro": 64}},
            is_more=True),
    Trouble("nearly all held out", "held_out", sections={"data": {"holdout": 0.85}}, is_more=True),
    Trouble("progress of a nat", "ends_soon", sections={"train": {"max_epochs": 12, "patience": 1, "min_delta": 1.0}},
            is_more=True),
]  # fmt: skip
