"""Pictures as the model gets them: the size of their numbers, and the patches of each."""

from __future__ import annotations

import re

import numpy as np
import torch

from unpad.data.images import ImageData
from unpad.data.pictures.alike import small_copies
from unpad.data.vqa import VqaData
from unpad.doctor.data.rows import alone, sampled
from unpad.doctor.subject import Subject
from unpad.terminal.finding import Finding, Value

SAMPLE, LEAST_PICTURES = 60, 8
LARGE, SMALL = 10.0, 0.01  # root mean square of a picture's numbers, and their spread over all pictures
FEW_PATCHES, LITTLE_KEPT = 4, 0.1  # patches of a picture, and share of its pixels
CHANGED, TOLD_BY_COLOUR = 0.25, 0.9  # least images.color, and share of pictures whose class a colour tells
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
    """Pictures of which a few patches are left, a small part of their pixels."""
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
