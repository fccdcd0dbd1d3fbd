"""Attention weights of a model's blocks by head, and maps of one held-out example that a run of texts or images keeps
at its end for its page."""

import base64
import io
import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch
from unpad.data.family import Data
from unpad.data.images import ImageData
from unpad.data.pictures.album import pixels_of
from unpad.data.sources.split import Split
from unpad.data.text import TOKENIZER, TextData
from unpad.data.tokens.tokenizer import load_tokenizer
from unpad.models.contract import Model
from unpad.nn.block import Attention, Stream
from unpad.nn.precision import widened
from unpad.run.report.attention import LEVELS


@torch.no_grad()
def attention_weights(model: Model, batch: RaggedBatch) -> list[Tensor]:
    """Weights that queries (rows) give to keys in every block, each (heads, num_tokens, num_tokens) fp32 or wider.

    They are computed separately from the queries and keys of the pass, because the kernels never store them.

    Args:
        batch: one sequence, as a flat run.

    Returns:
        One tensor per block; empty for a model without such blocks.
    """
    assert batch.num_seqs == 1, "maps are of one sequence"
    found: list[Tensor] = []

    def record(module: nn.Module, given: tuple[Any, ...]) -> None:
        x, stream = given[0], given[1]
        assert isinstance(module, Attention), "hooked below"
        assert isinstance(stream, Stream), "as blocks call their attention"
        found.append(_block_weights(module, x, stream))

    hooks = [one.register_forward_pre_hook(record) for one in model.modules() if isinstance(one, Attention)]
    was_training = model.training
    model.eval()
    try:
        model(batch)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return found


def _block_weights(attention: Attention, x: Tensor, stream: Stream) -> Tensor:
    q, k = attention.queries_and_keys(x, attention.rotary_of(stream))
    k = k.repeat_interleave(attention.heads // attention.kv_heads, 1)
    scores = torch.einsum("qhd,khd->hqk", widened(q), widened(k)) / math.sqrt(attention.head_dim)
    if stream.key_bias is not None:
        scores = scores + stream.key_bias
    if attention.causal:
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -math.inf)
    if attention.window is not None:
        unseen = torch.ones_like(scores[0], dtype=torch.bool).tril(-attention.window)
        scores = scores.masked_fill(unseen, -math.inf)
    return scores.softmax(-1)


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
