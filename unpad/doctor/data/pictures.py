"""Pictures as the model gets them: the size of their numbers, and the patches of each."""

from __future__ import annotations

import numpy as np
import torch

from unpad.data.images import ImageData
from unpad.data.vqa import VqaData
from unpad.doctor.data.rows import alone, sampled
from unpad.doctor.finding import Finding, Value
from unpad.doctor.subject import Subject

SAMPLE, LEAST_PICTURES = 60, 8
LARGE, SMALL = 10.0, 0.01  # root mean square of a picture's numbers, and their spread over all pictures
ONE_PATCH, SHRUNK = 0.5, 3.0  # of the pictures, and times the pixels of a patch that they had


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
    return [*_scale(torch.cat(vectors)), *_patches(subject)]


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
