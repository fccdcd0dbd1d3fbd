"""Pictures as the model gets them: the size of their numbers, patches, and regions that tell the class alone.

A class shows in many places of a picture, and on both sides of the split. A mark is in one place, or is missing where
nobody marked the pictures.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image

from unpad.data.images import ImageData
from unpad.data.pictures.alike import small_copies
from unpad.data.pixels.decode import decode
from unpad.data.pixels.formats import ImageError
from unpad.data.sources.images import ImageExample, read_bytes
from unpad.data.vqa import VqaData
from unpad.doctor.data.rows import alone, label_fields, sampled
from unpad.doctor.subject import Subject
from unpad.terminal.finding import Finding, Value

SAMPLE, LEAST_PICTURES = 60, 8
LARGE, SMALL = 10.0, 0.01  # root mean square of a picture's numbers, and their spread over all pictures
FEW_PATCHES, LITTLE_KEPT = 4, 0.1  # patches of a picture, and share of its pixels
CHANGED, TOLD_BY_COLOUR = 0.25, 0.9  # least images.color, and share of pictures with a class that a colour tells
MOST_COLOURS, LEAST_COLOURS = 600, 60  # pictures
LOST_PICTURES = 0.1  # of the questions
ONE_PATCH, SHRUNK = 0.5, 3.0  # of the pictures, and times the pixels of a patch that they had


def check_lost_pictures(data: VqaData) -> list[Finding]:
    """Questions without a picture that others ask about one, as a join leaves them; those of a text alone are others.

    Numbers are ignored in the comparison.
    """
    plain = [re.sub(r"\d+", "0", one.question.casefold()) for one in data.examples]
    shown = {text for text, one in zip(plain, data.examples, strict=True) if one.images and text}
    lost = [one for text, one in zip(plain, data.examples, strict=True) if not one.images and text in shown]
    if len(lost) < max(LOST_PICTURES * len(data.examples), LEAST_PICTURES):
        return []
    values: dict[str, Value] = {"question": lost[0].question[:50], "where": lost[0].where}
    return [Finding("lost_pictures", "fault", len(lost) / len(data.examples), ("data.vqa",), values)]


def check_pictures(subject: Subject[ImageData | VqaData]) -> list[Finding]:
    """Findings on the pictures of the training sequences."""
    vectors = []
    for seq in sampled(subject.stage.train_ids, SAMPLE).tolist():
        batch = alone(subject, seq)
        shown = batch.inputs_embeds if batch.media is None else batch.media.inputs_embeds
        if shown is not None and len(shown):
            vectors.append(shown.double())
    if len(vectors) < LEAST_PICTURES:
        return []
    return [*_scale(torch.cat(vectors)), *(_patches(subject) or _shrunk(subject))]


def _scale(numbers: torch.Tensor) -> list[Finding]:
    size, spread = float(numbers.square().mean().sqrt()), float(numbers.std())
    if spread >= SMALL and size <= LARGE:
        return []
    values: dict[str, Value] = {"spread": spread}
    number = size if size > LARGE else spread
    return [Finding("picture_scale", "warning", number, ("images.std", "images.mean"), values)]


def _patches(subject: Subject[ImageData | VqaData]) -> list[Finding]:
    """Pictures of one patch that were shrunk to it; one that is as small as a patch keeps its detail: a note."""
    album = subject.data.album
    shrunk = np.array([one.width * one.height for one in album.images]) >= SHRUNK * album.patch**2
    one_patch = album.grids.prod(1) <= 1
    share, lost = float(one_patch.mean()), float((one_patch & shrunk).mean())
    if share < ONE_PATCH:
        return []
    images = subject.setup.recipe.images
    limits = ["images.max_tokens"] if images.max_tokens == 1 and images.size in ("native", "adaptive") else []
    limits += ["images.square"] if images.size in ("square", "letterbox") else []
    patch = "model.patch" if "patch" in type(subject.setup.model.config).model_fields else "model.vision.patch"
    values: dict[str, Value] = {"patch": album.patch, "field": (limits or [patch])[0], "lost": lost}
    return [Finding("one_patch", "fault" if lost >= ONE_PATCH else "note", share, (*limits, patch), values)]


def _shrunk(subject: Subject[ImageData | VqaData]) -> list[Finding]:
    """Pictures with few patches left, a small part of their pixels."""
    album, images = subject.data.album, subject.setup.recipe.images
    patches = album.grids.prod(1)
    kept = patches * album.patch**2 / np.array([one.width * one.height for one in album.images])
    few = (patches <= FEW_PATCHES) & (kept <= LITTLE_KEPT)
    if float(few.mean()) < ONE_PATCH:
        return []
    field = "images.square" if images.size in ("square", "letterbox") else "images.max_tokens"
    values: dict[str, Value] = {"field": field, "patches": float(np.median(patches)), "kept": float(np.median(kept))}
    return [Finding("shrunk", "warning", float(few.mean()), (field, "images.size"), values)]


def check_lost_colour(subject: Subject[ImageData]) -> list[Finding]:
    """A finding on classes that colours alone tell, where `images.color` changes the colours of training pictures."""
    data, strength = subject.data, subject.setup.recipe.images.color
    ids = sampled(subject.stage.train_ids, MOST_COLOURS)
    if strength < CHANGED or len(ids) < LEAST_COLOURS:
        return []
    copies = small_copies([data.examples[seq] for seq in ids.tolist()]).astype(np.float64) / 255
    grey = copies.mean(3).reshape(len(ids), -1)
    hues = (copies - copies.mean(3, keepdims=True)).mean((1, 2))
    labels = data.labels[ids]
    most = float(np.bincount(labels).max() / len(labels))
    by_hue, by_grey = _named_rightly(hues, labels), _named_rightly(grey - grey.mean(1, keepdims=True), labels)
    if by_hue < TOLD_BY_COLOUR or by_grey > most + (by_hue - most) / 2:
        return []
    values: dict[str, Value] = {"strength": strength, "grey": by_grey}
    return [Finding("lost_colour", "warning", by_hue, ("images.color",), values)]


def _named_rightly(features: np.ndarray, labels: np.ndarray) -> float:
    """The share of one half of the rows that a linear fit to the other half names rightly, for both halves."""
    features = np.concatenate(
        [(features - features.mean(0)) / np.maximum(features.std(0), 1e-6), np.ones((len(features), 1))], 1
    )
    wanted, right = np.eye(int(labels.max()) + 1)[labels], 0
    for half in (0, 1):
        own, other = features[half::2], features[1 - half :: 2]
        fit = np.linalg.solve(own.T @ own + 3 * np.eye(own.shape[1]), own.T @ wanted[half::2])
        right += int(((other @ fit).argmax(1) == labels[1 - half :: 2]).sum())
    return right / len(labels)


MOST_TRAINED, MOST_HELD, DECODERS = 400, 200, 4  # pictures, threads
LEAST, LEAST_HELD, PER_CLASS = 60, 16, 8  # pictures, and those of a class
CELLS, BLOCK = 32, 4  # of a side, and cells of a side of a block
TELLS = 0.9  # mean over classes of the share that a region names rightly
LOST = 0.4  # of what it names above chance, that may be left in held-out pictures
AT_EDGE, FEW = 4, 0.35  # cells from an edge, and share of the cells that tell the class, of a mark in all pictures
STEADY = 12.0  # deviation of the colours of a mark, of 255
RIDGE = 1.0  # on colours of 0 to 1


def check_regions(subject: Subject[ImageData]) -> list[Finding]:
    """A finding on a region of the pictures that alone tells the class."""
    data = subject.data
    trained, held = (sampled(ids, num) for ids, num in (
        (subject.stage.train_ids, MOST_TRAINED), (subject.stage.held_out_ids, MOST_HELD)
    ))  # fmt: skip
    counts = np.bincount(data.labels[trained], minlength=len(data.classes))
    classes = np.flatnonzero(counts >= PER_CLASS)
    trained, held = (ids[np.isin(data.labels[ids], classes)] for ids in (trained, held))
    if len(trained) < LEAST or len(classes) < 2:
        return []
    ours, theirs = (_cells([data.examples[seq] for seq in ids.tolist()]) for ids in (trained, held))
    labels, wanted = (np.searchsorted(classes, data.labels[ids]) for ids in (trained, held))
    for size in (1, BLOCK):
        found = _telling(_regions(ours, size), labels, _regions(theirs, size), wanted)
        if found is not None:
            share, is_lost, place = found
            row, column = divmod(place, CELLS // size)
            values: dict[str, Value] = {
                "place": _named(row * size, column * size),
                "where": "@not_held" if is_lost else "@at_edges",
            }
            return [Finding("marked_region", "warning", share, (*label_fields(subject), "data.holdout"), values)]
    return []


def _cells(examples: list[ImageExample]) -> np.ndarray:
    """Small copies with colours from 0 to 1, (num_pictures, CELLS, CELLS, 3) float32; 0 for a damaged picture."""

    def small(example: ImageExample) -> np.ndarray:
        try:
            pixels = decode(read_bytes(example)).pixels
        except ImageError:  # training reports the damage
            return np.zeros((CELLS, CELLS, 3), np.uint8)
        return np.asarray(Image.fromarray(pixels).resize((CELLS, CELLS), Image.Resampling.BOX))

    with ThreadPoolExecutor(DECODERS, thread_name_prefix="unpad-decoder") as pool:
        made = list(pool.map(small, examples))
    return np.array(made, np.float32).reshape(len(made), CELLS, CELLS, 3) / 255


def _regions(cells: np.ndarray, size: int) -> np.ndarray:
    """Colours of every region of `size` cells a side, (num_regions, num_pictures, size * size * 3)."""
    num, side = len(cells), CELLS // size
    parts = cells.reshape(num, side, size, side, size, 3).transpose(1, 3, 0, 2, 4, 5)
    made: np.ndarray = parts.reshape(side * side, num, size * size * 3)
    return made


def _telling(
    ours: np.ndarray, labels: np.ndarray, theirs: np.ndarray, wanted: np.ndarray
) -> tuple[float, bool, int] | None:
    """The share that the best region names rightly in training, whether that is lost in held-out pictures, and its
    place, if it is a mark."""
    halves = np.arange(len(labels)) % 2 == 0
    named = np.empty((len(ours), len(labels)), np.int64)
    for half in (halves, ~halves):
        named[:, half] = _name(ours[:, ~half], labels[~half], ours[:, half])
    right = _rightly(named, labels)
    place, chance = int(right.argmax()), 1 / len(np.unique(labels))
    best = float(right[place])
    if best < TELLS:
        return None
    if len(wanted) >= LEAST_HELD and len(np.unique(wanted)) > 1:
        there = float(_rightly(_name(ours[[place]], labels, theirs[[place]]), wanted)[0])
        if there <= chance + LOST * (best - chance):
            return best, True, place
    side = int(len(ours) ** 0.5)
    telling = np.flatnonzero(right >= chance + 0.7 * (best - chance))
    rows, columns = np.divmod(telling, side)
    edge = np.minimum(np.minimum(rows, columns), np.minimum(side - 1 - rows, side - 1 - columns)) * (CELLS // side)
    spread = np.mean([ours[place, labels == one].std(0).mean() for one in np.unique(labels)]) * 255
    is_mark = len(telling) <= FEW * len(ours) and bool((edge < AT_EDGE).all()) and spread <= STEADY
    return (best, False, place) if is_mark else None


def _name(learnt: np.ndarray, labels: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """The class of each shown picture by each region alone, (num_regions, num_shown): by the nearest mean of single
    cells, by least squares of blocks."""
    if learnt.shape[2] == 3:
        means = np.stack([learnt[:, labels == one].mean(1) for one in range(labels.max() + 1)], 1)
        nearest: np.ndarray = np.stack(
            [((shown - means[:, one, None]) ** 2).sum(2) for one in range(means.shape[1])]
        ).argmin(0)  # fmt: skip
        return nearest
    middle = learnt.mean(1, keepdims=True)
    inputs, others = learnt - middle, shown - middle
    targets = np.eye(labels.max() + 1, dtype=np.float32)[labels]
    targets = (targets - targets.mean(0)) / np.maximum(targets.sum(0), 1) ** 0.5
    square = inputs.transpose(0, 2, 1) @ inputs + RIDGE * np.eye(inputs.shape[2], dtype=np.float32)
    weights = np.linalg.solve(square, inputs.transpose(0, 2, 1) @ targets)
    named: np.ndarray = (others @ weights).argmax(2)
    return named


def _rightly(named: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Mean over classes of the share that is named rightly, (num_regions,)."""
    right: np.ndarray = np.mean([(named[:, labels == one] == one).mean(1) for one in np.unique(labels)], 0)
    return right


def _named(row: int, column: int) -> str:
    """The word of a place of a picture: a corner, an edge or the middle."""
    third = CELLS / 3
    down = "upper" if row < third else "lower" if row >= 2 * third else ""
    across = "left" if column < third else "right" if column >= 2 * third else ""
    return "@at_" + ("_".join(one for one in (down, across) if one) or "middle")
