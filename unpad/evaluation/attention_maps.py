"""Attention maps of one held-out example, which a run of texts or images keeps at its end for its page."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.data.family import Data
from unpad.data.images import ImageData
from unpad.data.pictures.album import pixels_of
from unpad.data.sources.split import Split
from unpad.data.text import TOKENIZER, TextData
from unpad.data.tokens.tokenizer import load_tokenizer
from unpad.inference.attention import attention_weights
from unpad.models.contract import Model
from unpad.run.report.attention import LEVELS

MOST_TOKENS, MOST_HEADS, LEAST_TOKENS = 20, 6, 4
PICTURE = 96  # pixels of the longer side


def maps_of_text(model: Model, data: TextData) -> dict[str, Any] | None:
    """Weights that the first tokens of a text give to each other, as JSON values for the page.

    Returns:
        `where`, `tokens` and the `blocks` of `_blocks`; None without blocks of attention, or without an example.
    """
    chosen = _example(data)
    if chosen is None:
        return None
    stop = min(int(data.table.positions[chosen]), MOST_TOKENS, model.config.longest)
    batch = data.alone(chosen, 0, stop, 0)
    weights = _weights(model, batch)
    if not weights:
        return None
    assert batch.input_ids is not None, "texts are tokens"
    tokenizer = load_tokenizer(data.files[TOKENIZER])
    tokens = [tokenizer.decode([token_id]) for token_id in batch.input_ids.tolist()]
    return {"where": data.where(chosen), "tokens": tokens, "blocks": _blocks(weights, LEVELS["text"])}


def maps_of_image(model: Model, data: ImageData) -> dict[str, Any] | None:
    """Attention that each patch of an image receives from all of them on average, as a multiple of an equal share, as
    JSON values for the page.

    Returns:
        `where`, `grid`, `picture` and the `blocks` of `_blocks`; None as in `maps_of_text`.
    """
    chosen = _example(data)
    if chosen is None:
        return None
    batch = data.alone(chosen, 0, int(data.table.positions[chosen]), 0)
    received = [weights.mean(1, keepdim=True) * batch.total_tokens for weights in _weights(model, batch)]
    if not received:
        return None
    pixels = pixels_of(data.examples[chosen], grey_bits=data.album.settings.grey_bits)
    image, out = Image.fromarray(pixels), io.BytesIO()
    image.thumbnail((PICTURE, PICTURE))
    image.save(out, "PNG")
    shown = {"grid": data.album.grids[chosen].tolist(), "picture": base64.b64encode(out.getvalue()).decode()}
    return {"where": data.where(chosen), **shown, "blocks": _blocks(received, LEVELS["image"])}


def _example(data: Data) -> int | None:
    """The first held-out example of the last kind that is long enough; one of training where nothing is held out."""
    table = data.table
    long = table.positions >= LEAST_TOKENS
    for split in (Split.HOLDOUT, Split.TRAIN):
        ids = np.flatnonzero(long & (table.split == split))
        if ids.size:
            return int(ids[np.argmax(table.kind[ids])])
    return None


def _weights(model: Model, batch: RaggedBatch) -> list[Tensor]:
    """`attention_weights` of one sequence; none where the blocks attend to others than its tokens."""
    weights = attention_weights(model, batch.to(next(model.parameters()).device))
    return weights if weights and weights[0].shape[-1] == batch.total_tokens else []


def _blocks(maps: list[Tensor], levels: tuple[float, ...]) -> list[dict[str, Any]]:
    """The first and the last block, each with its number and `heads`, each a string with a digit per cell, row by row:
    the number of levels that it reaches.

    Args:
        maps: weights of every block, (heads, rows, columns).
    """
    return [
        {"block": block, "heads": [_digits(head.cpu().numpy(), levels) for head in maps[block][:MOST_HEADS]]}
        for block in dict.fromkeys((0, len(maps) - 1))
    ]


def _digits(values: np.ndarray, levels: tuple[float, ...]) -> str:
    return "".join(map(str, np.searchsorted(levels, values.flatten(), side="right").tolist()))
