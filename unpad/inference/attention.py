"""Attention weights of a model's blocks for one sequence, by head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch
from unpad.models.contract import Model
from unpad.nn.block import Attention, Stream
from unpad.nn.precision import widened


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
        found.append(_weights(module, x, stream))

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


def _weights(attention: Attention, x: Tensor, stream: Stream) -> Tensor:
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
