"""Questions about images: patches stand where the text has room for them, in any batch, and rows are never cut."""

import json
import shutil
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from tests.helpers.pictures import micro_of, write_recipe
from tests.helpers.questions import LONG, SMALL, questions_of, recipe_of, write_questions
from tests.helpers.toy import events, quiet, rows, weights
from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Micro
from unpad.data.family import open_data
from unpad.data.sources.split import Wanted
from unpad.data.vqa import VqaData
from unpad.errors import CheckpointError, RecipeError, SourceError
from unpad.proof import sample as samples
from unpad.proof.recipe import prove_recipe
from unpad.recipes.recipe import Recipe
from unpad.training.loop import train


@pytest.fixture(autouse=True)
def _few_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "choose", partial(samples.choose, most=6))  # of fewer sequences than users prove


def assert_equal(one: RaggedBatch, other: RaggedBatch) -> None:
    for name, value in vars(one).items():
        theirs = getattr(other, name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs), name
    assert torch.equal(one.layout.lengths(), other.layout.lengths())
    for name in ("inputs_embeds", "grid", "position_ids"):
        assert torch.equal(getattr(one.media, name), getattr(other.media, name)), name


@pytest.mark.promise("vqa.any-images", "vqa.captions")
def test_a_batch_holds_what_each_row_has_alone(tmp_path):
    data = questions_of(recipe_of(write_questions(tmp_path / "pictures")))
    ids = [3, 0, 4, 1, 2]  # no picture, one, a caption, one with a long question, two pictures
    assert [len(data.examples[i].images) for i in ids] == [0, 1, 1, 1, 2]
    batch = data.load(micro_of(data, ids))
    for place, seq in enumerate(ids):
        assert_equal(batch.select([place]), data.alone(seq, 0, int(data.table.positions[seq]), 0))
    assert batch.num_targets == int(data.table.num_targets[ids].sum())
    nothing = data.load(micro_of(data, []))
    assert (nothing.total_tokens, nothing.num_targets) == (0, 0)


def test_an_epoch_changes_the_images_of_training_rows_alone_and_always_the_same(tmp_path):
    file = write_questions(tmp_path / "pictures")
    data = questions_of(recipe_of(file, images={"flip": 0.5, "shift": 0.2}))
    held, trained = (np.flatnonzero(data.table.split == side).tolist() for side in (1, 0))

    def pixels(ids: list[int], epoch: int) -> torch.Tensor:
        media = data.load(replace(micro_of(data, ids), epoch_seed=(7, epoch))).media
        return media.inputs_embeds

    assert torch.equal(pixels(held, 0), pixels(held, 1))
    assert not torch.equal(pixels(trained, 0), pixels(trained, 1))
    assert torch.equal(pixels(trained, 1), pixels(trained, 1))
    assert torch.equal(pixels(trained, 1), torch.cat([pixels([row], 1) for row in trained]))
    asked, plain = data.prompts(trained).media, questions_of(recipe_of(file)).prompts(trained).media
    assert torch.equal(asked.inputs_embeds, plain.inputs_embeds), "what is asked is asked about the image as it is"


def test_images_of_the_test_part_are_never_changed(tmp_path):
    file = write_questions(tmp_path / "pictures")
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    file.write_text("".join(json.dumps(line | {"split": "test"}) + "\n" for line in lines), "utf-8")
    tested, plain = (
        open_data(recipe_of(file, images=images), None, Wanted.NEW) for images in ({"flip": 0.5, "shift": 0.2}, {})
    )
    ids = [0, 1, 5]
    assert_equal(tested.load(micro_of(tested, ids)), plain.load(micro_of(plain, ids)))


def test_the_fingerprint_is_of_the_pictures_and_not_of_their_names(tmp_path):
    file = write_questions(tmp_path / "pictures")
    before = questions_of(recipe_of(file)).fingerprint()
    moved = shutil.copytree(file.parent, tmp_path / "moved") / file.name
    assert questions_of(recipe_of(moved)).fingerprint() == before
    picture = sorted(moved.parent.rglob("*.png"))[0]
    Image.fromarray(255 - np.asarray(Image.open(picture))).save(picture)
    assert questions_of(recipe_of(moved)).fingerprint() != before


@pytest.mark.promise("vqa.visual-tokens")
def test_only_answers_count_and_prompts_end_where_they_begin(tmp_path):
    data = questions_of(recipe_of(write_questions(tmp_path / "pictures")))
    whole = data.load(micro_of(data, [1]))
    targets = whole.labels[whole.target_index].tolist()
    assert data.tokenizer.decode(targets) == data.examples[1].answer
    assert targets[-1] == data.tokenizer.eos_id
    prompt = data.prompts([1])
    size = prompt.total_tokens
    assert torch.equal(whole.input_ids[:size], prompt.input_ids)
    assert whole.total_tokens == size + len(targets) - 1
    assert LONG[:20] in data.tokenizer.decode(prompt.input_ids.tolist())


def test_rows_about_one_picture_share_a_side(tmp_path):
    data = questions_of(recipe_of(write_questions(tmp_path / "pictures")))
    sides: dict[tuple[int, ...], set[int]] = {}
    for example, side in zip(data.examples, data.table.split.tolist(), strict=True):
        if len(example.images) == 1:
            sides.setdefault(example.images, set()).add(side)
    assert all(len(side) == 1 for side in sides.values())
    assert {0, 1} <= set(data.table.split.tolist())


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"image": "../secret.png", "question": "?", "answer": "!"}, "E_PATH"),
        ({"image": "dark/nowhere.png", "question": "what", "answer": "x"}, "E_MISSING"),
        ({"image": "dark/0.png", "question": "what"}, "E_NULL"),
        ({"image": "dark/0.png", "question": "what", "answer": " "}, "E_EMPTY"),
        ({"question": "what", "answer": "x"}, "E_MISSING"),
        ({"image": "dark/0.png", "question": "what", "answers": []}, "E_TYPE"),
        ({"image": "dark/0.png", "question": "what", "answer": "x", "split": "some"}, "E_SPLIT"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, row, code):
    file = write_questions(tmp_path / "pictures")
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")
    with pytest.raises(SourceError, match=code) as caught:
        open_data(recipe_of(file), None)
    assert f"questions.jsonl:{len(file.read_text(encoding='utf-8').splitlines())}" in str(caught.value)


def test_a_row_that_does_not_fit_the_context_is_refused_not_cut(tmp_path):
    file = write_questions(tmp_path / "pictures")
    with pytest.raises(RecipeError, match="never cut"):
        open_data(recipe_of(file, plan={"overflow": "split", "max_tokens": 12}), None)


@pytest.mark.promise("llm.your-data", "vqa.any-images", "vqa.captions", "vqa.answers")
@pytest.mark.slow
def test_runs_learn_resume_and_answer(tmp_path):
    from unpad.evaluation.run import evaluate_run
    from unpad.inference.images import ask, list_images
    from unpad.inference.loaded import load

    file = write_questions(tmp_path / "pictures")
    recipe = recipe_of(file, train={"max_epochs": 20})  # with half of them it is by chance whether half are right
    name = write_recipe(tmp_path / "r.yaml", recipe)
    train(name, tmp_path / "whole", [], console=quiet())
    train(name, tmp_path / "parts", ["train.max_steps=7"], console=quiet())
    train(name, tmp_path / "parts", ["train.max_steps=null"], resume=True, console=quiet())
    assert rows(tmp_path / "whole", "train") == rows(tmp_path / "parts", "train")
    metrics, shown = evaluate_run(str(tmp_path / "whole"), 3)
    assert {"loss", "accuracy", "caption_accuracy", f"accuracy: {LONG}"} <= set(metrics)
    assert metrics["accuracy"].value > 0.5
    assert len(shown) == 3
    run = load(tmp_path / "whole")
    paths = list_images([file.parent / "dark"])
    together = ask(run, paths, "亮不亮？")
    assert [answer.text for answer in together] == [ask(run, [path], "亮不亮？")[0].text for path in paths]
    assert sum(answer.text == "暗" for answer in together) >= 8


@pytest.mark.promise("vqa.row-by-row", "vqa.any-images")
@pytest.mark.slow
def test_the_certificate_covers_images_among_text(tmp_path):
    name = write_recipe(tmp_path / "r.yaml", recipe_of(write_questions(tmp_path / "pictures")))
    certificate = prove_recipe(name, [])
    assert certificate.passed, "\n".join(certificate.text())


def _faulty(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    right = VqaData.load

    def broken(self: VqaData, micro: Micro) -> RaggedBatch:
        return fault(right(self, micro))

    monkeypatch.setattr(VqaData, "load", broken)


def first_place(batch: RaggedBatch) -> RaggedBatch:
    """Patches of all rows one place later than where they belong, as rows of another prompt would have them."""
    return replace(batch, media_index=batch.media_index + 1)


def swapped(batch: RaggedBatch) -> RaggedBatch:
    return replace(batch, media=replace(batch.media, inputs_embeds=batch.media.inputs_embeds.roll(3, 0)))


@pytest.mark.promise("vqa.visual-tokens")
@pytest.mark.slow
@pytest.mark.parametrize("fault", [swapped, first_place])
def test_pictures_in_other_rows_or_at_the_place_of_the_first_row_are_caught(tmp_path, monkeypatch, fault):
    _faulty(monkeypatch, fault)
    name = write_recipe(tmp_path / "r.yaml", recipe_of(write_questions(tmp_path / "pictures")))
    failed = [line.name for line in prove_recipe(name, []).lines if line.passed is False]
    assert "plan pack = alone" in failed


@pytest.mark.promise("vqa.modes")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        ({"prune": {"layers": [0], "inner": 16}}, ["soft", "hard"]),
        ({"prune": {"layers": [0], "method": "uniform", "keep": 0.5}}, ["hard"]),
        ({"prune": {"layers": [-1], "inner": 16, "method": "relevance", "keep": 0.5}}, ["hard"]),
        (
            {"merge": {"variant": "slots", "slots": 3, "inner": 8}, "prune": {"layers": [0], "inner": 16, "keep": 0.5}},
            ["merge_only", "soft", "hard"],
        ),
    ],
)
def test_runs_with_fewer_visual_tokens_train_answer_and_are_proven(tmp_path, settings, modes, monkeypatch):
    from unpad.evaluation import vqa
    from unpad.evaluation.run import evaluate_run

    recipe = recipe_of(write_questions(tmp_path / "pictures"), train={"max_epochs": 2, "threads": 1})
    name = write_recipe(tmp_path / "r.yaml", recipe.model_copy(update={"model": {**SMALL, **settings}}))
    train(name, tmp_path / "run", [], console=quiet())
    seen: list[str] = []

    def answer(run: Any, *arguments: Any) -> list[str]:
        seen.append(run.model.mode)
        return right(run, *arguments)

    right = vqa.answer
    monkeypatch.setattr(vqa, "answer", answer)
    metrics = evaluate_run(str(tmp_path / "run"), rows=tmp_path / "rows.parquet")[0]
    told = pq.read_table(tmp_path / "rows.parquet")
    with_images = told.filter(np.array(told["num_patches"]) > 0)
    assert np.mean(with_images["num_kept_block_1"]) == metrics["kept_block_1"].value
    for mode in ("origin", *modes):
        assert 0 <= metrics[f"accuracy_{mode}"].value <= 1
        assert np.mean(told[f"right_{mode}"].drop_null()) == metrics[f"accuracy_{mode}"].value
    assert metrics["accuracy"] == metrics["accuracy_hard"]
    assert seen == ["origin", *modes[:-1]], "answers in every other mode"
    assert 1 <= metrics["kept_final"].low <= metrics["kept_final"].value < metrics["visual_tokens"].value
    certificate = prove_recipe(name, [])
    assert certificate.passed, "\n".join(certificate.text())
    assert all(line.passed for line in certificate.lines if line.applies)
    proven = {line.name.partition(":")[0] for line in certificate.lines if line.name.endswith("= plain reference")}
    teaching = {"relevance"} if settings.get("prune", {}).get("method") == "relevance" else set()
    assert proven == {*modes} | teaching


@pytest.mark.promise("vqa.init-from")
@pytest.mark.slow
def test_a_run_that_prunes_starts_from_one_that_does_not(tmp_path):
    recipe = recipe_of(write_questions(tmp_path / "pictures"), train={"max_epochs": 1, "threads": 1})
    train(write_recipe(tmp_path / "r.yaml", recipe), tmp_path / "whole", [], console=quiet())
    pruned = recipe.model_copy(update={"model": {**SMALL, "prune": {"layers": [0], "inner": 16}}})
    name, start = write_recipe(tmp_path / "p.yaml", pruned), f"train.init_from={tmp_path / 'whole'}"
    train(name, tmp_path / "run", [start, "train.freeze=[tower.*, projector.*, decoder.*]"], console=quiet())
    (begun,) = events(tmp_path / "run", "started")
    assert begun["message"].endswith("initialized, as that run lacks them: pruners, temperature")
    before, after = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert {key.partition(".")[0] for key in after.keys() - before.keys()} == {"pruners", "temperature"}
    wider = recipe.model_copy(update={"model": {**SMALL, "language": {**SMALL["language"], "blocks": 3}}})
    with pytest.raises(CheckpointError, match=r"decoder\.blocks\.2"):
        train(write_recipe(tmp_path / "w.yaml", wider), tmp_path / "wide", [start], console=quiet())


@pytest.mark.nightly
@pytest.mark.parametrize("cut", [0.25, 0.75])
def test_a_run_that_hides_tokens_and_then_removes_them_resumes_to_the_bit_in_either_stage(tmp_path, cut):
    prune = {"layers": [-1], "inner": 8, "keep": 0.5, "temperature": {"start": 1, "end": 0.2, "steps": 4}}
    stages = [
        {"name": "soft", "train": {"max_epochs": 2}},
        {"name": "hard", "train": {"max_epochs": 2, "freeze": ["pruners.*"]}},
    ]
    recipe = recipe_of(write_questions(tmp_path / "pictures"), model={"prune": prune})
    staged = Recipe(**{**recipe.model_dump(), "stages": stages, "train": {"threads": 1}})
    name = write_recipe(tmp_path / "r.yaml", staged)
    train(name, tmp_path / "whole", [], console=quiet())
    found = rows(tmp_path / "whole", "train")
    assert {row["stage"] for row in found} == {"soft", "hard"}
    train(name, tmp_path / "parts", [f"train.max_steps={int(cut * len(found))}"], console=quiet())
    train(name, tmp_path / "parts", ["train.max_steps=null"], resume=True, console=quiet())
    assert found == rows(tmp_path / "parts", "train")
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(other[key], value) for key, value in one.items())
