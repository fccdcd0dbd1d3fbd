"""Operations within each sequence of a flat run: sums, means, softmax, order, and pooling by attention.

Sums run over the tokens of their own sequence in order and without atomics: they repeat to the bit and do not depend on
the rest of the batch.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from unpad.batching.layout import Layout, PaddedLayout
from unpad.nn.linear import Linear
from unpad.nn.precision import widened


def real_tokens(x: Tensor, layout: Layout | PaddedLayout) -> Tensor:
    """Tokens of a run, (num_tokens, ...), without the padding of a rectangle."""
    return x[layout.attention_mask.flatten()] if isinstance(layout, PaddedLayout) else x


def segment_sum(x: Tensor, layout: Layout | PaddedLayout) -> Tensor:
    """Sum over the tokens of each sequence.

    Args:
        x: (total_tokens, ...); padding cells of a PaddedLayout are ignored.

    Returns:
        (num_seqs, ...) in fp32 or wider, as accumulated; an empty sequence gives zeros.
    """
    return sum_runs(real_tokens(x, layout), layout.lengths())


def segment_mean(x: Tensor, layout: Layout | PaddedLayout) -> Tensor:
    """Mean over the tokens of each sequence; arguments and result as in `segment_sum`."""
    total = segment_sum(x, layout)
    return total / layout.lengths().clamp_min(1).view(-1, *[1] * (total.dim() - 1))


def segment_softmax(scores: Tensor, layout: Layout | PaddedLayout) -> Tensor:
    """Softmax over the tokens of each sequence, for every channel by itself.

    Args:
        scores: (total_tokens, ...); each sequence needs a finite score in every channel.

    Returns:
        (num_tokens, ...) in fp32 or wider, without padding.
    """
    scores, lengths = widened(real_tokens(scores, layout)), layout.lengths()
    sequence = torch.repeat_interleave(lengths, output_size=scores.shape[0])
    # Each sequence's own maximum: with the batch's, all weights of a sequence of low scores would underflow.
    weights = (scores - reduce_runs(scores.detach(), "max", lengths).index_select(0, sequence)).exp()
    return weights / sum_runs(weights, lengths).index_select(0, sequence)


def sum_runs(x: Tensor, lengths: Tensor) -> Tensor:
    """Sum (num_tokens, ...), run by run of these lengths (num_seqs,), to (num_seqs, ...) in fp32 or wider."""
    if x.device.type != "cpu":  # there `index_add` adds in the order in which threads arrive
        return reduce_runs(x, "sum", lengths)
    wide = widened(x)
    # In the order of tokens, and about ten times faster than `segment_reduce`, which handles one channel at a time.
    return wide.new_zeros(len(lengths), *x.shape[1:]).index_add(0, torch.repeat_interleave(lengths), wide)


def reduce_runs(x: Tensor, how: Literal["sum", "max"], lengths: Tensor) -> Tensor:
    """Reduce (num_tokens, ...), run by run, to (num_seqs, ...) in fp32 or wider."""
    # unsafe: layouts fit their tokens by construction, and an accelerator would wait for the check.
    return torch.segment_reduce(widened(x).contiguous(), how, lengths=lengths, unsafe=True)


def segment_place(layout: Layout) -> Tensor:
    """Place of every token in its own sequence, counted from 0, (total_tokens,) int64."""
    first = torch.repeat_interleave(layout.cu_seqlens[:-1].long(), layout.lengths())
    return torch.arange(first.numel(), device=first.device) - first


def segment_top_k(scores: Tensor, layout: Layout, k: Tensor) -> Tensor:
    """Mark the tokens of the k highest scores of each sequence, all tokens of a shorter sequence.

    Args:
        scores: (total_tokens,); among equal scores the earlier token is taken.
        k: (num_seqs,) int64.

    Returns:
        (total_tokens,) bool.
    """
    order, stops = scores.argsort(descending=True, stable=True), layout.cu_seqlens[:-1] + k
    if layout.num_seqs > 1:  # by sequence, then by score
        order = order[layout.seq_of_token()[order].argsort(stable=True)]
        stops = torch.repeat_interleave(stops, layout.lengths(), output_size=len(order))
    place = torch.arange(len(order), device=order.device)
    return torch.empty_like(order, dtype=torch.bool).index_copy_(0, order, place < stops)


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
