"""Samples of images, questions and answers become one batch, each with spans of its own."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.vision import GRIDS, IMAGE, ROWS, SQUARE, VOCABULARY, Row, encode, picture, prepare
from unpad.batching.batch import from_padded, to_padded
from unpad.data.preprocess import preprocess
from unpad.errors import SourceError

BOS, EOS = 54, 55


def per_sample(values: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    return [part.tolist() for part in values.split(lengths.tolist())]


@pytest.mark.promise("vqa.preprocess")
def test_spans_are_where_placeholders_stand_and_answers_are_predicted():
    prepared = prepare(GRIDS, vocabulary=replace(VOCABULARY, bos=BOS, eos=EOS))
    batch = prepared.batch
    ids, labels, counted = (
        per_sample(x, batch.layout.lengths()) for x in (batch.input_ids, batch.labels, batch.loss_mask)
    )
    for i, (_, grids, answer) in enumerate(GRIDS):
        inside = [p for a, b in prepared.vision_spans[i] for p in range(a, b + 1)]
        assert inside == [p for p, id in enumerate(ids[i]) if id == IMAGE]
        assert [b - a + 1 for a, b in prepared.vision_spans[i]] == [rows * columns for rows, columns in grids]
        first, last = prepared.answer_spans[i]
        assert labels[i][first : last + 1] == [*encode(answer), EOS]
        assert counted[i] == [first <= p <= last for p in range(len(ids[i]))]
        assert ids[i][0] == BOS
        assert EOS not in ids[i]
    assert batch.num_targets == sum(len(encode(row[2])) + 1 for row in GRIDS)


@pytest.mark.promise("vqa.visual-tokens")
def test_every_visual_token_has_the_place_of_its_patch():
    prepared = prepare(GRIDS)
    batch, media = prepared.batch, prepared.batch.media
    assert (batch.input_ids[batch.media_index] == IMAGE).all()
    assert media.grid.tolist() == [list(grid) for row in GRIDS for grid in row[1]]
    assert media.layout.lengths().tolist() == [rows * columns for row in GRIDS for rows, columns in row[1]]
    assert batch.media_seqs.tolist() == [i for i, row in enumerate(GRIDS) for _ in row[1]]
    assert media.position_ids.tolist() == [
        p for row in GRIDS for rows, columns in row[1] for p in range(rows * columns)
    ]
    starts = batch.layout.cu_seqlens.tolist()
    spans = [(starts[i] + a, starts[i] + b) for i, own in enumerate(prepared.vision_spans) for a, b in own]
    for (start, stop), places in zip(spans, batch.media_index.split(media.layout.lengths().tolist()), strict=True):
        assert places.tolist() == list(range(start, stop + 1))
    third = media.inputs_embeds[1 + 15 :][:4]  # the first image of the fourth sample
    assert torch.equal(third, torch.from_numpy(picture((2, 2), 2, 30)[0]))


@pytest.mark.promise("vqa.preprocess")
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_gives_the_same_spans_after_unpadding(side):
    prepared = prepare(GRIDS)
    batch = prepared.batch
    padded = batch.pad(side, pad_to=40, pad_id=7)
    mask = padded.layout.attention_mask
    at_image = torch.zeros(padded.total_tokens, dtype=torch.bool)
    at_image[padded.media_index] = True
    for i, (own, (first, last)) in enumerate(zip(prepared.vision_spans, prepared.answer_spans, strict=True)):
        row = from_padded(at_image.unflatten(0, mask.shape)[i], mask[i])
        assert row.nonzero().flatten().tolist() == [p for a, b in own for p in range(a, b + 1)]
        counted = from_padded(padded.loss_mask.unflatten(0, mask.shape)[i], mask[i])
        assert counted.nonzero().flatten().tolist() == list(range(first, last + 1))
    ids, _ = to_padded(batch.input_ids, batch.layout, side, pad_to=40, fill=7)
    assert torch.equal(ids.flatten(), padded.input_ids)


def test_without_answers_every_token_of_the_prompts_is_there():
    prepared = prepare(ROWS, answers=None)
    assert prepared.answer_spans is None
    assert prepared.batch.num_targets == 0
    texts = per_sample(prepared.batch.input_ids, prepared.batch.layout.lengths())
    assert texts[5] == [6]
    assert texts[0] == [1, 5, IMAGE, IMAGE, IMAGE, IMAGE, 7, 8]


# --------------------------------------------------------------------------- errors

GOOD: Row = ("1 <image> 2", [SQUARE], "3")
BAD: dict[str, tuple[Row, str]] = {
    "no marker": (("1 2", [SQUARE], "3"), "the question has no image marker"),
    "too few": (("1 <image>", [SQUARE, SQUARE], "3"), "1 image marker for 2 images"),
    "too many": (("<image> <image>", [SQUARE], "3"), "2 image markers for 1 image"),
    "marker without images": (("1 <image>", [], "3"), "1 image marker for 0 images"),
    "empty question": (("", [], "3"), "the question is empty"),
    "empty answer": (("1 <image>", [SQUARE], " "), "the answer is empty"),
    "marker in the answer": (("1 <image>", [SQUARE], "3 <image>"), "the answer holds an image marker"),
    "unknown id": (("1 <image> 99", [SQUARE], "3"), "token id 99 is outside the vocabulary of 60"),
    "negative id": (("1 <image>", [SQUARE], "-1"), "token id -1 is outside the vocabulary of 60"),
}


@pytest.mark.promise("vqa.preprocess")
@pytest.mark.parametrize("case", BAD)
def test_a_bad_sample_is_named(case):
    row, message = BAD[case]
    with pytest.raises(SourceError, match=message) as caught:
        prepare([GOOD, row, GOOD], sample_ids=[7, 71, 72])
    assert "at: sample 71" in str(caught.value)


@pytest.mark.promise("vqa.preprocess")
@pytest.mark.parametrize(
    ("cut", "message"),
    [("images", "2 images, 3 questions, 3 answers"), ("questions", "3 images, 2 questions, 3 answers"),
     ("answers", "3 images, 3 questions, 2 answers")],
)  # fmt: skip
def test_lists_of_different_lengths_are_refused_with_the_samples_that_lack_an_entry(cut, message):
    lists: dict[str, Any] = {
        "images": [[picture(SQUARE, 2, 0)]] * 3,
        "questions": ["<image>"] * 3,
        "answers": ["3"] * 3,
    }
    lists[cut] = lists[cut][:2]
    with pytest.raises(SourceError, match=message) as caught:
        preprocess(VOCABULARY, **lists, sample_ids=[5, 6, 8])
    assert "at: sample 8" in str(caught.value)


# --------------------------------------------------------------------------- the strict mode


@pytest.mark.promise("vqa.aligned")
def test_spans_that_are_not_aligned_are_named_with_both_samples_and_the_remedies():
    rows: list[Row] = [("1 2 <image> 4", [SQUARE], "3"), ("5 6 <image>", [SQUARE], "3"), ("5 <image> 7", [SQUARE], "3")]
    with pytest.raises(SourceError) as caught:
        prepare(rows, aligned=True)
    text = str(caught.value)
    assert "Vision token positions not aligned across batch: sample 0 has (2, 5), sample 2 has (1, 4)" in text
    assert "turn aligned off" in text
    assert "the text before images equally long" in text
    assert len(prepare(rows).vision_spans) == 3


@pytest.mark.promise("vqa.aligned")
def test_images_of_different_sizes_are_not_aligned():
    rows: list[Row] = [("1 <image>", [SQUARE], "3"), ("5 <image>", [(3, 1)], "3")]
    message = r"sample 4 has \(1, 4\), sample 9 has \(1, 3\); their images have 4 and 3 tokens"
    with pytest.raises(SourceError, match=message) as caught:
        prepare(rows, aligned=True, sample_ids=[4, 9])
    assert "images equally large" in str(caught.value)
    with pytest.raises(SourceError, match=r"sample 0 has \(1, 4\), sample 1 has none"):
        prepare([rows[0], ("1", [], "2")], aligned=True)


@pytest.mark.promise("vqa.preprocess")
@pytest.mark.parametrize("case", ["patch size", "nan", "no question", "no answer", "equal ids"])
def test_what_cannot_be_a_sample_is_refused_by_its_name(case):
    images = [[picture((2, 2), 2, 0)], [picture((2, 2), 2, 1)]]
    questions, answers, ids = [row[0] for row in ROWS if len(row[1]) == 1][:1] * 2, ["1", "2"], [7, 8]
    if case == "patch size":
        images[1] = [picture((2, 2), 3, 1)]
    elif case == "nan":
        images[1][0][0][0, 0] = np.nan
    elif case == "no question":
        questions[1] = None
    elif case == "no answer":
        answers[1] = None
    else:
        ids[0] = 8
    with pytest.raises(SourceError) as caught:
        preprocess(VOCABULARY, images, questions, answers, sample_ids=ids)
    assert "sample 8" in caught.value.where
