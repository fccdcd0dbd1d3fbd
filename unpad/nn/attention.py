"""Attention within each sequence of a flat run.

Layers call `self_attention`, which runs what `kernel.choose_kernels` chooses for the machine. Every kernel gives the
same result, forward and backward, as `reference_attention`; `unpad prove` shows it for the user's own data.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from unpad.batching.layout import Layout, LengthGroup, PaddedLayout, build_layout
from unpad.nn.attend import Attend
from unpad.nn.draws import draw, kept, rows_of
from unpad.nn.kernel import FLASH_MULTIPLE, Kernel, choose_kernels, note, runs_native
from unpad.nn.linear import rows_are_independent
from unpad.nn.native.attention import native_attention
from unpad.nn.precision import wide_dtype
from unpad.nn.rope import turned

# The matmul kernel holds all query-key pairs of sequences up to WHOLE_LENGTH at once, at most 512 per token and head;
# for longer sequences it holds at most BLOCK_CELLS pairs at a time, over all heads.
WHOLE_LENGTH, BLOCK_CELLS = 512, 1 << 21
MATMUL = (Kernel.PADDED_MATMUL, Kernel.GROUP_MATMUL)


def self_attention(qkv: Tensor, layout: Layout | PaddedLayout, heads: int, how: Attend) -> Tensor:
    """Attend within each sequence and nowhere else.

    Args:
        qkv: (total_tokens, heads + 2 * kv_heads, head_dim), queries, keys and values of one projection;
            kv_heads divides heads (Ainslie et al. 2023, arXiv 2305.13245).

    Returns:
        (total_tokens, heads, head_dim).
    """
    several = isinstance(layout, Layout) and len(layout.cu_seqlens) > 2
    # Torch's attention of a group of sequences depends on all of them.
    if several and rows_are_independent(qkv) and not runs_native(qkv.dtype, qkv.device, qkv.shape[2]):
        return _each_alone(qkv, layout, heads, how)
    how = how.within(layout.longest)
    kernels = choose_kernels(qkv.dtype, qkv.device, layout, qkv.shape[2], how)
    note(kernels)
    how = _with_draws(how, qkv, layout)
    if kernels == (Kernel.NATIVE,):
        assert isinstance(layout, Layout), "the native kernel runs on flat runs"
        return native_attention(qkv, layout, heads, how)
    if how.qkv_bias is not None:
        qkv = qkv + how.qkv_bias.view(qkv.shape[1:])
    return _torch_attention(*turned(qkv, heads, how.rotary), layout, kernels, how)


def _each_alone(qkv: Tensor, layout: Layout | PaddedLayout, heads: int, how: Attend) -> Tensor:
    """`self_attention` of one sequence after the other."""
    assert not how.dropout, "nothing is dropped without gradient"
    lengths = layout.lengths().tolist()
    angles: Sequence[Any] = [None] * len(lengths)
    if how.rotary is not None:
        angles = list(zip(*(x.split(lengths) for x in how.rotary), strict=True))
    biases: Sequence[Any] = [None] * len(lengths) if how.key_bias is None else how.key_bias.split(lengths)
    return torch.cat([
        self_attention(part, build_layout(np.array([len(part)])), heads, replace(how, rotary=turn, key_bias=bias))
        for part, turn, bias in zip(qkv.split(lengths), angles, biases, strict=True)
    ])  # fmt: skip


def _with_draws(how: Attend, x: Tensor, layout: Layout | PaddedLayout) -> Attend:
    """With a seed of dropout and the places that it draws by."""
    if not how.dropout:
        return how
    return replace(how, seed=draw() if how.seed is None else how.seed, places=rows_of(x, layout.places))


def ragged_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, how: Attend) -> Tensor:
    """`self_attention` for separate queries, keys and values.

    Args:
        q: (total_tokens, heads, head_dim).
        k, v: (total_tokens, kv_heads, head_dim); values may have another head_dim.

    Returns:
        (total_tokens, heads, head_dim of values).
    """
    how = how.within(layout.longest)
    kernels = choose_kernels(q.dtype, q.device, layout, q.shape[2], how, fused=v.shape[2] == q.shape[2])
    note(kernels)
    how = _with_draws(how, q, layout)
    if kernels == (Kernel.NATIVE,):
        return native_attention(torch.cat([q, k, v], 1), layout, q.shape[1], how)
    return _torch_attention(q, k, v, layout, kernels, how)


def reference_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, how: Attend) -> Tensor:
    """Attention by definition, one sequence at a time in plain operations; the reference for tests and the proof."""
    assert not how.dropout, "the definition has no dropout"
    assert not how.shaped, "and no cap and no sinks"
    k, v = _share_heads(q, k, v)
    outputs = [q[:0]]
    bounds = layout.cu_seqlens.tolist()
    for start, stop in pairwise(bounds):
        scores = how.scaled(torch.einsum("qhd,khd->hqk", q[start:stop], k[start:stop]), q.shape[-1])
        if how.key_bias is not None:
            scores = scores + how.key_bias[start:stop]
        if how.causal:
            future = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        if how.window is not None:
            place = torch.arange(stop - start, device=q.device)
            scores = scores.masked_fill(place[:, None] - place >= how.window, -math.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[start:stop]))
    return torch.cat(outputs)


def _torch_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout | PaddedLayout, kernels: tuple[Kernel, ...], how: Attend
) -> Tensor:
    """Attention through torch's own operations; each key head serves heads / kv_heads consecutive query heads."""
    if isinstance(layout, PaddedLayout):
        return _padded(q, k, v, layout.attention_mask, kernels[0], how)
    if kernels == (Kernel.DEFINITION,):
        return reference_attention(q, k, v, layout, how)
    return (
        _varlen(q, k, v, layout, how) if kernels == (Kernel.VARLEN_FLASH,) else _grouped(q, k, v, layout, kernels, how)
    )


def _share_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key and value heads so that every query head has its own."""
    repeat = q.shape[1] // k.shape[1]
    if repeat == 1:
        return k, v
    return k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)


# --------------------------------------------------------------------------- length groups


def _grouped(q: Tensor, k: Tensor, v: Tensor, layout: Layout, kernels: tuple[Kernel, ...], how: Attend) -> Tensor:
    run = layout.grouped
    if not run.groups:
        return q
    q, k, v = map(run.ordered, (q, *_share_heads(q, k, v)))
    how = how.moved(run.ordered)
    groups = zip(run.groups, kernels, strict=True)
    return run.restored([_group_attention(q, k, v, group, kernel, how) for group, kernel in groups])


def _group_attention(q: Tensor, k: Tensor, v: Tensor, group: LengthGroup, kernel: Kernel, how: Attend) -> Tensor:
    """Attention of one group as a (num_seqs, heads, longest, head_dim) rectangle; returns its real tokens."""
    q, k, v = (group.rectangle(x).transpose(1, 2) for x in (q, k, v))  # (num_seqs, heads, longest, head_dim)
    # Real queries of a causal rectangle never see the cells to their right; only full attention needs the mask.
    seen: Callable[[slice], Tensor] | None = None
    how = how.within(group.longest)
    if how.window is not None:
        seen = partial(in_window, group.longest, how.window, q.device)
        how = replace(how, causal=False, window=None)
    elif not how.causal and group.key_mask is not None:
        seen = partial(_real_keys, group.key_mask)
    if kernel in MATMUL:
        out = _matmul_attention(q, k, v, seen, how.moved(group.rectangle))
    else:
        assert how.fuses, "the fused kernel takes no bias and no dropout"
        mask = None if seen is None else seen(slice(0, group.longest))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=how.causal, scale=how.scale)
    return group.tokens(out.transpose(1, 2))


def _real_keys(key_mask: Tensor, rows: slice) -> Tensor:
    """The keys that any queries see, (num_seqs, 1, 1, longest) bool."""
    return key_mask[:, None, None, :]


def in_window(longest: int, window: int, device: torch.device, rows: slice) -> Tensor:
    """The keys that queries at these places see, (queries, longest) bool: the last `window` up to their own."""
    place = torch.arange(longest, device=device)
    distance = place[rows, None] - place
    return (distance >= 0) & (distance < window)


def _matmul_attention(q: Tensor, k: Tensor, v: Tensor, mask: Callable[[slice], Tensor] | None, how: Attend) -> Tensor:
    """softmax(q k^T) v as two matrix products, softmax in fp32 at least; `how` holds (num_seqs, longest) here.

    Sequences above WHOLE_LENGTH are computed a few queries at a time, in backward again, so that memory grows with
    their length and not with its square.

    Args:
        q, k, v: (num_seqs, heads, longest, head_dim).
        mask: the keys that these queries see, bool and broadcast to (num_seqs, heads, queries, longest).
    """
    num_seqs, heads, longest, _ = q.shape
    if longest <= WHOLE_LENGTH:
        return attend_rows(q, k, v, slice(0, longest), mask, how)
    at_once = max(1, BLOCK_CELLS // (num_seqs * heads * longest))
    outputs = []
    for start in range(0, longest, at_once):
        rows = slice(start, min(start + at_once, longest))
        block = partial(attend_rows, rows=rows, mask=mask, how=how)
        seen = rows.stop if how.causal else longest
        parts = q[:, :, rows], k[:, :, :seen], v[:, :, :seen]
        # The only random draw is dropout's, which its seed repeats.
        outputs.append(checkpoint(block, *parts, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs, 2)


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, rows: slice, mask: Callable[[slice], Tensor] | None, how: Attend
) -> Tensor:
    """Attention of the queries at the places `rows`, (num_seqs, heads, queries, head_dim), to the first keys."""
    wide, heads, num_keys = wide_dtype(q.dtype), q.shape[1], k.shape[2]
    with torch.autocast(q.device.type, enabled=False):
        scores = how.scaled((q @ k.transpose(-1, -2)).to(wide), q.shape[-1])
        if how.softcap:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        if how.key_bias is not None:
            scores = scores + how.key_bias[:, :num_keys].to(wide)[:, None, None, :]
        if how.causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(rows.start + 1)
            scores = scores.masked_fill_(future, -math.inf)
        if mask is not None:
            scores = scores.masked_fill_(~mask(rows), -math.inf)
        if how.sinks is not None:
            sinks = how.sinks.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], 3)
        weights = scores.softmax(-1)[..., :num_keys]
        if how.dropout:
            assert how.places is not None, "dropout draws by places"
            assert how.seed is not None, "dropout draws by a seed"
            head = torch.arange(heads, device=q.device)[:, None, None]
            queries = how.places[:, None, rows, None] * heads + head
            keep = kept(how.seed, queries, how.places[:, None, None, :num_keys], how.dropout)
            weights = torch.where(keep, weights / (1 - how.dropout), 0)
        return weights.to(v.dtype) @ v


# --------------------------------------------------------------------------- accelerator and rectangles


def _varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout, how: Attend) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # asks for a GPU build of torch when imported

    if not layout.max_seqlen:
        return q  # the kernel refuses a run without sequences
    bounds, longest, size, scale = layout.cu_seqlens, layout.max_seqlen, q.shape[2], how.scale
    reach = (-1 if how.window is None else how.window - 1, 0) if how.causal else (-1, -1)
    if missing := -size % FLASH_MULTIPLE:  # zeros change no score and no output
        q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
        scale = 1 / math.sqrt(size) if scale is None else scale
    known = varlen_attn.__kwdefaults__ or {}  # torch 2.11 has neither option
    options: dict[str, Any] = {}
    if q.shape[1] != k.shape[1] and "enable_gqa" in known:
        options["enable_gqa"] = True
    else:
        k, v = _share_heads(q, k, v)
    if "num_splits" in known and torch.version.hip is None:  # AMD's kernel does not split, and refuses the option
        options["num_splits"] = 1  # a sequence's output must not depend on what else is in the batch
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=reach, **options)
    assert isinstance(out, Tensor)
    return out[..., :size] if missing else out


def _padded(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor, kernel: Kernel, how: Attend) -> Tensor:
    """Attention of a flattened (batch, seq) rectangle with real cells anywhere in a row."""
    k, v = _share_heads(q, k, v)
    batch, seq = attention_mask.shape
    q, k, v = (x.unflatten(0, (batch, seq)).transpose(1, 2) for x in (q, k, v))  # (batch, heads, seq, head_dim)

    def mask(rows: slice) -> Tensor:
        """The cells that queries at these places of their row see, (batch, 1, queries, seq) bool."""
        place = torch.arange(seq, device=q.device)
        query = place[rows, None]
        seen = attention_mask[:, None, None, :]
        seen = seen & (place <= query) if how.causal else seen
        if how.window is not None:  # counted in real cells
            real = attention_mask.cumsum(1)
            seen = seen & (real[:, None, rows, None] - real[:, None, None, :] < how.window)
        # A padding query sees at least itself: a row without keys would be NaN, and NaN spreads.
        return seen | (place == query)

    if kernel in MATMUL:
        in_rows = replace(how, causal=False, window=None).moved(lambda x: x.unflatten(0, (batch, seq)))
        out = _matmul_attention(q, k, v, mask, in_rows)
    else:
        assert how.fuses, "the fused kernel takes no bias and no dropout"
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
