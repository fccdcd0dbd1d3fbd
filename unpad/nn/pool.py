"""Pooling: every sequence of a flat run becomes one vector.

A sum runs over the tokens of its own sequence in their order and without atomics, so it repeats to the bit and does not
depend on what else is in the batch.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from unpad.layout import Layout, PaddedLayout
from unpad.nn.linear import Linear


def segment_sum(x: Tensor, layout: Layout | PaddedLayout) -> Tensor:
    """Sum over the tokens of each sequence.

    Args:
        x: (total_tokens, dim); what padding cells of a PaddedLayout hold does not matter.

    Returns:
        (num_seqs, dim) in fp32 or wider, as accumulated; an empty sequence gives zeros.
    """
    return _sum(_real_tokens(x, layout), layout.lengths())


def segment_mean(x: Tensor, layout: Layout | PaddedLayout) -> Tensor:
    """Mean over the tokens of each sequence; arguments and result as in `segment_sum`."""
    return segment_sum(x, layout) / layout.lengths().clamp_min(1)[:, None]


class AttentionPool(nn.Module):
    """Attention of one learned query per head to the tokens of each sequence (Lee et al. 2019, arXiv 1810.00825,
    section 3.2, with a single seed).

    A query over all channels needs no projection of keys, and whatever linear layer follows is the output projection.

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
        x, lengths = _real_tokens(x, layout), layout.lengths()
        wide = torch.promote_types(x.dtype, torch.float32)
        sequence = torch.repeat_interleave(lengths, output_size=x.shape[0])  # (num_tokens,) of the real ones
        scores = self.query(x).to(wide) / math.sqrt(x.shape[1])  # (num_tokens, heads)
        # Each sequence's own maximum: with the batch's, a sequence of low scores would lose all of its weights.
        highest = _reduce(scores.detach(), "max", lengths)  # (num_seqs, heads)
        weights = (scores - highest.index_select(0, sequence)).exp()
        values = self.to_value(x).to(wide).unflatten(-1, (self.heads, -1))  # (num_tokens, heads, head_dim)
        total = _sum(weights, lengths)  # (num_seqs, heads), 0 for an empty sequence, else at least 1
        pooled = _sum((weights[..., None] * values).flatten(1), lengths).unflatten(-1, (self.heads, -1))
        return (pooled / torch.where(total > 0, total, 1)[..., None]).flatten(1)


def _real_tokens(x: Tensor, layout: Layout | PaddedLayout) -> Tensor:
    return x[layout.attention_mask.flatten()] if isinstance(layout, PaddedLayout) else x


def _sum(x: Tensor, lengths: Tensor) -> Tensor:
    """Sum (num_tokens, dim), sequence after sequence, to (num_seqs, dim) in fp32 or wider."""
    if x.device.type != "cpu":  # there `index_add` adds in whatever order its threads arrive
        return _reduce(x, "sum", lengths)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # In the order of tokens, and some ten times faster than `segment_reduce`, which walks down one channel at a time.
    return wide.new_zeros(len(lengths), x.shape[1]).index_add(0, torch.repeat_interleave(lengths), wide)


def _reduce(x: Tensor, how: Literal["sum", "max"], lengths: Tensor) -> Tensor:
    """Reduce (num_tokens, dim), sequence after sequence, to (num_seqs, dim) in fp32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    # unsafe: layouts fit their tokens by construction, and an accelerator would wait for the check.
    return torch.segment_reduce(wide, how, lengths=lengths, unsafe=True)
