"""Small models of images, and batches of random images for them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.helpers.models import random_model
from unpad.batching.batch import RaggedBatch, from_padded
from unpad.batching.layout import PaddedLayout, build_layout
from unpad.models.cnn import Cnn
from unpad.models.contract import Model
from unpad.models.vit import Vit

PATCH, SIDE, CLASSES = 2, 32, 5
SIZES = [(1, 1), (16, 16), (2, 7), (6, 90), (1, 5), (9, 4), (12, 1)]
VITS: dict[str, dict[str, Any]] = {
    "mean": {},
    "attention": {"pool": "attention", "norm": "rmsnorm", "activation": "swiglu", "kv_heads": 1},
    "convolutions": {"stem": (4,)},
    "opacity and size": {"stem": (4,), "channels": 4, "size_embed": True},
    "opacity": {"channels": 4},
}


def cut_patches(image: Tensor, patch: int) -> Tensor:
    """The patches of an image (channels, rows * patch, columns * patch), row by row, (rows * columns, num_values)."""
    rows, columns = image.shape[1] // patch, image.shape[2] // patch
    cells = image.reshape(len(image), rows, patch, columns, patch).permute(1, 3, 0, 2, 4)
    return cells.reshape(rows * columns, len(image) * patch**2)


def pack_images(images: Sequence[Tensor], labels: Sequence[int] | None, patch: int) -> RaggedBatch:
    """Images (channels, height, width), whose sides are multiples of `patch`, as a batch."""
    num_values = (images[0].shape[0] if len(images) else 3) * patch**2
    grid = [(image.shape[1] // patch, image.shape[2] // patch) for image in images]
    # Shown at their own size, or shrunk to a third.
    sizes = [[patch * side * (1 + 2 * (i % 2)) for side in sides] for i, sides in enumerate(grid)]
    lengths = np.array([rows * columns for rows, columns in grid], np.int64)
    total = int(lengths.sum())
    return RaggedBatch(
        layout=build_layout(lengths),
        position_ids=torch.cat([torch.arange(0), *(torch.arange(n) for n in lengths.tolist())]),
        input_ids=None,
        labels=torch.zeros(total, dtype=torch.int64),
        loss_mask=torch.zeros(total, dtype=torch.bool),
        target_index=torch.zeros(0, dtype=torch.int64),
        inputs_embeds=torch.cat([torch.zeros(0, num_values), *(cut_patches(image, patch) for image in images)]),
        seq_labels=None if labels is None else torch.tensor(labels, dtype=torch.int64),
        grid=torch.tensor(grid, dtype=torch.int64).reshape(-1, 2),
        image_sizes=torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2),
    )


def random_images(sizes: Sequence[tuple[int, int]] = SIZES, channels: int = 3) -> RaggedBatch:
    generator = torch.Generator().manual_seed(5)
    images = [torch.randn(channels, rows * PATCH, columns * PATCH, generator=generator) for rows, columns in sizes]
    return pack_images(images, [i % CLASSES for i in range(len(sizes))], PATCH)


def tiny_vit(dtype: torch.dtype = torch.float64, **fields: Any) -> Vit:
    sizes = {"kind": "vit", "width": 16, "blocks": 2, "heads": 2, "hidden": 24, "patch": PATCH, **fields}
    return random_model(sizes, CLASSES).to(dtype)


CLASSIFIERS: dict[str, dict[str, Any]] = {**{f"vit, {kind}": fields for kind, fields in VITS.items()}, "cnn": {}}


def classifier(kind: str, dtype: torch.dtype = torch.float64, **fields: Any) -> tuple[Vit | Cnn, RaggedBatch]:
    """A model of CLASSIFIERS, and images of several sizes, or of the one that it reads, with their classes."""
    if kind == "cnn":
        return small_cnn(dtype, **fields), random_squares()
    model = tiny_vit(dtype, **CLASSIFIERS[kind], **fields)
    return model, random_images(channels=model.config.channels)


def pack_squares(squares: Tensor, labels: Sequence[int]) -> RaggedBatch:
    """Squares (num_images, 3, side, side) as a batch of one token each."""
    num = len(squares)
    return RaggedBatch(
        layout=build_layout(np.ones(num, np.int64)),
        position_ids=torch.zeros(num, dtype=torch.int64),
        input_ids=None,
        labels=torch.zeros(num, dtype=torch.int64),
        loss_mask=torch.zeros(num, dtype=torch.bool),
        target_index=torch.zeros(0, dtype=torch.int64),
        inputs_embeds=squares.flatten(1),
        seq_labels=torch.tensor(labels, dtype=torch.int64),
        grid=torch.ones(num, 2, dtype=torch.int64),
    )


def random_squares(num: int = 7, side: int = SIDE) -> RaggedBatch:
    squares = torch.randn(num, 3, side, side, generator=torch.Generator().manual_seed(5))
    return pack_squares(squares, [i % CLASSES for i in range(num)])


def small_cnn(dtype: torch.dtype = torch.float64, **fields: Any) -> Cnn:
    return random_model({"kind": "cnn", "patch": SIDE, **fields}, CLASSES, 0.05).to(dtype)


def outputs(model: Model, batch: RaggedBatch) -> list[Tensor]:
    """Hidden states of real positions; of a model of images also logits and likelihoods."""
    with torch.no_grad():
        hidden = model(batch)
        if isinstance(batch.layout, PaddedLayout):
            mask = batch.layout.attention_mask
            hidden = from_padded(hidden.unflatten(0, mask.shape), mask)
        return [hidden, model.classify(batch), model.nll(batch)] if isinstance(model, Vit | Cnn) else [hidden]
