"""Faults of code, for troubles that no recipe and no data reach: they change what batches hold or what a model does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import Layout
from unpad.data.images import ImageData
from unpad.data.text import TextData
from unpad.data.tokens.token_set import TokenSet
from unpad.doctor.trials import steps
from unpad.models.decoder import Decoder
from unpad.nn.block import Attention, FeedForward
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


def wrong_shift(patch: pytest.MonkeyPatch) -> None:
    """Labels are the tokens that are read, not the next ones."""

    def unshifted(batch: RaggedBatch) -> RaggedBatch:
        assert batch.input_ids is not None
        return replace(batch, labels=torch.where(batch.loss_mask, batch.input_ids, 0))

    _loads(patch, TextData, unshifted)


def labels_on_padding(patch: pytest.MonkeyPatch) -> None:
    """Padding counts in the loss."""

    def counted(batch: RaggedBatch) -> RaggedBatch:
        if isinstance(batch.layout, Layout):
            return batch
        every = torch.ones_like(batch.loss_mask)
        return replace(batch, loss_mask=every, target_index=every.nonzero().flatten())

    _loads(patch, TextData, counted)


def double_bos(patch: pytest.MonkeyPatch) -> None:
    """Every document begins with BOS twice: its first token is BOS as well."""
    whole = TokenSet._whole

    def doubled(self: TokenSet, i: int) -> Any:
        ids, mask, offsets = whole(self, i)
        ids[1] = ids[0]
        return ids, mask, offsets

    patch.setattr(TokenSet, "_whole", doubled)


def no_gradient(patch: pytest.MonkeyPatch) -> None:
    """The blocks' outputs are cut off from the gradient."""
    hidden = Decoder._normed

    def cut(self: Decoder, stream: Any) -> Any:
        delta = None if stream.delta is None else stream.delta.detach()
        return hidden(self, replace(stream, delta=delta, x=stream.x.detach() * 0.5 + stream.x * 0.0))

    patch.setattr(Decoder, "_normed", cut)


def nan_in_layer_3(patch: pytest.MonkeyPatch) -> None:
    """The feed-forward part of the third block divides by zero."""

    def spoil(model: nn.Module) -> None:
        blocks: Any = model.blocks
        blocks[2].feed_forward.register_forward_hook(lambda module, given, made: made / 0 * 0)

    _builds(patch, spoil)


def dead_gates(patch: pytest.MonkeyPatch) -> None:
    """The biases of all units are far below 0."""

    def kill(model: nn.Module) -> None:
        for part in model.modules():
            if isinstance(part, FeedForward):
                assert part.up.bias is not None
                part.up.bias.fill_(-50.0)

    _builds(patch, kill)


def collapsed_attention(patch: pytest.MonkeyPatch) -> None:
    """Queries and keys are so large that each token looks at one other."""

    def sharpen(model: nn.Module) -> None:
        for part in model.modules():
            if isinstance(part, Attention):
                part.to_qkv.weight[: (part.heads + part.kv_heads) * part.head_dim] *= 3000

    _builds(patch, sharpen)


def uniform_attention(patch: pytest.MonkeyPatch) -> None:
    """Queries are 0, so that every token looks at all alike."""

    def blind(model: nn.Module) -> None:
        for part in model.modules():
            if isinstance(part, Attention):
                part.to_qkv.weight[: part.heads * part.head_dim] = 0

    _builds(patch, blind)


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


def slow_disk(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint takes a second."""
    save = steps.save

    def slowly(*args: Any) -> Any:
        _late[0] += 1.0
        return save(*args)

    patch.setattr(steps, "save", slowly)


def shuffled_images(patch: pytest.MonkeyPatch) -> None:
    """Classes are given to pictures at random."""
    order = np.random.default_rng(5).integers(0, 2, 4096)

    def random(batch: RaggedBatch) -> RaggedBatch:
        assert batch.seq_ids is not None
        return replace(batch, seq_labels=torch.from_numpy(order[batch.seq_ids.numpy()]))

    _loads(patch, ImageData, random)
