"""Attention from one flat run to another: sequence i of the queries sees sequence i of the keys.

Sequences with similar numbers of queries and of keys are computed together as a small rectangle. The backward pass
keeps one weight per head, query and key of a rectangle. Rectangles are at most 25 % longer than needed in either
direction, unless that makes more than MAX_GROUPS of them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from unpad.batching.layout import Layout
from unpad.nn.draws import draw, kept
from unpad.nn.linear import Linear, rows_are_independent
from unpad.nn.norm import Norm
from unpad.nn.precision import widened

EPS = 1e-5  # of the norms of the layers built on this
MAX_GROUPS = 32
LENGTH_STEPS = (1.25, 1.5, 2.0, 4.0)  # longest over shortest of a rectangle, tried in turn while there are too many
MAX_CELLS = 1 << 22  # pairs of one query and one key in a rectangle of more than one sequence
# Number of multiplications up to which a product in fp32 takes less time than oneDNN's preparation of a bf16 product of
# a new size; rectangles have new sizes in every batch.
SMALL_PRODUCT = 1 << 23


@dataclass(frozen=True, eq=False)
class RectangleSide:
    """The queries, or the keys, of one rectangle.

    Indices of cells are computed on first use: adjacent sequences of equal length, such as a single sequence, need
    none, because their rectangle is a view of the run.

    Args:
        begins, lengths: of its sequences in the run, each (num_seqs,) int64.
        device: of the run.
    """

    begins: np.ndarray
    lengths: np.ndarray
    device: torch.device

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Number of sequences, and tokens of the longest."""
        return len(self.lengths), max(self.lengths.tolist(), default=0)

    @cached_property
    def is_view(self) -> bool:
        """True if the rectangle is a contiguous part of the run, without padding."""
        num_seqs, longest = self.shape
        if num_seqs < 2:
            return num_seqs == 1
        return bool(np.all(self.lengths == longest) and np.all(np.diff(self.begins) == longest))

    @cached_property
    def cells(self) -> Tensor:
        """Token of every cell, (num_seqs, longest) int64; cells past a sequence's end repeat its last token."""
        column = np.arange(self.shape[1])
        return self._give(self.begins[:, None] + np.minimum(column, self.lengths[:, None] - 1))

    @cached_property
    def mask(self) -> Tensor:
        """(num_seqs, longest) bool, True = real."""
        return self._give(self._real)

    @cached_property
    def real(self) -> Tensor:
        """Cells that hold a token, counted row by row, (num_tokens,) int64."""
        return self._give(np.flatnonzero(self._real))

    @cached_property
    def tokens(self) -> Tensor:
        """Tokens of the real cells, (num_tokens,) int64."""
        return self.cells.flatten() if self.is_view else self.cells.flatten().index_select(0, self.real)

    @cached_property
    def _real(self) -> np.ndarray:
        return np.arange(self.shape[1]) < self.lengths[:, None]

    def _give(self, values: np.ndarray) -> Tensor:
        with torch.inference_mode(False):  # first used in inference, they may be used in training later
            return torch.from_numpy(values).to(self.device)

    def take(self, x: Tensor) -> Tensor:
        """Spread (total_tokens, ...) over the rectangle, (num_seqs, longest, ...)."""
        if self.is_view:
            num_seqs, longest = self.shape
            return x.narrow(0, int(self.begins[0]), num_seqs * longest).unflatten(0, self.shape)
        return x.index_select(0, self.cells.flatten()).unflatten(0, self.shape)

    def flatten(self, x: Tensor) -> Tensor:
        """Take the real cells of (num_seqs, longest, ...), (num_tokens, ...) in the order of `tokens`."""
        x = x.flatten(0, 1)
        return x if self.is_view else x.index_select(0, self.real)

    def covers(self, total: int) -> bool:
        """True if the rectangle is the whole run of `total` tokens."""
        return self.is_view and self.shape[0] * self.shape[1] == total


@dataclass(frozen=True)
class PairGroup:
    """Sequences computed together as one rectangle of queries and keys."""

    queries: RectangleSide
    keys: RectangleSide


@dataclass(frozen=True)
class PairedRuns:
    """Two flat runs with the same number of sequences, as `attention_weights` computes them.

    Args:
        groups: rectangles; they leave out sequences without queries or without keys.
        num_queries, num_keys: tokens of the two runs; queries, keys: their layouts.
    """

    groups: tuple[PairGroup, ...]
    num_queries: int
    num_keys: int
    queries: Layout
    keys: Layout


def pair_sequences(queries: Layout, keys: Layout) -> PairedRuns:
    """Group the sequences of two runs by their lengths in both; boundaries are read from the device once.

    Args:
        queries, keys: layouts with the same number of sequences.
    """
    assert queries.num_seqs == keys.num_seqs, (queries.num_seqs, keys.num_seqs)
    device = queries.cu_seqlens.device
    bounds = torch.stack([queries.cu_seqlens, keys.cu_seqlens]).long().cpu().numpy()  # (2, num_seqs + 1)
    begins, lengths = bounds[:, :-1], bounds[:, 1:] - bounds[:, :-1]
    groups = tuple(
        PairGroup(*(RectangleSide(*side, device) for side in zip(begins[:, seqs], lengths[:, seqs], strict=True)))
        for seqs in _alike(lengths, rows_are_independent(queries.cu_seqlens))
    )
    num_queries, num_keys = bounds[:, -1].tolist()
    return PairedRuns(groups, num_queries, num_keys, queries, keys)


def _alike(lengths: np.ndarray, equal: bool) -> Iterator[np.ndarray]:
    """Sequences with similar lengths in both runs, (2, num_seqs), empty ones left out, group by group.

    If none remain, yield one group of no sequences, so that results still depend on their inputs in autograd.

    Args:
        equal: lengths are to be equal: a sequence has the bits that it has alone in rectangles without padding.
    """
    live = np.flatnonzero(lengths.all(0))
    if live.size < 2:
        yield live
        return
    if equal:
        code = np.unique(lengths[:, live], axis=1, return_inverse=True)[1].reshape(-1)
    for step in () if equal else LENGTH_STEPS:
        codes = np.ceil(np.log(lengths[:, live]) / math.log(step)).astype(np.int64)
        code = codes[0] * 1000 + codes[1]
        if np.unique(code).size <= MAX_GROUPS:
            break
    order = np.argsort(code, kind="stable")
    for seqs in np.split(live[order], np.flatnonzero(np.diff(code[order])) + 1):
        at_once = max(1, MAX_CELLS // int(lengths[:, seqs].max(1).prod()))
        yield from (seqs[start : start + at_once] for start in range(0, seqs.size, at_once))


@dataclass(frozen=True)
class PairWeights:
    """Attention weights of every query on every key, per head.

    Args:
        rectangles: per group of `pairs`, (num_seqs, heads, longest query, longest key) in fp32 or wider; 0 on cells
            past the end of the keys, undefined past the end of the queries.
    """

    pairs: PairedRuns
    rectangles: tuple[Tensor, ...]

    def apply(self, values: Tensor, dropout: float = 0.0) -> Tensor:
        """Sum values by weight.

        Args:
            values: (num_keys, heads, dim).
            dropout: share of the weights to set to zero, the others divided by 1 - dropout.

        Returns:
            (num_queries, heads, dim) of values' dtype; zeros where a sequence has no keys.
        """
        seed = draw() if dropout else 0
        parts = [values[:0]]
        for group, weights in zip(self.pairs.groups, self.rectangles, strict=True):
            if dropout:
                weights = self._drop(weights, group, dropout, seed)
            y = _product(weights, group.keys.take(values).transpose(1, 2))
            parts.append(group.queries.flatten(y.transpose(1, 2)).to(values.dtype))
        if self.pairs.groups[0].queries.covers(self.pairs.num_queries):
            return parts[1]
        tokens = [torch.arange(0, device=values.device), *(group.queries.tokens for group in self.pairs.groups)]
        out = values.new_zeros(self.pairs.num_queries, *values.shape[1:])
        return out.index_copy(0, torch.cat(tokens), torch.cat(parts))

    def _drop(self, weights: Tensor, group: PairGroup, share: float, seed: int) -> Tensor:
        """Apply dropout drawn from the places of query, head and key, so that grouping changes nothing."""
        heads = torch.arange(weights.shape[1], device=weights.device)[:, None, None]
        sides = ((group.queries, self.pairs.queries), (group.keys, self.pairs.keys))
        query, key = (
            side.cells if layout.places is None else layout.places[side.cells] for side, layout in sides
        )  # (num_seqs, longest)
        keep = kept(seed, query[:, None, :, None] * weights.shape[1] + heads, key[:, None, None, :], share)
        return torch.where(keep, weights / (1 - share), 0)

    def average(self, values: Tensor) -> Tensor:
        """Sum values (num_keys, dim) by the mean of all heads' weights, (num_queries, dim)."""
        mean = tuple(weights.mean(1, keepdim=True) for weights in self.rectangles)
        return PairWeights(self.pairs, mean).apply(values[:, None])[:, 0]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, (num_seqs, heads, rows, inner) by (num_seqs, heads, inner, columns), in b's dtype, small ones in fp32."""
    if a.device.type == "cpu" and a.numel() * b.shape[-1] <= SMALL_PRODUCT:
        b = widened(b)
    if rows_are_independent(b):  # strided numbers, as of one sequence, are summed in another order than copies
        a, b = a.contiguous(), b.contiguous()
    with torch.autocast(a.device.type, enabled=False):
        return a.to(b.dtype) @ b


def attention_weights(
    q: Tensor,
    k: Tensor,
    pairs: PairedRuns,
    *,
    key_bias: Tensor | None = None,
    places: tuple[Tensor, Tensor] | None = None,
) -> PairWeights:
    """Softmax over the keys of each query's own sequence.

    Args:
        q: (num_queries, heads, head_dim).
        k: (num_keys, kv_heads, head_dim); each key head serves heads / kv_heads consecutive query heads.
        key_bias: (num_keys,), added to every score of a key.
        places: of queries (num_queries,) and of keys (num_keys,), int64: a query sees keys at its own place and
            before it. Every query must see a key.

    Returns:
        softmax(q k^T / sqrt(head_dim) + key_bias) of every head, in fp32 or wider.
    """
    return PairWeights(pairs, tuple(_weigh(q, k, group, key_bias, places) for group in pairs.groups))


def _weigh(
    q: Tensor, k: Tensor, group: PairGroup, key_bias: Tensor | None, places: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Weights of one rectangle, (num_seqs, heads, longest query, longest key)."""
    rows, columns = group.queries.take(q).transpose(1, 2), group.keys.take(k).transpose(1, 2)
    if k.shape[1] != q.shape[1]:
        columns = columns.repeat_interleave(q.shape[1] // k.shape[1], 1)
    # The longer side last: a softmax over the other dimension is then vectorized, many times faster than over few keys.
    turned = rows.shape[-2] > columns.shape[-2]
    left, right = (columns, rows) if turned else (rows, columns)
    scores = widened(_product(left, right.transpose(-1, -2))) / math.sqrt(q.shape[-1])
    key, query = (-2, -1) if turned else (-1, -2)

    def spread(x: Tensor, dim: int) -> Tensor:
        """Align (num_seqs, cells) of queries or keys with a dimension of the scores."""
        return x[:, None, None, :] if dim == -1 else x[:, None, :, None]

    if key_bias is not None:
        scores = scores + spread(group.keys.take(key_bias), key)
    hidden = None if group.keys.is_view else ~spread(group.keys.mask, key)
    if places is not None:
        beyond = spread(group.keys.take(places[1]), key) > spread(group.queries.take(places[0]), query)
        hidden = beyond if hidden is None else hidden | beyond
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(key)
    return weights.transpose(-1, -2) if turned else weights


def received_attention(
    q: Tensor,
    k: Tensor,
    pairs: PairedRuns,
    *,
    key_bias: Tensor | None = None,
    places: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Mean attention that each key receives, over heads and the queries of its sequence; arguments as in
    `attention_weights`. Without gradient only one rectangle of weights exists at a time.

    Returns:
        (num_keys,) in fp32 or wider; the sum over a sequence is 1, or 0 where it has no queries.
    """
    parts, tokens = [widened(k[:0, 0, 0])], [torch.arange(0, device=k.device)]
    for group in pairs.groups:
        weights = _weigh(q, k, group, key_bias, places).mean(1)  # (num_seqs, longest query, longest key)
        real = group.queries.mask.to(weights.dtype)
        mean = _product(real[:, None], weights)[:, 0] / real.sum(1, keepdim=True)  # (num_seqs, longest key)
        parts.append(group.keys.flatten(mean))
        tokens.append(group.keys.tokens)
    out = parts[0].new_zeros(pairs.num_keys)
    return out.index_copy(0, torch.cat(tokens), torch.cat(parts))


class Projection(nn.Module):
    """norm(Linear(norm(x))): maps runs of different widths into one space, (num, width) to (num, inner)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm_in = Norm("layernorm", width, EPS)
        self.linear = Linear(width, inner)
        self.norm_out = Norm("layernorm", inner, EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm_out(widened(self.linear(self.norm_in(widened(x))[1])))[1]


class CrossAttention(nn.Module):
    """Multi-head attention from one run to another (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.3).

    The output has no bias, so that a sequence without keys gets exactly zero.

    Args:
        width: channels of both runs and of the result; a multiple of `heads`.
        dropout: share of attention weights that training sets to zero.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        assert width % heads == 0, f"heads {heads} does not divide width {width}"
        self.heads, self.dropout = heads, dropout
        self.to_q = Linear(width, width)
        self.to_kv = Linear(width, 2 * width)
        self.to_out = Linear(width, width, bias=False)

    def forward(self, x: Tensor, context: Tensor, pairs: PairedRuns) -> tuple[Tensor, PairWeights]:
        """Attend from x (num_queries, width) to context (num_keys, width).

        Returns:
            (num_queries, width), and the weights before dropout.
        """
        q = self.to_q(x).unflatten(-1, (self.heads, -1))  # (num_queries, heads, head_dim)
        k, v = self.to_kv(context).unflatten(-1, (2, self.heads, -1)).unbind(1)  # (num_keys, heads, head_dim)
        weights = attention_weights(q, k, pairs)
        y = weights.apply(v, self.dropout if self.training else 0.0)
        return self.to_out(y.flatten(1)), weights
