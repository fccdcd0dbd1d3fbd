"""Attention pooling: every sequence of a flat run becomes one vector, by learned weights."""

from __future__ import annotations

import math

from torch import Tensor, nn

from unpad.batching.layout import Layout, PaddedLayout
from unpad.nn.linear import Linear
from unpad.nn.precision import widened
from unpad.nn.segments import real_tokens, segment_softmax, sum_runs


class AttentionPool(nn.Module):
    """Attention of one learned query per head to the tokens of each sequence (Lee et al. 2019, arXiv 1810.00825,
    section 3.2, with a single seed).

    A query over all channels needs no projection of keys, and the linear layer that follows is the output projection.

    Args:
        width: channels of tokens and of the result.
        heads: divides `width`.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        assert width % heads == 0, f"heads {heads} does not divide width {width}"
        self.heads = heads
        self.query = Linear(width, heads, bias=False)  # row h is the query of head h
        self.to_value = Linear(width, width, bias=False)

    def forward(self, x: Tensor, layout: Layout | PaddedLayout) -> Tensor:
        """Pool (total_tokens, width) into (num_seqs, width), in fp32 or wider; an empty sequence gives zeros."""
        weights = segment_softmax(self.query(x) / math.sqrt(x.shape[1]), layout)  # (num_tokens, heads)
        values = widened(self.to_value(real_tokens(x, layout))).unflatten(-1, (self.heads, -1))
        return sum_runs((weights[..., None] * values).flatten(1), layout.lengths())
