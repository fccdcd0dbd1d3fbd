"""Small images, samples and models for tests of vision-language models; token ids are written as numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.helpers.models import random_model
from unpad.data.preprocess import Image, Preprocessed, Vocabulary, preprocess
from unpad.models.vision_language.model import VisionLanguage

VOCAB, IMAGE, PATCH = 60, 59, 2
Row = tuple[str, Sequence[tuple[int, int]], str]  # prompt, grid of each of its images, answer
SQUARE = (2, 2)
# Questions of unequal lengths, images at any place, none, several; the last sequence is one token long.
ROWS: list[Row] = [
    ("1 5 <image> 7 8", [SQUARE], "9 10"),
    ("<image> 3", [SQUARE], "4 5 6 7 8 9 1 2"),
    ("2 3 4", [], "5 6"),
    ("7 <image> 8 9 11 <image> <image>", [SQUARE] * 3, "1"),
    ("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 <image> 19", [SQUARE], "20 21 22"),
    ("6", [], "3"),
]
GRIDS: list[Row] = [
    ("1 5 <image> 7 8", [(1, 1)], "9 10"), ("<image> 3", [(3, 5)], "4 5 6 7 8 9 1 2"), ("2 3 4", [], "5 6"),
    ("7 <image> 8 9 11 <image> <image>", [(2, 2), (4, 1), (1, 3)], "1"), ("6", [], "3"),
]  # fmt: skip
LEARNED = {"positions": "learned", "side": 2, "pre_norm": True, "activation": "quick_gelu"}
TOWERS: dict[str, dict[str, Any]] = {
    "clip": {"vision": LEARNED},
    "clip, last layer": {"vision": {**LEARNED, "feature_layer": -1}, "language": {"kv_heads": 2, "tied": False}},
    "any size": {"vision": {"positions": "grid"}, "language": {"positions": "learned"}},
}
SAMPLES = {"clip": ROWS, "clip, last layer": ROWS, "any size": GRIDS}


def encode(text: str) -> list[int]:
    return [IMAGE if word == "<image>" else int(word) for word in text.split()]


VOCABULARY = Vocabulary(encode, VOCAB, IMAGE)


def picture(grid: tuple[int, int], patch: int, seed: int) -> Image:
    """Random patches of an image."""
    values = np.random.default_rng(seed).standard_normal((grid[0] * grid[1], 3 * patch * patch))
    return values.astype(np.float32), grid


def prepare(rows: Sequence[Row], patch: int = PATCH, seed: int = 0, **options: Any) -> Preprocessed:
    """The rows as a batch, with random images that depend on their place and on the seed."""
    images = [
        [picture(grid, patch, 100 * seed + 10 * i + j) for j, grid in enumerate(row[1])] for i, row in enumerate(rows)
    ]
    settings = {"vocabulary": VOCABULARY, "answers": [row[2] for row in rows], **options}
    return preprocess(images=images, questions=[row[0] for row in rows], **settings)


def tiny(
    vision: dict[str, Any] | None = None,
    language: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    **fields: Any,
) -> VisionLanguage:
    """A model small enough to compare every gradient of, in evaluation mode; `fields` are of the recipe's `model`."""
    section = {
        "kind": "vision_language", "image_id": IMAGE,
        "vision": {"width": 8, "blocks": 2, "heads": 2, "hidden": 12, "patch": PATCH, **(vision or {})},
        "language": {"width": 16, "blocks": 2, "heads": 4, "hidden": 24, "context": 64, **(language or {})},
        **fields,
    }  # fmt: skip
    model = random_model(section, VOCAB)
    for head in model.pruners.values():  # of a decided opinion, for some tokens and against others
        head.to_logit.weight.data.mul_(4)
    return model.to(dtype).eval()
