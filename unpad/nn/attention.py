"""Attention within each sequence of a flat run, on whatever the machine has.

`ragged_attention` is the only door. Every kernel behind it gives the same result, forward and backward, as
`reference_attention`; `unpad prove` shows it for the user's own data.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.layout import Layout, LengthGroup, PaddedLayout

# Above this length the processor's fused kernel beats two matrix products and a softmax in bf16, below it loses
# by up to six times; docs/log.md has the figures.
MATMUL_MAX_LENGTH = 512
HALF = (torch.bfloat16, torch.float16)


def kernel_names(dtype: torch.dtype, device: torch.device, layout: Layout | PaddedLayout) -> set[str]:
    """Names of the kernels that `ragged_attention` runs for inputs of this kind; the proof prints them."""
    if isinstance(layout, PaddedLayout):
        return {"padded sdpa"}
    if device.type == "cuda" and dtype in HALF:
        return {"varlen flash"}
    return {"group matmul" if _uses_matmul(dtype, group.longest) else "group sdpa" for group in layout.groups}


def ragged_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout | PaddedLayout, causal: bool) -> Tensor:
    """Attend within each sequence and nowhere else.

    Args:
        q: (total_tokens, heads, head_dim).
        k, v: (total_tokens, kv_heads, head_dim); kv_heads divides heads, and each key head serves
            heads / kv_heads consecutive query heads (Ainslie et al. 2023, arXiv 2305.13245).
        causal: a token sees itself and earlier tokens of its sequence; otherwise the whole sequence.

    Returns:
        (total_tokens, heads, head_dim), softmax(q k^T / sqrt(head_dim)) v.
    """
    if isinstance(layout, PaddedLayout):
        return _padded(q, k, v, layout.attention_mask, causal)
    if q.is_cuda and q.dtype in HALF:  # the flash kernel knows half precision only
        return _varlen(q, k, v, layout, causal)
    return _grouped(q, k, v, layout, causal)


def reference_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, causal: bool) -> Tensor:
    """The definition, one sequence at a time in plain operations; for tests."""
    k, v = _share_heads(q, k, v)
    outputs = [q[:0]]
    bounds = layout.cu_seqlens.tolist()
    for start, stop in pairwise(bounds):
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], k[start:stop]) / math.sqrt(q.shape[-1])
        if causal:
            future = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[start:stop]))
    return torch.cat(outputs)


def _share_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key and value heads so that every query head has its own."""
    repeat = q.shape[1] // k.shape[1]
    if repeat == 1:
        return k, v
    return k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)


# --------------------------------------------------------------------------- length groups


def _uses_matmul(dtype: torch.dtype, longest: int) -> bool:
    return dtype in HALF and longest <= MATMUL_MAX_LENGTH


def _grouped(q: Tensor, k: Tensor, v: Tensor, layout: Layout, causal: bool) -> Tensor:
    if not layout.groups:
        return q
    k, v = _share_heads(q, k, v)
    if layout.by_length is not None:
        q, k, v = (x.index_select(0, layout.by_length) for x in (q, k, v))
    out = torch.cat([_group_attention(q, k, v, group, causal) for group in layout.groups])
    return out if layout.undo is None else out.index_select(0, layout.undo)


def _group_attention(q: Tensor, k: Tensor, v: Tensor, group: LengthGroup, causal: bool) -> Tensor:
    """Attention of one group as a (num_seqs, heads, longest, head_dim) rectangle; returns its real tokens."""
    heads, head_dim = q.shape[1:]
    shape = (group.num_seqs, group.longest, heads, head_dim)

    def rectangle(x: Tensor) -> Tensor:
        cells = x[group.start : group.stop] if group.cells is None else x.index_select(0, group.cells)
        return cells.view(shape).transpose(1, 2)  # (num_seqs, heads, longest, head_dim)

    # Real queries of a causal rectangle never see the cells to their right; only full attention needs the mask.
    mask = None if causal or group.key_mask is None else group.key_mask[:, None, None, :]
    attend = _matmul_attention if _uses_matmul(q.dtype, group.longest) else _sdpa
    out = attend(rectangle(q), rectangle(k), rectangle(v), mask, causal)
    out = out.transpose(1, 2).reshape(-1, heads, head_dim)
    return out if group.real is None else out.index_select(0, group.real)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def _matmul_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """softmax(q k^T) v as two matrix products, softmax in fp32."""
    with torch.autocast(q.device.type, enabled=False):
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
        if causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
            scores = scores.masked_fill_(future, -math.inf)
        if mask is not None:
            scores = scores.masked_fill_(~mask, -math.inf)
        return scores.softmax(-1).to(v.dtype) @ v


# --------------------------------------------------------------------------- accelerator and rectangles


def _varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout, causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # asks for a GPU build of torch when imported

    bounds, size = layout.cu_seqlens, layout.max_seqlen
    window = (-1, 0) if causal else (-1, -1)
    gqa = q.shape[1] != k.shape[1]
    # num_splits=1: a sequence's output must not depend on what else is in the batch.
    out = varlen_attn(q, k, v, bounds, bounds, size, size, window_size=window, enable_gqa=gqa, num_splits=1)
    assert isinstance(out, Tensor)
    return out


def _padded(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor, causal: bool) -> Tensor:
    """Attention of a flattened (batch, seq) rectangle with real cells anywhere in a row."""
    k, v = _share_heads(q, k, v)
    batch, seq = attention_mask.shape
    q, k, v = (x.unflatten(0, (batch, seq)).transpose(1, 2) for x in (q, k, v))  # (batch, heads, seq, head_dim)
    mask = attention_mask[:, None, None, :]
    if causal:
        mask = mask & torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril()
    # A padding query sees at least itself: a row without keys would be NaN, and spread.
    mask = mask | torch.eye(seq, dtype=torch.bool, device=q.device)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).flatten(0, 1)
