"""Captions are measured apart from questions: their loss, their bits per character, and the choice of the right one."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.families import write_rows
from tests.helpers.pictures import write_folder
from tests.helpers.toy import rows
from unpad.data.family import open_data
from unpad.data.measuring import Measuring
from unpad.data.sources.split import Split, Wanted
from unpad.data.sources.vqa import DESCRIBE
from unpad.data.tokens.lost import LostCharacters
from unpad.data.vqa import VqaData
from unpad.evaluation.rows import Ratio
from unpad.evaluation.run import recipe_for
from unpad.evaluation.vqa import (
    NUM_CHOICES,
    Candidates,
    CaptionScores,
    candidate_losses,
    choice_scores,
    draw_candidates,
    evaluate,
    held_out,
)
from unpad.inference.loaded import LoadedRun, load

NUM_PICTURES = 23
MANY = 100_000  # positions, more than any row has


def captioned(folder: Path) -> list[dict[str, Any]]:
    """A caption of every picture but the last, of different lengths; the first two pictures have a second and a common
    one, and the first two have questions, one of them in the words that stand for captions."""
    names = [str(path.relative_to(folder)) for path in sorted(write_folder(folder, NUM_PICTURES).rglob("*.png"))]
    told: list[dict[str, Any]] = [
        {"image": name, "caption": "a picture" + " dark" * (number % 7) + f" {number}"}
        for number, name in enumerate(names[:-1])
    ]
    told += [{"image": names[0], "caption": "light"}, {"image": names[1], "caption": "light"}]
    told += [{"image": names[0], "caption": "dark"}, {"image": None, "caption": "nothing"}]
    asked = [{"image": name, "question": "亮不亮？", "answer": "暗"} for name in names[:2]]
    return [*asked, *told, {"image": names[0], "question": DESCRIBE, "answer": "dark"}]


def opened(run: LoadedRun, file: Path) -> VqaData:
    return open_data(recipe_for(run.recipe, file), run.files, Wanted.NEW)


def captions_of(data: VqaData) -> np.ndarray:
    return np.flatnonzero([example.caption for example in data.examples])


def texts_of(data: VqaData, seq_ids: np.ndarray) -> list[str]:
    return [data.examples[i].answer for i in seq_ids.tolist()]


@pytest.mark.promise("vqa.captions", "run.rows")
def test_captions_and_questions_have_metrics_of_their_own_rows(finished, tmp_path):
    run = load(finished("questions").run)
    data = opened(run, Path(write_rows(tmp_path / "new.jsonl", captioned(tmp_path))))
    short = run.recipe.generate.model_copy(update={"max_new_tokens": 1})
    run = replace(run, recipe=run.recipe.model_copy(update={"generate": short}))
    evaluation = evaluate(run, Measuring(run.model, data, np.arange(len(data.table)), run.recipe.plan), 0)
    assert evaluation.rows is not None
    of_rows, found = evaluation.rows, evaluation.metrics
    names, columns = list(of_rows.columns), zip(*of_rows.columns.values(), strict=True)
    table = [dict(zip(names, values, strict=True)) for values in columns]
    of = {kind: [row for row in table if row["kind"] == kind] for kind in ("question", "caption")}
    assert {kind: len(rows) for kind, rows in of.items()} == {"question": 3, "caption": NUM_PICTURES + 3}
    assert all(math.isnan(row[name]) for row in of["question"] for name in ("num_chars", "caption_choice_of_20"))
    assert [row["num_chars"] for row in of["caption"]] == [len(row["label"]) for row in of["caption"]]
    chosen = [row["caption_choice_of_20"] for row in of["caption"] if row["label"] != "nothing"]
    nats = {kind: sum(row["loss"] for row in rows) for kind, rows in of.items()}
    expected = {
        "accuracy": np.mean([row["right"] for row in of["question"]]),
        "caption_accuracy": np.mean([row["right"] for row in of["caption"]]),
        "caption_choice_of_20": np.mean(chosen),
        "caption_choice_chance": 0.05,
        "caption_bits_per_char": nats["caption"] / math.log(2) / sum(len(row["label"]) for row in of["caption"]),
    }
    for kind, mine in of.items():
        expected[f"{kind}_loss"] = nats[kind] / sum(row["num_targets"] for row in mine)
    described = [row["right"] for row in of["question"] if row["question"] == DESCRIBE]
    expected |= {f"accuracy: {DESCRIBE}": np.mean(described)}
    assert {name: found[name].value for name in expected} == pytest.approx(expected)
    assert (found["accuracy"].num, found[f"accuracy: {DESCRIBE}"].num) == (len(of["question"]), 1)
    assert found["caption_choice_of_20"].num == len(chosen) == NUM_PICTURES + 2, "but the one without a picture"
    assert found["caption_choice_of_20"].num_groups == NUM_PICTURES - 1
    assert found["caption_bits_per_char"].low < expected["caption_bits_per_char"]
    of_kind = {name: one.kind for name, one in of_rows.measures.items() if isinstance(one, Ratio) and one.kind}
    assert of_kind == {
        "accuracy": "question", "question_loss": "question", "caption_accuracy": "caption", "caption_loss": "caption",
        "caption_bits_per_char": "caption", "caption_choice_of_20": "caption",
    }  # fmt: skip


@pytest.mark.promise("vqa.captions")
def test_candidates_in_one_plan_are_as_likely_as_rows_of_their_own(finished, tmp_path):
    """Every candidate is written as a caption of the picture, and read alone."""
    run, written = load(finished("questions").run), captioned(tmp_path)
    data = opened(run, Path(write_rows(tmp_path / "new.jsonl", written)))
    drawn = draw_candidates(data, captions_of(data), run.model.config.longest)
    few = Candidates(drawn.shown[:2], drawn.told[:2])
    over = Measuring(run.model, data, captions_of(data), run.recipe.plan)
    found = candidate_losses(over, few)
    shown = [written[picture]["image"] for picture in few.shown.tolist()]
    told = [texts_of(data, texts) for texts in few.told]
    alike = [{"image": image, "caption": text} for image, texts in zip(shown, told, strict=True) for text in texts]
    alone = opened(run, Path(write_rows(tmp_path / "alone.jsonl", alike)))
    losses = []
    for seq, size in enumerate(alone.table.positions.tolist()):
        with torch.no_grad():
            losses.append(float(run.model.token_nll(alone.alone(seq, 0, size, 0)).double().mean()))
    assert len(losses) == 2 * NUM_CHOICES
    np.testing.assert_allclose(found.flatten(), losses, rtol=1e-5)
    assert len({round(loss, 4) for loss in losses}) > NUM_CHOICES, "no number for all"
    retold = data.retold(np.repeat(few.shown, NUM_CHOICES), few.told.flatten())
    micros = list(replace(over, data=retold, seq_ids=np.arange(len(retold.table))).micros())
    assert 1 < len(micros) < len(losses) / 4, "many candidates share a batch"
    assert sum(retold.load(micro).total_tokens for micro in micros) == retold.table.positions.sum(), "without padding"


@pytest.mark.promise("vqa.captions")
def test_candidates_are_different_texts_of_other_pictures(finished, tmp_path):
    data = opened(load(finished("questions").run), Path(write_rows(tmp_path / "new.jsonl", captioned(tmp_path))))
    captions = captions_of(data)
    drawn = draw_candidates(data, captions, MANY)
    with_picture = [i for i in captions.tolist() if data.examples[i].images]
    assert drawn.shown.tolist() == drawn.told[:, 0].tolist() == with_picture
    for caption, told in zip(drawn.shown.tolist(), drawn.told, strict=True):
        texts = texts_of(data, told)
        assert len(set(texts)) == NUM_CHOICES
        mine = {data.examples[i].answer for i in with_picture if data.table.group[i] == data.table.group[caption]}
        assert not mine & set(texts[1:]), "what another caption of the picture says may be right"
    assert np.array_equal(drawn.told, draw_candidates(data, captions, MANY).told)
    others = {tuple(sorted(texts_of(data, told[1:]))) for told in drawn.told}
    assert len(others) > NUM_PICTURES / 2, "a draw of its own to each"


@pytest.mark.promise("vqa.captions")
def test_candidates_fit_the_model_and_are_twenty_or_none(finished, tmp_path):
    data = opened(load(finished("questions").run), Path(write_rows(tmp_path / "new.jsonl", captioned(tmp_path))))
    captions = captions_of(data)
    longest = int(data.table.positions[captions].max()) - 1
    drawn = draw_candidates(data, captions, longest)
    assert 0 < len(drawn.shown) < len(captions)
    lengths = data.rows.lengths()[drawn.told] - 1 + data.num_patches[drawn.shown][:, None]
    assert lengths[:, 1:].max() <= longest
    for none in (draw_candidates(data, captions[: NUM_CHOICES - 1], MANY), draw_candidates(data, captions[:0], MANY)):
        assert none.shown.shape == (0,)
        assert none.told.shape == (0, NUM_CHOICES)


def test_of_likeliest_candidates_that_tie_the_right_one_has_its_share():
    losses = np.array([[1.0, 2, 3, 4], [2, 1, 3, 4], [1, 1, 2, 2], [2, 1, 1, 2], [5, 5, 5, 5], [math.nan, 1, 2, 3]])
    assert choice_scores(losses).tolist() == [1, 0, 0.5, 0, 0.25, 0]


@pytest.mark.promise("vqa.captions")
def test_where_candidates_or_characters_are_missing_the_reason_stands_in_place_of_a_number():
    nll, chars, group = np.array([3.0, 1, 2]), np.array([4, 2, 2]), np.arange(3)
    whole = CaptionScores(nll, chars, np.array([1.0, 0, math.nan]), group, LostCharacters(0, 8))
    found = whole.metrics()
    assert (found["caption_choice_of_20"].value, found["caption_choice_of_20"].num) == (0.5, 2)
    assert found["caption_bits_per_char"].value == pytest.approx(6 / math.log(2) / 8)
    lossy = replace(whole, choice=np.full(3, math.nan), lost=LostCharacters(2, 10)).metrics()
    reasons = {name: one.note for name, one in lossy.items() if math.isnan(one.value)}
    assert reasons == {
        "caption_choice_of_20": "fewer than 20 different captions of unlike pictures",
        "caption_bits_per_char": "20.0% of the characters are lost to unknown tokens",
    }
    assert set(whole.measures("caption")) == {"caption_choice_of_20", "caption_bits_per_char"}
    assert set(replace(whole, lost=LostCharacters(2, 10)).measures("caption")) == {"caption_choice_of_20"}


@pytest.mark.promise("vqa.captions")
def test_training_logs_the_loss_of_each_kind_beside_that_of_both(finished):
    run = load(finished("questions").run)
    logged = rows(run.folder, "eval")
    assert {name for row in logged for name in row["values"] if name.endswith("loss")} == {
        "question_loss", "caption_loss",
    }  # fmt: skip
    data = run.data()
    ids = np.flatnonzero(data.table.split == Split.HOLDOUT)
    told = np.isin(ids, captions_of(data))
    found = {}
    for name, chosen in (("loss", ids), ("question_loss", ids[~told]), ("caption_loss", ids[told])):
        found[name] = held_out(Measuring(run.model, data, chosen, run.recipe.plan))
        assert set(found[name].values) == ({"loss"} if name != "loss" else {"loss", "question_loss", "caption_loss"})
    for name in ("question_loss", "caption_loss"):
        assert found["loss"].values[name] == pytest.approx(found[name].loss)
    assert found["loss"].loss * found["loss"].num_targets == pytest.approx(
        sum(one.loss * one.num_targets for name, one in found.items() if name != "loss")
    )
