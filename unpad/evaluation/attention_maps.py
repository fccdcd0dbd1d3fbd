"""Attention maps of one held-out example, which a run of texts or images keeps at its end for its page."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from unpad.data.family import Data
from unpad.data.images import ImageData
from unpad.data.pictures.grids import pixels_of
from unpad.data.sources.split import Split
from unpad.data.text import TOKENIZER, TextData
from unpad.data.tokens.tokenizer import load_tokenizer
from unpad.inference.attention import attention_weights
from unpad.models.contract import Model
from unpad.run.report.attention import LEVELS

MOST_TOKENS, MOST_HEADS, LEAST_TOKENS = 20, 6, 4
PICTURE = 96  # pixels of the longer side


def attention_maps(model: Model, data: Data, device: torch.device) -> dict[str, Any] | None:
    """Maps of the heads of the first and the last block, as JSON values for the page.

    Of a text, weights of its first tokens; of an image, what each patch receives from all of them on average, as a
    multiple of an equal share.

    Returns:
        `where`, and `tokens` or `grid` and `picture`; `blocks`, each with its number and `heads`, each a string with a
        digit per cell, row by row: the number of LEVELS that it reaches. None without blocks of attention, or for other
        data.
    """
    if not isinstance(data, TextData | ImageData):
        return None
    chosen = _example(data)
    if chosen is None:
        return None
    stop = int(data.table.positions[chosen])
    is_text = isinstance(data, TextData)
    batch = data.alone(chosen, 0, min(stop, MOST_TOKENS, model.config.longest) if is_text else stop, 0).to(device)
    weights = attention_weights(model, batch)
    if not weights or weights[0].shape[-1] != batch.total_tokens:
        return None
    maps = [one if is_text else one.mean(1, keepdim=True) * batch.total_tokens for one in weights]
    blocks = [
        {"block": block, "heads": [_digits(head.cpu().numpy(), is_text) for head in maps[block][:MOST_HEADS]]}
        for block in dict.fromkeys((0, len(maps) - 1))
    ]
    return {"where": data.where(chosen), **_shown(data, chosen, batch.input_ids), "blocks": blocks}


def _example(data: Data) -> int | None:
    """The first held-out example of the last kind that is long enough; one of training where nothing is held out."""
    table = data.table
    long = table.positions >= LEAST_TOKENS
    for split in (Split.HOLDOUT, Split.TRAIN):
        ids = np.flatnonzero(long & (table.split == split))
        if ids.size:
            return int(ids[np.argmax(table.kind[ids])])
    return None


def _shown(data: TextData | ImageData, chosen: int, ids: torch.Tensor | None) -> dict[str, Any]:
    if isinstance(data, TextData):
        assert ids is not None, "texts are tokens"
        tokenizer = load_tokenizer(data.files[TOKENIZER])
        return {"tokens": [tokenizer.decode([one]) for one in ids.tolist()]}
    image, out = Image.fromarray(pixels_of(data.examples[chosen])), io.BytesIO()
    image.thumbnail((PICTURE, PICTURE))
    image.save(out, "PNG")
    return {"grid": data.album.grids[chosen].tolist(), "picture": base64.b64encode(out.getvalue()).decode()}


def _digits(values: np.ndarray, is_text: bool) -> str:
    levels = LEVELS["text" if is_text else "image"]
    return "".join(map(str, np.searchsorted(levels, values.flatten(), side="right").tolist()))
