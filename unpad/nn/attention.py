"""Attention within each sequence of a flat run.

Layers call `self_attention`, which runs what `kernel.choose_kernels` chooses for the machine. Every kernel gives the
same result, forward and backward, as `reference_attention`; `unpad prove` shows it for the user's own data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from unpad.batching.layout import Layout, LengthGroup, PaddedLayout, build_layout
from unpad.nn.draws import draw, rows_of
from unpad.nn.dropout import kept
from unpad.nn.kernel import Kernel, choose_kernels, note, runs_native
from unpad.nn.linear import rows_are_independent
from unpad.nn.native.attention import native_attention
from unpad.nn.precision import wide_dtype
from unpad.nn.rope import Rotary, rotate

# The matmul kernel holds all query-key pairs of sequences up to WHOLE_LENGTH at once, at most 512 per token and head;
# for longer sequences it holds at most BLOCK_CELLS pairs at a time, over all heads.
WHOLE_LENGTH, BLOCK_CELLS = 512, 1 << 21
MATMUL = (Kernel.PADDED_MATMUL, Kernel.GROUP_MATMUL)


@dataclass(frozen=True)
class Extras:
    """Inputs of attention weights besides queries and keys.

    Args:
        tokens: (total_tokens,) int64, place of each token; dropout draws by it.
        key_bias: (total_tokens,) or None.
        scale, softcap, sinks: as in `ragged_attention`.
    """

    tokens: Tensor
    key_bias: Tensor | None
    dropout: float
    seed: int
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def fused(self) -> bool:
        """True if torch's fused kernels compute attention with these."""
        return self.key_bias is None and not self.dropout and self.softcap is None and self.sinks is None

    def map(self, move: Callable[[Tensor], Tensor]) -> Extras:
        """These extras with their tensors moved as the tokens are."""
        return replace(self, tokens=move(self.tokens), key_bias=None if self.key_bias is None else move(self.key_bias))


def self_attention(
    qkv: Tensor,
    layout: Layout | PaddedLayout,
    heads: int,
    causal: bool,
    *,
    qkv_bias: Tensor | None = None,
    rotary: Rotary | None = None,
    key_bias: Tensor | None = None,
    dropout: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """Attend within each sequence and nowhere else.

    Args:
        qkv: (total_tokens, heads + 2 * kv_heads, head_dim), queries, keys and values of one projection;
            kv_heads divides heads (Ainslie et al. 2023, arXiv 2305.13245).
        causal: a token sees itself and earlier tokens of its sequence; otherwise the whole sequence.
        qkv_bias: ((heads + 2 * kv_heads) * head_dim,), what `linear.apart` left to add to qkv.
        rotary: angles of `rotary_table` that queries and keys are rotated by first.
        key_bias: (total_tokens,), added to the scores of a key in every head; -inf removes the key.
        dropout: share of attention weights to set to zero.
        window: tokens that a token sees at most, itself and those just before it; needs `causal`. None for all.

    Returns:
        (total_tokens, heads, head_dim), softmax(q k^T / sqrt(head_dim) + key_bias) v.
    """
    assert causal or window is None, "a window is of causal attention"
    several = isinstance(layout, Layout) and len(layout.cu_seqlens) > 2
    # Torch's attention of a group of sequences depends on all of them.
    if several and rows_are_independent(qkv) and not runs_native(qkv.dtype, qkv.device, qkv.shape[2]):
        assert isinstance(layout, Layout)
        assert not dropout, "nothing is dropped without gradient"
        attend = partial(self_attention, heads=heads, causal=causal, qkv_bias=qkv_bias, window=window)
        return _each_alone(attend, qkv, layout, rotary, key_bias)
    window = None if window is None or reaches_all(layout, window) else window
    kernels = choose_kernels(
        qkv.dtype,
        qkv.device,
        layout,
        qkv.shape[2],
        key_bias=key_bias is not None,
        dropout=dropout > 0,
        window=window,
    )
    note(kernels)
    kv_heads = (qkv.shape[1] - heads) // 2
    seed = draw() if dropout else 0
    if kernels == (Kernel.NATIVE,):
        assert isinstance(layout, Layout), "the native kernel runs on flat runs"
        return native_attention(
            qkv,
            layout.cu_seqlens,
            heads=heads,
            kv_heads=kv_heads,
            causal=causal,
            qkv_bias=qkv_bias,
            rotary=rotary,
            key_bias=key_bias,
            dropout=dropout,
            seed=seed,
            bases=layout.bases,
            window=window,
        )
    if qkv_bias is not None:
        qkv = qkv + qkv_bias.view(qkv.shape[1:])
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    if rotary is not None:
        q, k = rotate(q, *rotary), rotate(k, *rotary)
    if kernels == (Kernel.DEFINITION,):
        assert isinstance(layout, Layout), "the definition takes flat runs"
        assert dropout == 0, "the definition has no dropout"
        return reference_attention(q, k, v, layout, causal, key_bias, window)
    extras = None
    if key_bias is not None or dropout:
        extras = Extras(rows_of(q, layout.places), key_bias, dropout, seed)
    return _torch_attention(q, k, v, layout, causal, kernels, extras, window)


def _each_alone(
    attend: Callable[..., Tensor], qkv: Tensor, layout: Layout, rotary: Rotary | None, key_bias: Tensor | None
) -> Tensor:
    """`attend` to one sequence after the other."""
    lengths = layout.lengths().tolist()
    parts = qkv.split(lengths)
    angles = [None] * len(lengths) if rotary is None else list(zip(*(x.split(lengths) for x in rotary), strict=True))
    biases = [None] * len(lengths) if key_bias is None else key_bias.split(lengths)
    return torch.cat([
        attend(part, build_layout(np.array([len(part)])), rotary=turn, key_bias=bias)
        for part, turn, bias in zip(parts, angles, biases, strict=True)
    ])  # fmt: skip


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    causal: bool,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`self_attention` for separate queries, keys and values, with the scaling, capping and sinks of imported models.

    Args:
        q: (total_tokens, heads, head_dim).
        k, v: (total_tokens, kv_heads, head_dim); values may have another head_dim.
        scale: factor of q k^T, by default 1 / sqrt(head_dim).
        window: as in `self_attention`.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: (heads,), scores of an additional key without a value, which every query sees.

    Returns:
        (total_tokens, heads, head_dim of values).
    """
    assert causal or window is None, "a window is of causal attention"
    window = None if window is None or reaches_all(layout, window) else window
    heads, head_dim = q.shape[1:]
    shaped = softcap is not None or sinks is not None
    kernels = choose_kernels(
        q.dtype,
        q.device,
        layout,
        head_dim,
        dropout=dropout > 0 or shaped,
        fused=not shaped and v.shape[2] == head_dim,
        window=window,
    )
    note(kernels)
    seed = draw() if dropout else 0
    if kernels == (Kernel.NATIVE,):
        return native_attention(
            torch.cat([q, k, v], 1),
            layout.cu_seqlens,
            heads=heads,
            kv_heads=k.shape[1],
            causal=causal,
            scale=scale,
            dropout=dropout,
            seed=seed,
            bases=layout.bases,
            window=window,
        )
    extras = Extras(rows_of(q, layout.places), None, dropout, seed, scale, softcap, sinks)
    return _torch_attention(q, k, v, layout, causal, kernels, extras, window)


def reaches_all(layout: Layout | PaddedLayout, window: int) -> bool:
    """True if no sequence is longer than the window, so that it hides nothing."""
    longest = layout.attention_mask.shape[1] if isinstance(layout, PaddedLayout) else layout.max_seqlen
    return longest <= window


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    causal: bool,
    key_bias: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention by definition, one sequence at a time in plain operations; the reference for tests and the proof."""
    k, v = _share_heads(q, k, v)
    outputs = [q[:0]]
    bounds = layout.cu_seqlens.tolist()
    for start, stop in pairwise(bounds):
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], k[start:stop]) / math.sqrt(q.shape[-1])
        if key_bias is not None:
            scores = scores + key_bias[start:stop]
        if causal:
            future = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        if window is not None:
            place = torch.arange(stop - start, device=q.device)
            scores = scores.masked_fill(place[:, None] - place >= window, -math.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[start:stop]))
    return torch.cat(outputs)


def _torch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout | PaddedLayout,
    causal: bool,
    kernels: tuple[Kernel, ...],
    extras: Extras | None,
    window: int | None,
) -> Tensor:
    """Attention through torch's own operations; each key head serves heads / kv_heads consecutive query heads."""
    if isinstance(layout, PaddedLayout):
        return _padded(q, k, v, layout.attention_mask, causal, kernels[0], extras, window)
    if kernels == (Kernel.VARLEN_FLASH,):
        return _varlen(q, k, v, layout, causal, window, extras.scale if extras else None)
    return _grouped(q, k, v, layout, causal, kernels, extras, window)


def _share_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key and value heads so that every query head has its own."""
    repeat = q.shape[1] // k.shape[1]
    if repeat == 1:
        return k, v
    return k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)


# --------------------------------------------------------------------------- length groups


def _grouped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    causal: bool,
    kernels: tuple[Kernel, ...],
    extras: Extras | None,
    window: int | None,
) -> Tensor:
    if not layout.groups:
        return q
    k, v = _share_heads(q, k, v)
    if (by_length := layout.by_length) is not None:
        q, k, v = (x.index_select(0, by_length) for x in (q, k, v))
        extras = extras and extras.map(lambda x: x.index_select(0, by_length))
    groups = zip(layout.groups, kernels, strict=True)
    out = torch.cat([_group_attention(q, k, v, group, causal, kernel, extras, window) for group, kernel in groups])
    return out if layout.undo is None else out.index_select(0, layout.undo)


def _group_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: LengthGroup,
    causal: bool,
    kernel: Kernel,
    extras: Extras | None,
    window: int | None,
) -> Tensor:
    """Attention of one group as a (num_seqs, heads, longest, head_dim) rectangle; returns its real tokens."""
    heads = q.shape[1]

    def rectangle(x: Tensor) -> Tensor:
        cells = x[group.start : group.stop] if group.cells is None else x.index_select(0, group.cells)
        padded: Tensor = cells.unflatten(0, (group.num_seqs, group.longest))
        return padded

    q, k, v = (rectangle(x).transpose(1, 2) for x in (q, k, v))  # (num_seqs, heads, longest, head_dim)
    # Real queries of a causal rectangle never see the cells to their right; only full attention needs the mask.
    seen: Callable[[slice], Tensor] | None = None
    if window is not None and window < group.longest:
        causal, seen = False, partial(in_window, group.longest, window, q.device)
    elif not causal and group.key_mask is not None:
        seen = partial(_real_keys, group.key_mask)
    if kernel in MATMUL:
        out = _matmul_attention(q, k, v, seen, causal, extras and extras.map(rectangle))
    else:
        assert extras is None or extras.fused, "the fused kernel takes no bias and no dropout"
        mask = None if seen is None else seen(slice(0, group.longest))
        scale = extras.scale if extras else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    out = out.transpose(1, 2).reshape(-1, heads, v.shape[3])
    return out if group.real is None else out.index_select(0, group.real)


def _real_keys(key_mask: Tensor, rows: slice) -> Tensor:
    """The keys that any queries see, (num_seqs, 1, 1, longest) bool."""
    return key_mask[:, None, None, :]


def in_window(longest: int, window: int, device: torch.device, rows: slice) -> Tensor:
    """The keys that queries at these places see, (queries, longest) bool: the last `window` up to their own."""
    place = torch.arange(longest, device=device)
    distance = place[rows, None] - place
    return (distance >= 0) & (distance < window)


def _matmul_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Callable[[slice], Tensor] | None, causal: bool, extras: Extras | None
) -> Tensor:
    """softmax(q k^T) v as two matrix products, softmax in fp32 at least; extras hold (num_seqs, longest) here.

    Sequences above WHOLE_LENGTH are computed a few queries at a time, in backward again, so that memory grows with
    their length and not with its square.

    Args:
        q, k, v: (num_seqs, heads, longest, head_dim).
        mask: the keys that these queries see, bool and broadcast to (num_seqs, heads, queries, longest).
    """
    num_seqs, heads, longest, _ = q.shape
    if longest <= WHOLE_LENGTH:
        return attend_rows(q, k, v, slice(0, longest), mask, causal, extras)
    at_once = max(1, BLOCK_CELLS // (num_seqs * heads * longest))
    outputs = []
    for start in range(0, longest, at_once):
        rows = slice(start, min(start + at_once, longest))
        block = partial(attend_rows, rows=rows, mask=mask, causal=causal, extras=extras)
        seen = rows.stop if causal else longest
        # The only random draw is dropout's, which its seed repeats.
        outputs.append(
            checkpoint(
                block, q[:, :, rows], k[:, :, :seen], v[:, :, :seen], use_reentrant=False, preserve_rng_state=False
            )
        )
    return torch.cat(outputs, 2)


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: slice,
    mask: Callable[[slice], Tensor] | None,
    causal: bool,
    extras: Extras | None,
) -> Tensor:
    """Attention of the queries at the places `rows`, (num_seqs, heads, queries, head_dim), to the first keys."""
    wide, heads, num_keys = wide_dtype(q.dtype), q.shape[1], k.shape[2]
    with torch.autocast(q.device.type, enabled=False):
        scores = (q @ k.transpose(-1, -2)).to(wide)
        scores = scores * extras.scale if extras and extras.scale else scores / math.sqrt(q.shape[-1])
        if extras and extras.softcap:
            scores = extras.softcap * torch.tanh(scores / extras.softcap)
        if extras and extras.key_bias is not None:
            scores = scores + extras.key_bias[:, :num_keys].to(wide)[:, None, None, :]
        if causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(rows.start + 1)
            scores = scores.masked_fill_(future, -math.inf)
        if mask is not None:
            scores = scores.masked_fill_(~mask(rows), -math.inf)
        if extras and extras.sinks is not None:
            sinks = extras.sinks.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], 3)
        weights = scores.softmax(-1)[..., :num_keys]
        if extras and extras.dropout:
            own = torch.arange(heads, device=q.device)[:, None, None]
            places = extras.tokens[:, None, rows, None] * heads + own
            keep = kept(extras.seed, places, extras.tokens[:, None, None, :num_keys], extras.dropout)
            weights = torch.where(keep, weights / (1 - extras.dropout), 0)
        return weights.to(v.dtype) @ v


# --------------------------------------------------------------------------- accelerator and rectangles


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, causal: bool, window: int | None, scale: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # asks for a GPU build of torch when imported

    bounds, size = layout.cu_seqlens, layout.max_seqlen
    reach = (-1 if window is None else window - 1, 0) if causal else (-1, -1)
    gqa = q.shape[1] != k.shape[1]
    # num_splits=1: a sequence's output must not depend on what else is in the batch.
    out = varlen_attn(q, k, v, bounds, bounds, size, size, scale=scale, window_size=reach, enable_gqa=gqa, num_splits=1)
    assert isinstance(out, Tensor)
    return out


def _padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor,
    causal: bool,
    kernel: Kernel,
    extras: Extras | None,
    window: int | None,
) -> Tensor:
    """Attention of a flattened (batch, seq) rectangle with real cells anywhere in a row."""
    k, v = _share_heads(q, k, v)
    batch, seq = attention_mask.shape
    q, k, v = (x.unflatten(0, (batch, seq)).transpose(1, 2) for x in (q, k, v))  # (batch, heads, seq, head_dim)

    def mask(rows: slice) -> Tensor:
        """The cells that queries at these places of their row see, (batch, 1, queries, seq) bool."""
        place = torch.arange(seq, device=q.device)
        query = place[rows, None]
        seen = attention_mask[:, None, None, :]
        seen = seen & (place <= query) if causal else seen
        if window is not None:  # counted in real cells
            real = attention_mask.cumsum(1)
            seen = seen & (real[:, None, rows, None] - real[:, None, None, :] < window)
        # A padding query sees at least itself: a row without keys would be NaN, and NaN spreads.
        return seen | (place == query)

    if kernel in MATMUL:
        in_rows = extras and extras.map(lambda x: x.unflatten(0, (batch, seq)))
        out = _matmul_attention(q, k, v, mask, False, in_rows)
    else:
        assert extras is None, "the fused kernel takes no bias and no dropout"
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask(slice(0, seq)))
    return out.transpose(1, 2).flatten(0, 1)


def scale_values(qkv: Tensor, kv_heads: int, probability: Tensor, is_vision: Tensor) -> Tensor:
    """Multiply the values of vision tokens by the probability of keeping them: soft removal besides `soft_bias`.

    It weakens tokens even where all keys are vision tokens of one probability, which divides out of the weights. With
    probability 0 or 1 it changes nothing that the bias leaves.

    Args:
        qkv: (total_tokens, heads + 2 * kv_heads, head_dim).
        probability, is_vision: as in `soft_bias`.
    """
    factor = spread_values(probability, is_vision, 1).to(qkv.dtype)
    rest, values = qkv.split([qkv.shape[1] - kv_heads, kv_heads], 1)
    return torch.cat([rest, values * factor[:, None, None]], 1)


def spread_values(values: Tensor, where: Tensor, fill: float) -> Tensor:
    """Values (num,) on the True places of `where` (total_tokens,), `fill` on the others."""
    return values.new_full(where.shape, fill).masked_scatter(where, values)
