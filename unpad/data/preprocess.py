"""Batches for a vision-language model from images, questions and answers, with the positions of their parts.

Every sample has its own spans, so questions and images of any lengths share a batch; `aligned` demands equal spans, for
code that has one span for all samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch, from_prompts, from_sequences, required
from unpad.data.pictures.album import image_batch, with_images
from unpad.errors import SourceError
from unpad.models.vision_language.tower import Tower
from unpad.terminal.table import number_of

Image = tuple[np.ndarray, tuple[int, int]]  # patches (rows * columns, 3 * patch * patch), and (rows, columns)
PositionSpan = tuple[int, int]  # first and last position, both inclusive, counted from the sample's first token


@dataclass(frozen=True)
class Preprocessed:
    """A batch of samples, one sequence each.

    Args:
        batch: with `media`, one visual token per patch; `seq_ids` are the sample ids.
        vision_spans: per sample and image, the positions of its visual tokens.
        answer_spans: per sample, the positions that predict the answer, its end included: their labels are the answer.
            None without answers; then nothing is predicted, and the last token of every prompt is in the batch.
        raw_features: (total_patches, vision width), output of the tower; None without `tower`.
    """

    batch: RaggedBatch
    vision_spans: tuple[tuple[PositionSpan, ...], ...]
    answer_spans: tuple[PositionSpan, ...] | None = None
    raw_features: Tensor | None = None


@dataclass(frozen=True)
class Vocabulary:
    """Token ids of any tokenizer.

    Args:
        encode: text -> token ids, without BOS and EOS; an image marker becomes one `image`.
        size: number of token ids.
        image: id of an image marker; it may be outside the vocabulary.
        bos, eos: added before each question and after each answer; None adds nothing.
    """

    encode: Callable[[str], Sequence[int]]
    size: int
    image: int
    bos: int | None = None
    eos: int | None = None


def preprocess(
    vocabulary: Vocabulary,
    images: Sequence[Sequence[Image]],
    questions: Sequence[str],
    answers: Sequence[str] | None = None,
    *,
    sample_ids: Sequence[int] | None = None,
    aligned: bool = False,
    tower: Tower | None = None,
) -> Preprocessed:
    """Lay out samples of images, a question and an answer.

    Args:
        images: per sample, its images in the order of their markers; a sample may have none.
        questions: prompts, up to where the answer begins.
        answers: only their tokens and the EOS after them count in the loss.
        sample_ids: names of samples in errors; by default their positions.
        aligned: refuse samples with images at other positions than in the first sample.
        tower: computes `raw_features`, without gradient.

    Raises:
        SourceError: names the sample: lists of different lengths, equal ids, a question without tokens, no marker or
            another number of them than images, an image with more or fewer patches than its grid, of another size or
            with NaN, an empty answer, an id outside the vocabulary, spans that are not aligned.
    """
    ids = _check_lengths({"images": images, "questions": questions, "answers": answers, "sample_ids": sample_ids})
    _check_images(images, ids)
    pairs, spans, seq_ids = [], [], np.array(ids, np.int64)
    for index, where in enumerate(f"sample {id}" for id in ids):
        prompt, of_images = _prompt(vocabulary, questions[index], images[index], where)
        ending = [] if answers is None else _answer(vocabulary, answers[index], where)
        _check_ids([*prompt, *ending], vocabulary, where)
        pairs.append((prompt, ending))
        spans.append(of_images)
    if aligned:
        _check_aligned(spans, ids)
    counted = [[False] * len(prompt) + [True] * len(ending) for prompt, ending in pairs]
    samples = [prompt + ending for prompt, ending in pairs]
    text = from_prompts(samples, seq_ids) if answers is None else from_sequences(samples, counted, seq_ids)
    batch = _with_images(text, images, vocabulary.image)
    features = None
    if tower is not None and batch.media is not None:
        with torch.no_grad():
            features = tower(batch.media)
    # The token before the answer is the first that predicts a part of it.
    answer_spans = None if answers is None else tuple((len(p) - 1, len(p) + len(e) - 2) for p, e in pairs)
    return Preprocessed(batch, tuple(spans), answer_spans, features)


def _check_lengths(lists: dict[str, Sequence[Any] | None]) -> list[int]:
    """Return the ids of the samples; refuse lists of different lengths and equal ids."""
    sizes = {name: len(values) for name, values in lists.items() if values is not None}
    fewest, most = min(sizes.values()), max(sizes.values())
    given = lists["sample_ids"]
    ids: list[int] = list(range(most) if given is None else given)
    if fewest < most:
        incomplete = ids[fewest:] or list(range(fewest, most))
        raise SourceError(
            f"the lists differ in length: {', '.join(f'{size} {name}' for name, size in sizes.items())}",
            where="sample " + ", ".join(map(str, incomplete[:5])) + (" and more" if len(incomplete) > 5 else ""),
            fix="give every sample one entry in each list; one without images an empty list of them",
        )
    if len(set(ids)) < len(ids):
        twice = next(id for id in ids if ids.count(id) > 1)
        raise SourceError("two samples have one id", where=f"sample {twice}", fix="give every sample an id of its own")
    return ids


def _check_images(images: Sequence[Sequence[Image]], ids: list[int]) -> None:
    """Refuse images whose patches are not those of their grid, of one size, and finite."""
    size = next((np.shape(patches)[1:] for sample in images for patches, _ in sample), ())
    for where, sample in zip(ids, images, strict=True):
        for patches, (rows, columns) in sample:
            what, fix = "", "cut all images into patches of one size, one row of numbers each"
            if len(patches) != rows * columns or not len(patches):
                what = f"an image of {rows} x {columns} has {number_of(len(patches), 'patches')}"
                fix = "cut the image into rows x columns patches, at least one"
            elif len(size) != 1 or np.shape(patches)[1:] != size:
                what = f"an image has patches of shape {np.shape(patches)[1:]}, the first one of {size}"
            elif not np.isfinite(patches).all():
                what, fix = "an image has numbers that are NaN or infinite", "drop the sample, or mend its image"
            if what:
                raise SourceError(what, where=f"sample {where}", fix=fix)


def _prompt(
    vocabulary: Vocabulary, question: str, images: Sequence[Image], where: str
) -> tuple[list[int], tuple[PositionSpan, ...]]:
    """Token ids of a question, with each marker repeated once per patch, and the spans of these placeholders."""
    if not isinstance(question, str):
        raise SourceError("the question is no text", where=where, fix="give it a text, or drop the sample")
    ids = np.array([*([] if vocabulary.bos is None else [vocabulary.bos]), *vocabulary.encode(question)], np.int64)
    if not ids.size:
        raise SourceError("the question is empty", where=where, fix="give it a text, or drop the sample")
    is_marker = ids == vocabulary.image
    num_markers = int(is_marker.sum())
    if images and not num_markers:
        fix = "write the image marker into the question, and use a tokenizer that has it as one token"
        raise SourceError("the question has no image marker", where=where, fix=fix)
    if num_markers != len(images):
        what = f"the question has {number_of(num_markers, 'image markers')} for {number_of(len(images), 'images')}"
        raise SourceError(what, where=where, fix="write one marker for each image")
    repeats = np.ones_like(ids)
    repeats[is_marker] = [len(patches) for patches, _ in images]
    stops = np.cumsum(repeats)[is_marker]
    spans = zip((stops - repeats[is_marker]).tolist(), (stops - 1).tolist(), strict=True)
    return np.repeat(ids, repeats).tolist(), tuple(spans)


def _answer(vocabulary: Vocabulary, answer: str, where: str) -> list[int]:
    ids = list(vocabulary.encode(answer)) if isinstance(answer, str) else []
    if not ids or not answer.strip():
        raise SourceError("the answer is empty", where=where, fix="give it a text, or drop the sample")
    if vocabulary.image in ids:
        raise SourceError("the answer holds an image marker", where=where, fix="only questions may have images")
    return [*ids, *([] if vocabulary.eos is None else [vocabulary.eos])]


def _check_ids(ids: list[int], vocabulary: Vocabulary, where: str) -> None:
    outside = [id for id in ids if id != vocabulary.image and not 0 <= id < vocabulary.size]
    if outside:
        what = f"token id {outside[0]} is outside the vocabulary of {vocabulary.size}"
        raise SourceError(what, where=where, fix="use the tokenizer that the model was made with")


def _check_aligned(spans: list[tuple[PositionSpan, ...]], ids: list[int]) -> None:
    """Refuse spans that differ from the first sample's."""
    for sample, of_sample in zip(ids, spans, strict=True):
        if of_sample != spans[0]:
            first, other = ([stop - start + 1 for start, stop in of] for of in (spans[0], of_sample))
            sizes = "" if first == other else f"; their images have {_listed(first)} and {_listed(other)} tokens"
            what = f"sample {ids[0]} has {_listed(spans[0])}, sample {sample} has {_listed(of_sample)}{sizes}"
            fix = "turn aligned off, as every sample has spans of its own; or make the text before images equally long"
            fix += " and images equally large"
            what = f"Vision token positions not aligned across batch: {what}"
            raise SourceError(what, where=f"sample {sample}", fix=fix)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def _with_images(batch: RaggedBatch, images: Sequence[Sequence[Image]], image_id: int) -> RaggedBatch:
    """Add images to a batch of text, in the order of its placeholders."""
    flat = [image for of_sample in images for image in of_sample]
    if not flat:
        return batch
    patches, grids = [np.asarray(patches, np.float32) for patches, _ in flat], np.array([grid for _, grid in flat])
    places = np.flatnonzero(required(batch.input_ids).numpy() == image_id)
    media = image_batch(patches, grids, patches[0].shape[1])
    return with_images(batch, media, places, [len(of_sample) for of_sample in images])
