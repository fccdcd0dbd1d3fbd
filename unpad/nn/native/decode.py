"""Attention of new tokens that follow held ones, as two operators: of pieces of prompts (attention.h), and of one token
per sequence (decode.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from unpad.nn.native.attention import AttentionSizes
from unpad.nn.native.library import code, function, pointer
from unpad.nn.precision import wide_dtype


def supports(dtype: torch.dtype, head_dim: int) -> bool:
    """True if the kernel of one token supports such heads, if `library.enabled`."""
    return dtype == torch.float64 or head_dim % 16 == 0


def decode_attention(
    qkv: Tensor,
    buffers: Sequence[Tensor],
    lengths: Sequence[int],
    heads: int,
    rotary: tuple[Tensor, Tensor] | None,
    window: int | None = None,
) -> Tensor:
    """Store each row's new key and value and attend to all keys of the row; no gradient.

    Args:
        qkv: (num_rows, heads + 2 * kv_heads, head_dim) bf16, fp32 or fp64, one token per row: queries, keys, values.
        buffers: of each row, (2, kv_heads, capacity, head_dim) of qkv's type: keys and values, changed at
            [:, :, lengths[row]].
        lengths: earlier tokens of each row, below its capacity.
        rotary: cosines and sines of `rotary_table`, which rotate queries and keys first.
        window: keys seen at most, the new one and those just before it; None for all.

    Returns:
        (num_rows, heads, head_dim).
    """
    cos, sin = rotary if rotary is not None else (None, None)
    out: Tensor = _decode_attention(qkv, list(buffers), list(lengths), heads, cos, sin, window or 0)
    return out


def piece_attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    buffers: Sequence[Tensor],
    lengths: Sequence[int],
    heads: int,
    rotary: tuple[Tensor, Tensor] | None,
    key_bias: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Store the new keys and values of every sequence behind the held ones and attend causally to all; no gradient.

    In fp32 and bf16 a token gets the same bits wherever its sequence is cut into pieces.

    Args:
        qkv: (total_tokens, heads + 2 * kv_heads, head_dim), new tokens of heads as `attention.supports`.
        cu_seqlens: (num_seqs + 1,) int32, boundaries of the new tokens.
        buffers, lengths: as of `decode_attention`, with room for the new tokens.
        key_bias: (total_tokens,), added to the scores of a key; only where nothing is held.

    Returns:
        (total_tokens, heads, head_dim).
    """
    assert key_bias is None or not any(lengths), "held keys have no bias"
    cos, sin = rotary if rotary is not None else (None, None)
    out: Tensor = _piece_attention(
        qkv, cu_seqlens, list(buffers), list(lengths), heads, cos, sin, key_bias, window or 0
    )
    return out


_library = torch.library.Library("unpad", "FRAGMENT")
_library.define(
    "decode_attention(Tensor qkv, Tensor(a!)[] buffers, int[] lengths, int heads, Tensor? cos, Tensor? sin, int window)"
    " -> Tensor"
)
_library.define(
    "piece_attention(Tensor qkv, Tensor cu_seqlens, Tensor(a!)[] buffers, int[] lengths, int heads, Tensor? cos,"
    " Tensor? sin, Tensor? key_bias, int window) -> Tensor"
)
_decode_attention = torch.ops.unpad.decode_attention.default
_piece_attention = torch.ops.unpad.piece_attention.default


class _Buffers(ctypes.Structure):
    """`struct unpad_held` of kernels.h."""

    _fields_ = (("lengths", ctypes.c_void_p), ("capacities", ctypes.c_void_p), ("buffers", ctypes.c_void_p))


@cache
def _function() -> tuple[Any, Any]:
    """The compiled functions for pieces and for one token, with their argument types declared once."""
    sizes, held = ctypes.POINTER(AttentionSizes), ctypes.POINTER(_Buffers)
    return (
        function("piece_attention", None, ctypes.c_int, sizes, ctypes.c_void_p, held, *[ctypes.c_void_p] * 5),
        function("decode_attention", None, ctypes.c_int, sizes, held, *[ctypes.c_void_p] * 4),
    )


def _held(buffers: Sequence[Tensor], lengths: Sequence[int], news: Sequence[int]) -> tuple[_Buffers, list[Any]]:
    """The structure, and the arrays that it points to."""
    capacities = [buffer.shape[2] for buffer in buffers]
    for length, new, capacity in zip(lengths, news, capacities, strict=True):
        assert 0 <= length <= length + new <= capacity, "a row is full"
    num = len(buffers)
    arrays: list[Any] = [
        (ctypes.c_int64 * num)(*lengths),
        (ctypes.c_int64 * num)(*capacities),
        (ctypes.c_void_p * num)(*map(pointer, buffers)),
    ]
    return _Buffers(*map(ctypes.addressof, arrays)), arrays


def _sizes(qkv: Tensor, buffers: Sequence[Tensor], heads: int, window: int) -> AttentionSizes:
    total, rows, head_dim = qkv.shape
    kv_heads = (rows - heads) // 2
    assert rows == heads + 2 * kv_heads, (tuple(qkv.shape), heads)
    for buffer in buffers:
        assert (buffer.shape[:2], buffer.shape[3]) == ((2, kv_heads), head_dim), "a buffer is of other heads"
        assert buffer.dtype == qkv.dtype, "mixed dtypes"
    return AttentionSizes(
        num_seqs=len(buffers),
        total_tokens=total,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
        causal=True,
        num_threads=torch.get_num_threads(),
    )


def _decode(
    qkv: Tensor,
    buffers: Sequence[Tensor],
    lengths: Sequence[int],
    heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    window: int,
) -> Tensor:
    qkv, wide = qkv.contiguous(), wide_dtype(qkv.dtype)
    assert len(buffers) == len(qkv), "one buffer per row"
    assert supports(qkv.dtype, qkv.shape[2]), (qkv.dtype, qkv.shape[2])
    held, arrays = _held(buffers, lengths, [1] * len(qkv))
    tables = [None if table is None else table.to(wide).contiguous() for table in (cos, sin)]
    out = qkv.new_empty((len(qkv), heads, qkv.shape[2]))
    sizes = _sizes(qkv, buffers, heads, window)
    _function()[1](code(qkv.dtype), sizes, held, pointer(qkv), *map(pointer, tables), pointer(out))
    del arrays  # until here the kernel reads them
    return out


def _piece(
    qkv: Tensor,
    cu_seqlens: Tensor,
    buffers: Sequence[Tensor],
    lengths: Sequence[int],
    heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    key_bias: Tensor | None,
    window: int,
) -> Tensor:
    qkv, cu_seqlens, wide = qkv.contiguous(), cu_seqlens.contiguous(), wide_dtype(qkv.dtype)
    assert cu_seqlens.dtype == torch.int32, cu_seqlens.dtype
    held, arrays = _held(buffers, lengths, cu_seqlens.diff().tolist())
    tables = [None if table is None else table.to(wide).contiguous() for table in (cos, sin, key_bias)]
    out = qkv.new_empty((len(qkv), heads, qkv.shape[2]))
    sizes = _sizes(qkv, buffers, heads, window)
    pointers = map(pointer, (qkv, *tables, out))
    _function()[0](code(qkv.dtype), sizes, pointer(cu_seqlens), held, *pointers)
    del arrays  # until here the kernel reads them
    return out


def _fake_decode(qkv: Tensor, buffers: Any, lengths: Any, heads: int, *settings: Any) -> Tensor:
    return qkv.new_empty((qkv.shape[0], heads, qkv.shape[2]))


def _fake_piece(qkv: Tensor, cu_seqlens: Tensor, buffers: Any, lengths: Any, heads: int, *settings: Any) -> Tensor:
    return qkv.new_empty((qkv.shape[0], heads, qkv.shape[2]))


_library.impl("decode_attention", _decode, "CPU")
_library.impl("piece_attention", _piece, "CPU")
torch.library.register_fake("unpad::decode_attention", _fake_decode, lib=_library)
torch.library.register_fake("unpad::piece_attention", _fake_piece, lib=_library)
