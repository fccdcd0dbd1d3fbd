"""Attention of attention.h as two operators with names in profiles, and the gradient between them."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unpad.nn.autograd import apply
from unpad.nn.native.library import code, computes, function, pointer
from unpad.nn.precision import wide_dtype

Rotary = tuple[Tensor, Tensor]  # cosines and sines of `rotary_table`, each (total_tokens, 1, head_dim / 2)

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 128


def supports(dtype: torch.dtype, head_dim: int) -> bool:
    """True if the enabled kernels support such heads."""
    return computes(dtype) and _fits(dtype, head_dim)


def _fits(dtype: torch.dtype, head_dim: int) -> bool:
    multiple = 2 if dtype == torch.float64 else 16
    return MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM and head_dim % multiple == 0


def native_attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    *,
    heads: int,
    kv_heads: int,
    causal: bool,
    scale: float | None = None,
    rotary: Rotary | None = None,
    key_bias: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """softmax(scale q k^T + key_bias) v within each sequence and nowhere else.

    Args:
        qkv: (total_tokens, heads + 2 * kv_heads, head_dim) bf16, fp32 or fp64: queries, keys, values.
        cu_seqlens: (num_seqs + 1,) int32, from 0 to total_tokens.
        scale: factor of the scores, by default 1 / sqrt(head_dim).
        rotary: angles by which queries and keys are rotated first, as `nn.rope.rotate` does. No gradient flows to it.
        key_bias: (total_tokens,), added to every score of a key; -inf hides the key. Every query must see a key that
            is not hidden. Gradient flows to it.
        dropout: share of weights set to zero, the others divided by 1 - dropout; drawn from `seed` and the places of
            query and key in the run, the same in backward.

    Returns:
        (total_tokens, heads, head_dim) of qkv's type. Gradient flows to qkv.
    """
    cos, sin = rotary if rotary is not None else (None, None)
    scale = 1 / math.sqrt(qkv.shape[-1]) if scale is None else scale
    out: Tensor = apply(_Attention, qkv, key_bias, cu_seqlens, heads, kv_heads, causal, scale, cos, sin, dropout, seed)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, key_bias: Tensor | None, cu_seqlens: Tensor, *settings: Any) -> Tensor:
        out: Tensor
        out, log_z = _forward(qkv, key_bias, cu_seqlens, *settings)
        cos, sin = settings[4:6]
        ctx.settings = settings[:4] + settings[6:]
        ctx.save_for_backward(qkv, key_bias, cu_seqlens, cos, sin, out, log_z)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        qkv, key_bias, cu_seqlens, cos, sin, out, log_z = ctx.saved_tensors
        heads, kv_heads, causal, scale, dropout, seed = ctx.settings
        wants_bias = bool(ctx.needs_input_grad[1])
        grad_qkv, grad_bias = _backward(
            grads[0],
            out,
            log_z,
            qkv,
            key_bias,
            cu_seqlens,
            heads,
            kv_heads,
            causal,
            scale,
            cos,
            sin,
            dropout,
            seed,
            wants_bias,
        )
        return grad_qkv, grad_bias.sum(0).to(key_bias.dtype) if wants_bias else None, *[None] * 9


# --------------------------------------------------------------------------- operators

_SETTINGS = (
    "Tensor qkv, Tensor? key_bias, Tensor cu_seqlens, int heads, int kv_heads, bool causal, float scale, "
    "Tensor? cos, Tensor? sin, float dropout, int seed"
)
_OPS = torch.library.Library("unpad", "FRAGMENT")
_OPS.define(f"ragged_attention({_SETTINGS}) -> (Tensor, Tensor)")
_OPS.define(
    f"ragged_attention_backward(Tensor grad_out, Tensor out, Tensor log_z, {_SETTINGS}, bool wants_bias)"
    " -> (Tensor, Tensor)"
)
_forward = torch.ops.unpad.ragged_attention.default
_backward = torch.ops.unpad.ragged_attention_backward.default


class AttentionSizes(ctypes.Structure):
    """`struct unpad_attention` of kernels.h."""

    _fields_ = (
        ("num_seqs", ctypes.c_int64),
        ("total_tokens", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("dropout", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("causal", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


@lru_cache(maxsize=1)
def _functions() -> tuple[Any, Any]:
    """The compiled forward and backward, with their argument types declared once."""
    shared = [ctypes.c_int, ctypes.POINTER(AttentionSizes), *[ctypes.c_void_p] * 5]  # cu_seqlens ... key_bias
    return (
        function("attention_forward", None, *shared, *[ctypes.c_void_p] * 2),
        function("attention_backward", None, *shared, *[ctypes.c_void_p] * 5),
    )


def attention_forward(
    qkv: Tensor,
    key_bias: Tensor | None,
    cu_seqlens: Tensor,
    heads: int,
    kv_heads: int,
    causal: bool,
    scale: float,
    cos: Tensor | None,
    sin: Tensor | None,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Out (total_tokens, heads, head_dim), and log_z (heads, total_tokens) wide, the log of each softmax's sum."""
    qkv, cu_seqlens = qkv.contiguous(), cu_seqlens.contiguous()
    total, _, head_dim = qkv.shape
    wide = wide_dtype(qkv.dtype)
    sizes = _sizes(qkv, cu_seqlens, heads, kv_heads, causal, scale, dropout, seed)
    tables = _wide(cos, wide), _wide(sin, wide), _wide(key_bias, wide)
    out = qkv.new_empty((total, heads, head_dim))
    log_z = qkv.new_empty((heads, total), dtype=wide)
    _functions()[0](
        code(qkv.dtype),
        ctypes.byref(sizes),
        pointer(cu_seqlens),
        pointer(qkv),
        *map(pointer, tables),
        pointer(out),
        pointer(log_z),
    )
    return out, log_z


def attention_backward(
    grad_out: Tensor,
    out: Tensor,
    log_z: Tensor,
    qkv: Tensor,
    key_bias: Tensor | None,
    cu_seqlens: Tensor,
    heads: int,
    kv_heads: int,
    causal: bool,
    scale: float,
    cos: Tensor | None,
    sin: Tensor | None,
    dropout: float,
    seed: int,
    wants_bias: bool,
) -> tuple[Tensor, Tensor]:
    """Gradient of qkv, and of key_bias per key head, (kv_heads, total_tokens) wide, or (0,) if unwanted."""
    qkv, cu_seqlens, grad_out = qkv.contiguous(), cu_seqlens.contiguous(), grad_out.contiguous()
    wide = wide_dtype(qkv.dtype)
    sizes = _sizes(qkv, cu_seqlens, heads, kv_heads, causal, scale, dropout, seed)
    tables = _wide(cos, wide), _wide(sin, wide), _wide(key_bias, wide)
    grad_qkv = torch.empty_like(qkv)
    grad_bias = qkv.new_empty((kv_heads, len(qkv)) if wants_bias else (0,), dtype=wide)
    _functions()[1](
        code(qkv.dtype),
        ctypes.byref(sizes),
        pointer(cu_seqlens),
        pointer(qkv),
        *map(pointer, tables),
        pointer(out),
        pointer(log_z),
        pointer(grad_out),
        pointer(grad_qkv),
        pointer(grad_bias) if wants_bias else None,
    )
    return grad_qkv, grad_bias


def _sizes(
    qkv: Tensor, cu_seqlens: Tensor, heads: int, kv_heads: int, causal: bool, scale: float, dropout: float, seed: int
) -> AttentionSizes:
    total, rows, head_dim = qkv.shape
    assert heads % kv_heads == 0, (heads, kv_heads)
    assert rows == heads + 2 * kv_heads, (tuple(qkv.shape), heads, kv_heads)
    assert _fits(qkv.dtype, head_dim), (qkv.dtype, head_dim)
    assert cu_seqlens.dtype == torch.int32, cu_seqlens.dtype
    assert int(cu_seqlens[-1]) == total, f"the layout ends at {int(cu_seqlens[-1])}, the run at {total}"
    assert 0 <= dropout < 1, dropout
    return AttentionSizes(
        len(cu_seqlens) - 1, total, heads, kv_heads, head_dim, scale, dropout, seed, causal, torch.get_num_threads()
    )


def _wide(x: Tensor | None, wide: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(wide).contiguous()


def _no_forward(qkv: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    total, _, head_dim = qkv.shape
    heads = settings[2]
    return qkv.new_empty((total, heads, head_dim)), qkv.new_empty((heads, total), dtype=wide_dtype(qkv.dtype))


def _no_backward(grad_out: Tensor, out: Tensor, log_z: Tensor, qkv: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    kv_heads, wants_bias = settings[3], settings[-1]
    shape = (kv_heads, len(qkv)) if wants_bias else (0,)
    return torch.empty_like(qkv), qkv.new_empty(shape, dtype=wide_dtype(qkv.dtype))


_OPS.impl("ragged_attention", attention_forward, "CPU")
_OPS.impl("ragged_attention_backward", attention_backward, "CPU")
torch.library.register_fake("unpad::ragged_attention", _no_forward, lib=_OPS)
torch.library.register_fake("unpad::ragged_attention_backward", _no_backward, lib=_OPS)
