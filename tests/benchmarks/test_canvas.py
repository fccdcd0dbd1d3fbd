"""The study of canvases asks what a canvas shows, keeps the asked cells for its oracle, and scores what it says."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from unpad.batching.layout import build_layout
from unpad.data.sources.split import Split
from unpad.data.tokens.tokenizer import open_tokenizer_file
from unpad.errors import SourceError
from unpad.models.vision_language import prune_pass
from unpad.models.vision_language.prune import VisionTokens, keep_top

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIDE, LOOKS = 4, 6


@pytest.fixture(scope="module", autouse=True)
def _path() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield
        for name in ("canvas", "canvas_report", "canvas_set", "pruning", "pruning_report"):
            sys.modules.pop(name, None)


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def icons() -> Any:
    """Forty icons of six colours, each of two sizes, all a little different."""
    rng = np.random.default_rng(0)
    colours = np.array([[220, 30, 30], [30, 220, 30], [30, 30, 220], [220, 220, 30], [30, 220, 220], [220, 30, 220]])
    pixels = np.repeat(colours, 80, 0)[:, None, None] + rng.integers(-9, 9, (480, 16, 16, 3))
    words = ("red", "green", "blue", "yellow", "cyan", "pink")
    names = np.array([f"{word}-{number // 2}" for word in words for number in range(80)])  # two sizes of each
    return module("canvas_set").choose_looks(pixels.astype(np.uint8), names, num_clusters=LOOKS, num_looks=LOOKS)


@pytest.fixture(scope="module")
def written(icons: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    canvas_set = module("canvas_set")
    folder: Path = tmp_path_factory.mktemp("set")
    canvas_set.write_set(icons, canvas_set.Size(SIDE, 6, 2, 2), canvas_set.KINDS, folder)
    return folder


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_icons_of_one_look_have_its_name_and_no_name_is_in_both_parts(icons: Any) -> None:
    assert sorted(icons.words) == ["blue", "cyan", "green", "pink", "red", "yellow"]
    assert all(name.startswith(icons.words[look]) for name, look in zip(icons.names, icons.looks, strict=True))
    parts = [Split.TRAIN, Split.HOLDOUT, Split.TEST]
    names = [set(icons.names[icons.parts == part].tolist()) for part in parts]
    assert [len(one) for one in names] == [144, 36, 60], "of 240 names, 15 % to choose by and 25 % for the study"
    assert len(set.union(*names)) == 240
    assert all(len(of_look) for part in parts for of_look in icons.of_look(part))


def test_an_icon_of_training_is_drawn_a_little_differently(icons: Any) -> None:
    canvas_set = module("canvas_set")
    canvas = canvas_set.draw_canvas(icons.of_look(Split.TRAIN), SIDE, 2, np.random.default_rng(1))
    drawn = canvas.pixels(icons, np.random.default_rng(2)).reshape(SIDE, 16, SIDE, 16, 3)
    still = canvas.pixels(icons).reshape(drawn.shape)
    inside = np.abs(drawn[:, 1:-1, :, 1:-1].astype(float) - still[:, 1:-1, :, 1:-1])
    assert 3 < inside.mean() < 12, "noise of 6 and another icon's pixels beside its own"
    white = (drawn.transpose(0, 2, 1, 3, 4)[:, :, 0] > 200).all((2, 3))
    assert 0 < white.sum() < SIDE * SIDE, "some lie a pixel lower"
    same = canvas_set.vary(icons.pixels[:4], np.random.default_rng(3))
    assert np.array_equal(same, canvas_set.vary(icons.pixels[:4], np.random.default_rng(3)))


def test_facts_are_what_a_canvas_shows(icons: Any) -> None:
    canvas_set = module("canvas_set")
    canvas = canvas_set.draw_canvas(icons.of_look(Split.TEST), SIDE, 2, np.random.default_rng(1))
    pixels, counts = canvas.pixels(icons), Counter(canvas.looks.ravel().tolist())
    assert sorted(counts.values())[:2] == [1, 1], "a third of the looks once"
    assert max(counts.values()) - sorted(counts.values())[2] <= 1, "the others equally often"
    one, two = (canvas_set.facts(canvas, icons.words, kind) for kind in canvas_set.KINDS)
    assert [fact.place for fact in one[:5]] == ["A1", "B1", "C1", "D1", "A2"]
    for fact in (*one, *two):
        row, column = fact.cells[-1]
        shown = pixels[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
        [icon] = np.flatnonzero((icons.pixels == shown).all((1, 2, 3)))
        assert icons.parts[icon] == Split.TEST
        assert icons.words[icons.looks[icon]] == fact.answer
    assert two
    for fact in two:
        step, named = fact.place.split()
        assert counts[icons.words.index(named)] == 1
        (row, column), there = fact.cells
        assert icons.words[canvas.looks[row, column]] == named
        assert there == ((row, column + 1) if step == "right" else (row + 1, column))


def test_a_set_is_the_same_twice_and_a_caption_begins_as_a_question_does(
    written: Path, icons: Any, tmp_path: Path
) -> None:
    canvas_set = module("canvas_set")
    canvas_set.write_set(icons, canvas_set.Size(SIDE, 6, 2, 2), canvas_set.KINDS, tmp_path)
    for name in ("captions.jsonl", "questions.jsonl", "canvases/c00007.png"):
        assert (tmp_path / name).read_bytes() == (written / name).read_bytes()
    captions, questions = (rows_of(written / f"{name}.jsonl") for name in ("captions", "questions"))
    assert len(captions) == 20
    assert captions[0]["question"] == questions[0]["question"]
    assert captions[0]["answer"].split()[0] == questions[0]["answer"]
    for number, part in enumerate(["train"] * 6 + ["holdout"] * 2 + ["test"] * 2):
        of_canvas = [row for row in questions if row["image"] == f"canvases/c{number:05d}.png"]
        assert {row["split"] for row in of_canvas} == {part}
        assert [row["kind"] for row in of_canvas][:3] == ["one", "one", "two"]


def test_a_set_of_another_size_is_not_taken_for_the_one_asked_for(written: Path, icons: Any) -> None:
    canvas_set = module("canvas_set")
    canvas_set.write_set(icons, canvas_set.Size(SIDE, 6, 2, 2), canvas_set.KINDS, written)
    with pytest.raises(SourceError, match="another size"):
        canvas_set.write_set(icons, canvas_set.Size(SIDE, 6, 2, 3), canvas_set.KINDS, written)


def test_a_run_of_other_settings_is_not_taken_for_the_one_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruning, trained = module("pruning"), list[str]()

    def train(name: str, folder: Path, overrides: list[str], console: object) -> None:
        folder.mkdir()
        trained.append(name)

    monkeypatch.setattr(pruning, "train", train)
    monkeypatch.setattr(pruning, "finished", Path.is_dir)
    for _ in range(2):
        assert pruning.ensure_run("vqa", tmp_path / "base", ["optim.lr=1e-3"]) == tmp_path / "base"
    assert trained == ["vqa"]
    with pytest.raises(SourceError, match="other settings"):
        pruning.ensure_run("vqa", tmp_path / "base", ["optim.lr=2e-3"])


def test_the_icon_of_the_control_fills_its_picture(icons: Any, tmp_path: Path) -> None:
    canvas_set = module("canvas_set")
    canvas_set.write_set(icons, canvas_set.Size(1, 2, 2, 1, times=SIDE), ["one"], tmp_path)
    rows = rows_of(tmp_path / "questions.jsonl")
    assert [row["question"] for row in rows] == ["A1"] * 6
    with Image.open(tmp_path / rows[-1]["image"]) as image:
        shown = np.asarray(image).reshape(16, SIDE, 16, SIDE, 3)
    assert (shown == shown[:, :1, :, :1]).all()
    [icon] = np.flatnonzero((icons.pixels == shown[:, 0, :, 0]).all((1, 2, 3)))
    assert icons.words[icons.looks[icon]] == rows[-1]["answer"]


def test_the_token_before_an_answer_is_the_place_that_is_asked_for(tmp_path: Path) -> None:
    module("canvas").write_words(["folder", "star"], 2, tmp_path / "words.json")
    tokenizer = open_tokenizer_file(tmp_path / "words.json")
    [first, second] = tokenizer.encode_batch(["B2 folder right folder star", "B2"])
    assert first[:1] == second
    assert len(first) == 5
    assert first[1] == first[3]
    assert tokenizer.decode(first[4:]).strip() == "star"


def test_the_oracle_keeps_the_asked_cells_and_others_by_chance() -> None:
    canvas = module("canvas")
    cells = np.zeros((3, 8, 8), np.bool_)
    cells[2, 4:6, 2:4] = True
    rows, columns = (torch.from_numpy(places.ravel()) for places in np.indices((8, 8)))
    layout = build_layout(np.array([64]))
    tokens = VisionTokens(layout, sample_ids=torch.tensor([2]), rows=rows, columns=columns)
    with canvas.knowing(cells):
        kept = keep_top(prune_pass.select("random", tokens), layout, torch.tensor([6.0]))
    assert int(kept.sum()) == 6
    assert kept[torch.from_numpy(cells[2].ravel())].all()
    alone = keep_top(prune_pass.select("random", tokens), layout, torch.tensor([6.0]))
    assert not alone[torch.from_numpy(cells[2].ravel())].all()


def test_an_arm_at_two_depths_keeps_its_share_in_the_end() -> None:
    canvas = module("canvas")
    [fields] = canvas.ARMS["heads, at two depths"].overrides(1 / 16)
    assert json.loads(fields.partition("=")[2]) | {"temperature": 0} == {
        "layers": [-1, 0], "inner": 128, "question": True, "keep": 0.25, "temperature": 0,
    }  # fmt: skip
    assert canvas.ARMS["similarity"].overrides(0.125) == ['model.merge={"variant": "similarity", "ratio": 0.125}']


def study(whole: float = 1.0) -> Any:
    """100 canvases with a question of each kind: random answers a fifth, heads three fifths, the oracle all."""
    report = module("canvas_report")
    order, kinds = np.tile(np.arange(100) / 100, 2), np.repeat(["one", "two"], 100)
    shares = {"random": 0.2, "heads": 0.6, "heads, soft": 0.9, "blind": 0.25, "oracle": 1.0, "uniform": 0.3}
    found = {(name, 1 / 16): (order < share).astype(float) for name, share in shares.items()}
    found[report.ALL], found[report.GUESS] = (order < whole).astype(float), np.zeros(200)
    machine = {"threads": 1, "cores": 1, "processor": "one", "torch": "2"}
    return report.Study([found], [0], np.tile(np.arange(100), 2), kinds, 64, machine)


def control(whole: float) -> Any:
    """The first of these questions alone, as of pictures that one icon fills."""
    of = study(whole)
    found = {key: values[:100] for key, values in of.found[0].items() if not key[0].startswith("oracle")}
    return module("canvas_report").Study([found], [0], of.canvases[:100], of.kinds[:100], 1, of.machine)


def test_the_figure_is_a_share_of_the_gap_and_goals_are_answered_by_it() -> None:
    report, measured = module("canvas_report"), study()
    gap = measured.gap("heads", 1 / 16, "one")
    assert gap.value == pytest.approx(0.5)
    assert gap.low < 0.5 < gap.high
    assert measured.gap("heads, after block 1", 1 / 16, "one") is None
    assert measured.gap("oracle", 1 / 16, "one") is None
    assert measured.ceiling(1 / 16) == pytest.approx(0.25)
    holds = {asked: answer for asked, _, answer in report.checks(measured)}
    assert holds["blind, 0.0625 kept, one hop: within 3 points of 25.0%"] == "yes"
    assert holds["heads, 0.0625 kept, one hop: 0.9 of the gap"] == "NO"
    assert holds["heads, 0.0625 kept, two hops: 0.5 of the gap"] == "yes"
    assert holds["heads, 0.0625 kept, two hops: above uniform"] == "yes"
    assert holds["heads, 0.0625 kept, one hop: hard within 2 points of soft"] == "NO"


def test_a_kind_of_which_the_model_misses_a_tenth_is_void() -> None:
    def page(measured: Any, whole: float = 0.0) -> str:
        text: str = module("canvas_report").markdown(measured, control(whole), "command")
        return text

    assert "oid" not in page(study(0.9))
    assert page(study(0.9)).count("| heads |") == 2
    assert page(study(0.9), whole=1.0).count("| heads |") == 3
    assert "**One hop: void with seed 0**" in page(study(0.89))
    assert "heads" not in page(study(0.89))
    one = study()
    one.found[0][module("canvas_report").ALL][one.kinds == "two"] = 0.5
    told = page(one)
    assert "**Two hops: void with seed 0**" in told
    assert "## One hop" in told
    assert "## Two hops" not in told


def test_the_page_has_all_seeds_together_and_each_of_them() -> None:
    report, one = module("canvas_report"), study()
    worse = {key: values * (key[0] != "heads") for key, values in one.found[0].items()}
    both = report.Study([one.found[0], worse], [0, 3], one.canvases, one.kinds, one.num_cells, one.machine)
    assert both.gap("heads", 1 / 16, "one").value == pytest.approx(0.5 * (0.5 - 0.25))
    page = report.markdown(both, control(1.0), "command")
    assert "| arm | 0.0625 kept, seeds 0, 3 |" in page
    assert "| arm | 0.0625 kept, seed 0 | 0.0625 kept, seed 3 |" in page
    [each, _] = re.findall(r"^\| heads \| 60.0% .*\| 0.0% .*-0.25", page, re.M)  # one and two hops
    assert "0.50 (" in each
