"""Evaluation of image classifiers: accuracy, by class too, and calibration."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unpad.data.images import ImageData
from unpad.data.measuring import Measuring
from unpad.data.pixels.formats import ImageError
from unpad.data.rows import read_classes
from unpad.data.sources.images import read_bytes
from unpad.data.sources.split import Split
from unpad.evaluation.binary import NUM_BINS, beside_perfect, binned_error
from unpad.evaluation.classes import ClassPredictions, predict, rows
from unpad.evaluation.classes import held_out as held_out
from unpad.evaluation.family import HeldOutInputs, Numbers, evenly
from unpad.evaluation.metrics import Metric, NewFacts, exact_share, mean_of, measured, ratio
from unpad.evaluation.rows import Evaluation, ExampleRows
from unpad.evaluation.simple import MOST_PIXELS, MOST_ROWS, Guesses, Looks, classify, of_rows, sampled, thumbnails
from unpad.inference.images import ReadImage, classify_images, read_image
from unpad.inference.loaded import LoadedRun


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
    return Evaluation(metrics, lines, describe(predictions, data.classes), rows(over, predictions))


def check_new(data: ImageData, path: Path) -> NewFacts:
    """Report images of a mode or size that training did not have; unknown classes are in `data.lines()`."""
    return data.album.unlike_training()


def simple(training: ImageData, over: Measuring[ImageData], rows: ExampleRows) -> list[Guesses]:
    """Classes by small squares and colours of pictures."""
    rows_of = [(training, np.flatnonzero(training.table.split == part)) for part in (Split.TRAIN, Split.HOLDOUT)]
    chosen, looks = list[np.ndarray](), list[Looks]()
    for data, ids in (*rows_of, (over.data, over.seq_ids)):
        sizes = np.array([data.examples[i].height * data.examples[i].width for i in ids.tolist()])
        chosen.append(sampled(ids, np.maximum(sizes, MOST_PIXELS // MOST_ROWS), MOST_PIXELS))
        looks.append(thumbnails([data.album.picture(i) for i in chosen[-1].tolist()]))
    method, classes = classify(looks[0], training.labels[chosen[0]], looks[1], training.labels[chosen[1]], looks[2])
    right = np.full(len(over.seq_ids), np.nan)
    right[np.isin(over.seq_ids, chosen[2])] = classes == over.data.labels[chosen[2]]
    return [Guesses("accuracy", of_rows(method, chosen[0], rows_of[0][1]), {"right": right})]


def summarise(
    predictions: ClassPredictions, classes: tuple[str, ...], groups: np.ndarray | None = None
) -> dict[str, Metric]:
    """Metrics with bootstrap intervals over groups of images, such as sizes of one icon.

    Args:
        groups: (num_images,) as in `metrics.bootstrap`.
    """
    labels, right, num = predictions.labels, predictions.right, len(predictions.labels)
    groups = np.arange(num) if groups is None else groups
    confidence = np.exp(predictions.log_p.max(1))
    present, sizes = np.unique(labels, return_counts=True)
    members = [labels == place for place in present]
    num_groups = [len(np.unique(groups[mine])) for mine in members]
    metrics = {
        "accuracy": mean_of(right, groups, share=True),
        "commonest_class": mean_of(labels == present[sizes.argmax()], groups, share=True),
    }
    if len(classes) > 5:
        in_top = (np.argsort(-predictions.log_p, 1)[:, :5] == labels[:, None]).any(1)
        metrics["top5_accuracy"] = mean_of(in_top, groups, share=True)

    def balanced(weights: np.ndarray) -> np.ndarray:
        recalls = np.stack([ratio(right * mine, mine, weights) for mine in members])
        return np.nanmean(recalls, 0)  # a resample may lack a class

    recall = measured(balanced, num, groups, share=True)
    metrics["balanced_accuracy"] = exact_share(recall, min(num_groups))  # of the rarest class
    metrics["loss"] = mean_of(predictions.nll, groups)
    bins = _bins(confidence)
    error = measured(partial(binned_error, right, confidence, bins), num, groups)
    metrics["calibration_error"] = beside_perfect(
        error, lambda drawn: binned_error(drawn, confidence, bins), confidence, groups
    )
    for place, mine in zip(present, members, strict=True):
        of_class = partial(ratio, right * mine, mine)
        metrics[f"accuracy_{classes[place]}"] = measured(of_class, num, groups, counted=mine, share=True)
    return metrics


def _bins(confidence: np.ndarray) -> np.ndarray:
    """The bin of equal width that each image falls into, (num_images,) int."""
    return np.minimum((confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)


def describe(predictions: ClassPredictions, classes: tuple[str, ...]) -> dict[str, Any]:
    """Contents of `evaluation.json`: the confusion matrix (rows: true classes), and confidence against accuracy."""
    size = len(classes)
    confusion = np.zeros((size, size), np.int64)
    np.add.at(confusion, (predictions.labels, predictions.chosen), 1)
    confidence = np.exp(predictions.log_p.max(1))
    bins = _bins(confidence)
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
