"""Small regions of pictures that tell the class alone: a mark of the labelling tool, a border, a watermark.

A class shows in many places of a picture, and on both sides of the split. A mark is in one place, or is missing where
nobody marked the pictures.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image

from unpad.data.images import ImageData
from unpad.data.pixels.decode import decode
from unpad.data.pixels.formats import ImageError
from unpad.data.sources.images import ImageExample, read_bytes
from unpad.doctor.data.rows import label_fields, sampled
from unpad.doctor.subject import Subject
from unpad.terminal.finding import Finding, Value

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
