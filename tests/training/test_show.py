"""Sequences are shown as the batches of training hold them: learnt tokens, pictures, histories, what is left out."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.helpers import families
from tests.helpers.pairs import rows, write_pairs
from unpad.batching.batch import RaggedBatch
from unpad.data.family import open_data
from unpad.data.pixels.patches import unpatch
from unpad.models import model_config
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import stages_of
from unpad.terminal.table import number_of
from unpad.training.stage import StageSetup, epoch_plan, make_stage

CHATS = [
    [("user", "When do you open?"), ("assistant", "At nine.")],
    [("system", "Be brief."), ("user", "And on Sunday?"), ("assistant", "No.\nClosed."), ("user", "Why?")],
    [("user", "Type <|eos|>"), ("assistant", "我不要。"), ("user", "Go on"), ("assistant", "I am done.")],
]
SHOWN = """\
chat, by the recipe chat: 3 sequences to train on; learnt tokens are [[ ]]

my.jsonl:1
  25 tokens, 9 learnt
    <|bos|><|user|>When do you open?<|assistant|>[[At nine.<|eos|>]]
"""


def write_chats(path: Path, split: str = "train") -> Path:
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat], "split": split} for chat in CHATS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def stages(recipe: Path | str, *overrides: str) -> list[StageSetup]:
    loaded = load_recipe(str(recipe), overrides)
    data = open_data(loaded, None)
    return [make_stage(stage, data, model_config(loaded.model).longest) for stage in stages_of(loaded)]


def batches(stage: StageSetup) -> Iterator[tuple[RaggedBatch, int]]:
    """Every piece of the first epoch's plan, as the loader builds its micro-batches, and where it ends."""
    plan = epoch_plan(stage, 0)
    for step in range(plan.num_steps):
        for micro in plan.step(step):
            batch = stage.data.load(micro)
            yield from ((batch.select([place]), stop) for place, stop in enumerate(micro.stops.tolist()))


def marked(stage: StageSetup, batch: RaggedBatch, stop: int) -> list[tuple[int, bool]]:
    """Bytes of the tokens of a batch of one sequence without its pictures, each with whether the loss counts it."""
    data: Any = stage.data
    assert batch.input_ids is not None
    assert batch.seq_ids is not None
    last = batch.labels[-1] if batch.loss_mask[-1] else data.tokens_of(int(batch.seq_ids[0]))[stop]
    tokens = list(zip([*batch.input_ids.tolist(), int(last)], [False, *batch.loss_mask.tolist()], strict=True))
    of_pictures = [] if batch.media_index is None else batch.media_index.tolist()
    names = {id: name.encode() for id, name in data.tokenizer.specials.items()}
    return [
        (byte, counts)
        for place, (id, counts) in enumerate(tokens)
        if place not in of_pictures
        for byte in names.get(id) or data.tokenizer.pieces[id]
    ]


@pytest.mark.promise("data.show")
@pytest.mark.parametrize("family", ["text", "conversations", "pairs", "questions"])
def test_learnt_tokens_are_those_that_the_loss_counts(unpad, tmp_path, family):
    recipe = families.FAMILIES[family](tmp_path / "made")
    overrides = ["plan.max_tokens=20"] if family in ("text", "conversations") else []
    shown = json.loads(unpad("data", "show", recipe, "-n", 500, "--json", *overrides, code=0).out)
    of_text = [[span for span in one["spans"] if not span["text"].startswith("<picture")] for one in shown]
    found = [[(byte, span["learnt"]) for span in spans for byte in span["text"].encode()] for spans in of_text]
    expected = [marked(stage, batch, stop) for stage in stages(recipe, *overrides) for batch, stop in batches(stage)]
    assert len(found) > 30
    if family == "pairs":
        many = write_pairs(tmp_path / "many", rows(90))
        better, worse = json.loads(unpad("data", "show", many, "-n", 2, "--json", code=0).out)
        assert better["where"].replace("chosen", "rejected") == worse["where"]
    assert sorted(found) == sorted(expected)


@pytest.mark.promise("data.show")
def test_a_file_is_shown_by_the_recipe_of_its_kind(unpad, tmp_path, monkeypatch):
    write_chats(tmp_path / "my.jsonl")
    shown = unpad("data", "show", "my.jsonl", code=0).out
    assert shown.startswith(SHOWN)
    assert "<|user|>Type <|eos|><|assistant|>[[我不要。<|eos|>]]<|user|>Go on" in shown.replace("\n    ", " ")
    assert "[[No.\n    Closed.<|eos|>]]<|user|>Why?\n" in shown
    first = unpad("data", "show", "my.jsonl", "-n", "1", code=0).out
    assert "the first 1 of 3 sequences to train on" in first
    assert "my.jsonl:2" not in first
    (spans,) = (one["spans"] for one in json.loads(unpad("data", "show", "my.jsonl", "--json", "--row", 3).out))
    assert [span["text"] for span in spans if span["special"]].count("<|eos|>") == 2, "the one that was typed is text"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32mAt nine.<|eos|>\x1b[0m" in unpad("data", "show", "my.jsonl", code=0).out


@pytest.mark.promise("data.show")
@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("plan.max_tokens=20", "piece 1 of 2: tokens 1 to 20 of 24|piece 2 of 2: tokens 21 to 24 of 24"),
        (
            "plan.max_tokens=20 plan.stride=15",
            "piece 1 of 2: tokens 1 to 20 of 24|piece 2 of 2: tokens 16 to 24 of 24|the first 5 tokens are repeated",
        ),
        ("plan.max_tokens=20 plan.overflow=truncate_right", "cut: 4 of 24 tokens, after 20"),
        ("plan.max_tokens=20 plan.overflow=truncate_left", "cut: 4 of 24 tokens, before 5"),
        ("plan.max_tokens=20 plan.overflow=drop", "in no step: what is longer is dropped"),
    ],
)
def test_what_is_cut_is_said(unpad, tmp_path, words, facts):
    write_chats(tmp_path / "my.jsonl")
    shown = unpad("data", "show", "my.jsonl", "--row", 1, *words.split(), code=0).out
    assert all(f"  {fact}" in shown for fact in facts.split("|"))
    joined = unpad("data", "show", "my.jsonl", "plan.cross_documents=true", code=0).out
    assert "my.jsonl:1 to my.jsonl:3\n" in joined
    last = unpad("data", "show", "my.jsonl", "plan.cross_documents=true", "plan.max_tokens=20", "--row", 3, code=0).out
    assert "Type" in last
    assert "piece 1 of" not in last


@pytest.mark.promise("data.show")
def test_the_middle_of_long_texts_is_left_out_where_several_are_shown(unpad, tmp_path):
    numbers = " ".join(map(str, range(250)))
    (tmp_path / "long.txt").write_text(numbers)
    first, whole = (
        unpad("data", "show", "long.txt", *words, code=0).out.replace("\n    ", " ") for words in ([], ["--row", 1])
    )
    assert f"[[{numbers[:300]} ... 439 characters ... {numbers[-150:]}<|eos|>]]" in first
    assert f"[[{numbers}<|eos|>]]" in whole
    cut = unpad("data", "show", "long.txt", "plan.max_tokens=200", code=0).out
    assert re.match(r"text, by the recipe small: the first \d pieces of 1 sequence to train on", cut)


@pytest.mark.promise("data.show")
def test_a_row_of_another_part_is_shown_as_such_and_others_are_refused(unpad, tmp_path):
    write_chats(tmp_path / "my.jsonl")
    for part, said in (("valid", "valid: held out, never learnt"), ("test", "test: held out, never learnt")):
        write_chats(tmp_path / "other.jsonl", split=part)
        both = ("data", "show", "chat", "data.chat=[my.jsonl, other.jsonl]")
        assert f"other.jsonl:2\n  {said}\n" in unpad(*both, "--row", "other.jsonl:2", code=0).out
        assert "other.jsonl" not in unpad(*both, code=0).out
    recipe = families.questions(tmp_path / "made")
    file = tmp_path / "made" / "pictures" / "questions.jsonl"
    file.write_text(file.read_text(encoding="utf-8").replace("}", ', "split": "test"}', 1), encoding="utf-8")
    assert "test: held out, never learnt" in unpad("data", "show", recipe, "--row", 1, code=0).out
    assert "--row my.jsonl:2" in unpad(*both, "--row", 2, code=2).err
    with (tmp_path / "my.jsonl").open("a", encoding="utf-8") as file:
        file.write("no JSON\n")
    assert "my.jsonl:3\n" in unpad("data", "show", "my.jsonl", "--row", 3, code=0).out, "whatever is wrong with others"
    for words, code, said in (
        (["nofile.jsonl"], 3, "there is no such file"),
        (["my.jsonl"], 3, "E_JSON"),
        (["my.jsonl", "--row", 9], 2, "no row begins there"),
        (["my.jsonl", "--row", 4], 3, "was left out: E_JSON"),
        (["nowhere"], 2, "no run and no recipe"),
        ([tmp_path / "made" / "pictures" / "dark" / "0.png"], 3, "one picture is no data"),
    ):
        assert said in unpad("data", "show", *words, code=code).err


@pytest.mark.promise("data.show")
def test_pictures_are_those_that_the_model_gets(unpad, tmp_path):
    recipe = families.images(tmp_path / "made", images={"flip": 0.5, "scale": 0.5, "max_tokens": 9})
    shown = {one["where"]: one for one in json.loads(unpad("data", "show", recipe, "-n", 500, "--json", code=0).out)}
    (stage,) = stages(recipe)
    settings, num = stage.recipe.images, 0
    for batch, _ in batches(stage):
        assert batch.seq_ids is not None
        assert batch.grid is not None
        assert batch.inputs_embeds is not None
        rows, columns = batch.grid[0].tolist()
        one, num = shown[stage.data.where(int(batch.seq_ids[0]))], num + 1
        assert np.array_equal(pixels(one), unpatch(batch.inputs_embeds.numpy(), (rows, columns), 8, settings))
        with Image.open(one["where"]) as picture:
            width, height = picture.size
        assert f"class {Path(one['where']).parent.name}" in one["facts"]
        sizes = f"{width} x {height} pixels (colour) in the file, {columns * 8} x {rows * 8} (colours) for the model: "
        assert f"{sizes}{number_of(rows * columns, 'patches')} of 8 x 8" in one["facts"]
    assert num == len(shown) > 40


def pixels(one: dict[str, Any]) -> np.ndarray:
    (address,) = one["pictures"]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))))


@pytest.mark.promise("data.show")
def test_a_history_ends_at_the_landmark_and_says_what_is_left_out(unpad, tmp_path):
    (tmp_path / "tests.csv").write_text(
        "id,time,code,value\n"
        "1,-9,a,4\n1,-9,b,\n1,-5,a,2\n1,-2,c,1\n1,0,a,6\n1,3,a,8\n"
        "2,-4,a,4\n3,-4,a,5\n4,-4,b,\n5,-4,a,3\n"
    )
    (tmp_path / "people.csv").write_text("id,died\n1,1\n2,0\n3,0\n4,1\n5,0\n")
    words = (
        "data.events={path: tests.csv, unit: days}", "events.labels={path: people.csv, label: died}", "data.holdout=0",
        "events.landmark=0", "events.max_events=3", "events.scale=standard", "events.min_count=2",
        "events.unknown_codes=skip",
    )  # fmt: skip
    (one,) = json.loads(unpad("data", "show", "events_labels", *words, "--row", 1, "--json", code=0).out)
    assert "patient" in one["where"]
    assert one["facts"] == [
        "label 1",
        "2 events in 2 sets; left out: 1 after the landmark, 1 of unknown codes, 2 beyond events.max_events",
    ]
    assert one["heads"] == ["set", "day", "code", "value", "as read"]
    assert [row[:4] for row in one["rows"]] == [["1", "-5", "a", "2"], ["2", "0", "a", "6"]]
    dated = (tmp_path / "tests.csv").read_text().replace(",-9,", ",2024-01-02,").replace(",-5,", ",2024-01-03,")
    (tmp_path / "dated.csv").write_text("".join(line + "\n" for line in dated.split("\n")[:4]))
    assert unpad("data", "show", "dated.csv", code=0).out.startswith("events, by the recipe events_labels: 1 patient")


@pytest.mark.promise("data.show")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["conversations", "patients"])
def test_a_run_keeps_its_first_sequences_and_the_page_has_them(unpad, tmp_path, family):
    recipe = families.FAMILIES[family](tmp_path / "made")
    unpad("train", recipe, "--out", "run", "train.max_steps=2", code=0)
    kept = json.loads((tmp_path / "run" / "shown.json").read_text(encoding="utf-8"))
    assert len(kept) == 10
    assert kept == json.loads(unpad("data", "show", "run", "--json", code=0).out)
    page = Path(unpad("report", "run", code=0).out.strip()).read_text(encoding="utf-8")
    own = Path(unpad("data", "show", "run", "--html", "own.html", code=0).out.strip()).read_text(encoding="utf-8")
    for one in kept:
        for shown in (page, own):
            assert f"<h3>{one['where']}</h3>" in shown
            for span in one["spans"]:
                text = f"<i>{escape(span['text'])}</i>" if span["special"] else escape(span["text"])
                assert f"<b>{text}</b>" in shown or not span["learnt"]
                assert text in shown
    (tmp_path / "run" / "shown.json").write_text("[{}]")
    assert "What was learnt" not in Path(unpad("report", "run", code=0).out.strip()).read_text(encoding="utf-8")
