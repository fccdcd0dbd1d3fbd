"""Evaluation of image classifiers: accuracy, by class too, and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from unpad.data.images import ImageData
from unpad.data.measuring import Measuring
from unpad.data.pixels.formats import ImageError
from unpad.data.rows import read_classes
from unpad.data.sources.images import read_bytes
from unpad.data.sources.split import Split
from unpad.evaluation.attention_maps import maps_of_image
from unpad.evaluation.classes import ClassPredictions, predict, rows
from unpad.evaluation.classes import held_out as held_out
from unpad.evaluation.family import HeldOutInputs, Numbers, TrainedModel, evenly
from unpad.evaluation.metrics import Evaluation, Metric, NewFacts, exact_share, interval, mean_of, resample
from unpad.inference.images import ReadImage, classify_images, read_image
from unpad.inference.loaded import LoadedRun
from unpad.run.report.attention import has_attention, keep_attention

NUM_BINS = 10  # of confidence, in the calibration error and its picture
HIGHER_IS_BETTER: dict[str, bool | None] = {
    "loss": False,
    "accuracy": True,
    "commonest_class": None,
    "accuracy_*": True,
    "top5_accuracy": True,
    "balanced_accuracy": True,
    "calibration_error": False,
}


def evaluate(run: LoadedRun, over: Measuring[ImageData], num_shown: int) -> Evaluation:
    """`accuracy` beside that of always saying the `commonest_class`, `top5_accuracy`, `balanced_accuracy`, `loss`,
    `calibration_error`, and `accuracy_<class>`.

    The calibration error is the mean distance between confidence and accuracy over bins of confidence (Guo et al.
    2017, arXiv 1706.04599).

    Args:
        over: the images to measure on.
        num_shown: number of wrongly classified images to show, the surest first.
    """
    ids, data = over.seq_ids, over.data
    predictions = predict(over)
    metrics = summarise(predictions, data.classes, groups=data.table.group[ids])
    confidence = np.exp(predictions.log_p.max(1))
    wrong = [i for i in np.argsort(-confidence) if not predictions.right[i]][:num_shown]
    lines = [
        f"{data.where(int(ids[i]))}: {data.classes[predictions.chosen[i]]} with {confidence[i]:.0%}, "
        f"it is {data.classes[predictions.labels[i]]}"
        for i in wrong
    ]
    return Evaluation(metrics, lines, describe(predictions, data.classes), lambda: rows(over, predictions))


def check_new(data: ImageData, path: Path) -> NewFacts:
    """Report images of a mode or size that training did not have; unknown classes are in `data.lines()`."""
    return data.album.unlike_training()


def keepsakes(ended: TrainedModel[ImageData]) -> None:
    """Keep attention maps of one held-out image."""
    if ended.wants(has_attention) and (maps := maps_of_image(ended.model, ended.data)) is not None:
        keep_attention(ended.folder, ended.step, maps)


def summarise(
    predictions: ClassPredictions, classes: tuple[str, ...], seed: int = 0, groups: np.ndarray | None = None
) -> dict[str, Metric]:
    """Metrics with bootstrap intervals over groups of images, such as sizes of one icon.

    Args:
        groups: (num_images,) as in `resample`.
    """
    num = len(predictions.labels)
    groups = np.arange(num) if groups is None else groups
    num_groups = len(np.unique(groups))
    top = np.argsort(-predictions.log_p, 1)[:, :5]
    in_top = (top == predictions.labels[:, None]).any(1).astype(np.float64)
    of_class = [(predictions.labels == c).astype(np.float64) for c in range(len(classes))]
    sums = resample([*of_class, *(is_class * predictions.right for is_class in of_class)], seed, groups)
    size = len(classes)
    counts, hits = sums[:size], sums[size:]
    commonest = of_class[int(np.argmax([one.sum() for one in of_class]))]
    metrics = {
        "accuracy": mean_of(predictions.right, groups, seed, share=True),
        "commonest_class": mean_of(commonest, groups, seed, share=True),
    }
    if size > 5:
        metrics["top5_accuracy"] = mean_of(in_top, groups, seed, share=True)
    present = [c for c in range(size) if of_class[c].any()]
    with np.errstate(invalid="ignore"):
        recalls = hits[present] / counts[present]  # (classes, resamples); not a number where a resample has none
    value = float(np.mean([predictions.right[of_class[c] > 0].mean() for c in present]))
    of_classes = [len(np.unique(groups[of_class[c] > 0])) for c in present]
    balanced = interval(value, np.nanmean(recalls, 0), num, num_groups)
    metrics["balanced_accuracy"] = exact_share(balanced, min(of_classes))  # as wide as that of the rarest class
    metrics["loss"] = mean_of(predictions.nll, groups, seed)
    metrics["calibration_error"] = _calibration_error(predictions, seed, groups)
    for row, c in enumerate(present):
        mine = of_class[c] > 0
        drawn = recalls[row][counts[c] > 0]
        metric = interval(predictions.right[mine].mean(), drawn, int(mine.sum()), of_classes[row])
        metrics[f"accuracy_{classes[c]}"] = exact_share(metric, of_classes[row])
    return metrics


def _calibration_error(predictions: ClassPredictions, seed: int, groups: np.ndarray) -> Metric:
    bins = _bins(predictions)
    confidence = np.exp(predictions.log_p.max(1))
    gaps = [np.where(bins == b, confidence - predictions.right, 0.0) for b in range(NUM_BINS)]
    num = len(predictions.labels)
    sums = resample([*gaps, np.ones(num)], seed, groups)
    samples = np.abs(sums[:-1]).sum(0) / sums[-1]
    return interval(sum(abs(gap.sum()) for gap in gaps) / num, samples, num, len(np.unique(groups)))


def _bins(predictions: ClassPredictions) -> np.ndarray:
    """The bin of confidence that each image falls into, (num_images,) int."""
    bins: np.ndarray = np.minimum((np.exp(predictions.log_p.max(1)) * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    return bins


def describe(predictions: ClassPredictions, classes: tuple[str, ...]) -> dict[str, Any]:
    """Contents of `evaluation.json`: the confusion matrix (rows: true classes), and confidence against accuracy."""
    size = len(classes)
    confusion = np.zeros((size, size), np.int64)
    np.add.at(confusion, (predictions.labels, predictions.chosen), 1)
    bins, confidence = _bins(predictions), np.exp(predictions.log_p.max(1))
    calibration = []
    for b in np.unique(bins):
        sure, right = float(confidence[bins == b].mean()), float(predictions.right[bins == b].mean())
        calibration.append({"confidence": sure, "accuracy": right, "images": int((bins == b).sum())})
    return {"classes": list(classes), "confusion": confusion.tolist(), "calibration": calibration}


def held_out_inputs(run: LoadedRun, data: ImageData, most: int) -> HeldOutInputs:
    """Held-out images and the scores of their classes; without blank ones, to which `unpad infer` gives none."""
    used: dict[int, ReadImage] = {}
    for row in evenly(np.flatnonzero(data.table.split == Split.HOLDOUT), data.table.positions, most):
        with suppress(ImageError):
            used[row] = read_image(run, read_bytes(data.examples[row]), data.examples[row].path)
    classes = read_classes(run.files)

    def compute(images: Sequence[ReadImage]) -> list[Numbers]:
        found = [dict(answer.top) for answer in classify_images(run, images, len(classes))]
        return [{"score": np.array([scores[name] for name in classes])} for scores in found]

    return HeldOutInputs(data, list(used), list(used.values()), compute)
