"""Faults of code, for troubles that no recipe and no data reach: they change what batches hold or what a model does."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unpad.batching.batch import RaggedBatch
from unpad.data.images import ImageData
from unpad.data.text import TextData
from unpad.nn.block import FeedForward
from unpad.training import setup

Change = Callable[[RaggedBatch], RaggedBatch]


def _loads(patch: pytest.MonkeyPatch, data: Any, change: Change) -> None:
    """Change every batch that a class of data loads."""
    load = data.load
    patch.setattr(data, "load", lambda self, micro: change(load(self, micro)))


def _builds(patch: pytest.MonkeyPatch, change: Callable[[nn.Module], None]) -> None:
    """Change every model that is built."""
    build = setup.build_model

    def changed(*args: Any) -> Any:
        model = build(*args)
        with torch.no_grad():
            change(model)
        return model

    patch.setattr(setup, "build_model", changed)


def nan_in_layer_3(patch: pytest.MonkeyPatch) -> None:
    """The feed-forward part of the third block divides by zero."""

    def spoil(model: nn.Module) -> None:
        blocks: Any = model.blocks
        blocks[2].feed_forward.register_forward_hook(lambda module, given, made: made / 0 * 0)

    _builds(patch, spoil)


def exploding(patch: pytest.MonkeyPatch) -> None:
    """Matrices begin a thousand times too large."""

    def grow(model: nn.Module) -> None:
        for part in model.modules():
            if isinstance(part, FeedForward):
                part.down.weight *= 1e6

    _builds(patch, grow)


def overflowing(patch: pytest.MonkeyPatch) -> None:
    """Numbers leave the range of fp16, and not that of fp32."""

    def grow(model: nn.Module) -> None:
        for part in model.modules():
            if isinstance(part, FeedForward):
                part.up.weight *= 1e6

    _builds(patch, grow)


def bad_weight(patch: pytest.MonkeyPatch) -> None:
    """A weight is infinite."""

    def spoil(model: nn.Module) -> None:
        next(model.parameters())[0, 0] = float("inf")

    _builds(patch, spoil)


_late = [0.0]  # seconds that slow devices have added to the clock


def late_clock() -> float:
    """The clock of a machine with slow devices."""
    return time.process_time() + _late[0]


def slow_loader(patch: pytest.MonkeyPatch) -> None:
    """Every batch takes a second to load, as much as hundreds of steps of these models."""
    load = TextData.load

    def slowly(self: TextData, micro: Any) -> RaggedBatch:
        _late[0] += 1.0
        return load(self, micro)

    patch.setattr(TextData, "load", slowly)


def shuffled_images(patch: pytest.MonkeyPatch) -> None:
    """Classes are given to pictures at random."""
    order = np.random.default_rng(5).integers(0, 2, 4096)

    def random(batch: RaggedBatch) -> RaggedBatch:
        return replace(batch, seq_labels=torch.from_numpy(order[batch.seq_ids.numpy()]))

    _loads(patch, ImageData, random)
