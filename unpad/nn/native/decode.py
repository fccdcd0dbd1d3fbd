"""Attention of new tokens that follow held ones, as two operators: of pieces of prompts (attention.h), and of one token
per sequence (decode.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unpad.nn.attend import Attend
from unpad.nn.native.attention import AttentionSizes
from unpad.nn.native.library import call, fields, operator, pointer
from unpad.nn.precision import wide_dtype


def supports(dtype: torch.dtype, head_dim: int) -> bool:
    """True if the kernel of one token supports such heads, if `library.enabled`."""
    return dtype == torch.float64 or head_dim % 16 == 0


def decode_attention(
    qkv: Tensor,
    buffers: Sequence[Tensor],
    lengths: Sequence[int],
    heads: int,
    how: Attend,
) -> Tensor:
    """Store each row's new key and value and attend to all keys of the row; no gradient.

    Args:
        qkv: (num_rows, heads + 2 * kv_heads, head_dim) bf16, fp32 or fp64, one token per row: queries, keys, values.
        buffers: of each row, (2, kv_heads, capacity, head_dim) of qkv's type: keys and values, changed at
            [:, :, lengths[row]].
        lengths: earlier tokens of each row, below its capacity.
        how: only its rotary angles and its window count.

    Returns:
        (num_rows, heads, head_dim).
    """
    cos, sin = how.rotary if how.rotary is not None else (None, None)
    return _decode(qkv, list(buffers), list(lengths), heads, cos, sin, how.window or 0)


def piece_attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    buffers: Sequence[Tensor],
    lengths: Sequence[int],
    heads: int,
    how: Attend,
) -> Tensor:
    """Store the new keys and values of every sequence behind the held ones and attend causally to all; no gradient.

    In fp32 and bf16 a token gets the same bits wherever its sequence is cut into pieces.

    Args:
        qkv: (total_tokens, heads + 2 * kv_heads, head_dim), new tokens of heads as `attention.supports`.
        cu_seqlens: (num_seqs + 1,) int32, boundaries of the new tokens.
        buffers, lengths: as of `decode_attention`, with room for the new tokens.
        how: only its rotary angles, its window and, where nothing is held, its key bias count.

    Returns:
        (total_tokens, heads, head_dim).
    """
    assert how.key_bias is None or not any(lengths), "held keys have no bias"
    cos, sin = how.rotary if how.rotary is not None else (None, None)
    return _piece(qkv, cu_seqlens, list(buffers), list(lengths), heads, cos, sin, how.key_bias, how.window or 0)


class _Buffers(ctypes.Structure):
    """`struct unpad_held` of kernels.h."""

    _fields_ = fields("p lengths capacities buffers")

    @classmethod
    def of(cls, buffers: Sequence[Tensor], lengths: Sequence[int], news: Sequence[int]) -> _Buffers:
        """Held tokens in buffers that have room for the new ones."""
        capacities = [buffer.shape[2] for buffer in buffers]
        for length, new, capacity in zip(lengths, news, capacities, strict=True):
            assert 0 <= length <= length + new <= capacity, "a row is full"
        num = len(buffers)
        arrays: list[Any] = [
            (ctypes.c_int64 * num)(*lengths),
            (ctypes.c_int64 * num)(*capacities),
            (ctypes.c_void_p * num)(*map(pointer, buffers)),
        ]
        held = cls(*map(ctypes.addressof, arrays))
        held.arrays = arrays  # they live as long as what points to them
        return held


def _sizes(qkv: Tensor, buffers: Sequence[Tensor], heads: int, window: int) -> AttentionSizes:
    total, rows, head_dim = qkv.shape
    kv_heads = (rows - heads) // 2
    assert rows == heads + 2 * kv_heads, (tuple(qkv.shape), heads)
    for buffer in buffers:
        assert (buffer.shape[:2], buffer.shape[3]) == ((2, kv_heads), head_dim), "a buffer is of other heads"
        assert buffer.dtype == qkv.dtype, "mixed dtypes"
    numbers = len(buffers), total, heads, kv_heads, head_dim
    return AttentionSizes(
        *numbers, scale=head_dim**-0.5, window=window, causal=True, num_threads=torch.get_num_threads()
    )


def _tables(dtype: torch.dtype, *tables: Tensor | None) -> list[Tensor | None]:
    """Tables as kernels read them."""
    return [None if table is None else table.to(wide_dtype(dtype)).contiguous() for table in tables]


def _empty_decode(qkv: Tensor, buffers: Any, lengths: Any, heads: int, *settings: Any) -> Tensor:
    return qkv.new_empty((qkv.shape[0], heads, qkv.shape[2]))


@operator("decode_attention", _empty_decode, changes=["buffers"])
def _decode(
    qkv: Tensor,
    buffers: Sequence[Tensor],
    lengths: Sequence[int],
    heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    window: int,
) -> Tensor:
    assert len(buffers) == len(qkv), "one buffer per row"
    assert supports(qkv.dtype, qkv.shape[2]), (qkv.dtype, qkv.shape[2])
    sizes, held = _sizes(qkv, buffers, heads, window), _Buffers.of(buffers, lengths, [1] * len(qkv))
    out = _empty_decode(qkv, buffers, lengths, heads)
    call("decode_attention", qkv.dtype, sizes, held, qkv.contiguous(), *_tables(qkv.dtype, cos, sin), out)
    return out


def _empty_piece(qkv: Tensor, cu_seqlens: Tensor, buffers: Any, lengths: Any, heads: int, *settings: Any) -> Tensor:
    return qkv.new_empty((qkv.shape[0], heads, qkv.shape[2]))


@operator("piece_attention", _empty_piece, changes=["buffers"])
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
    assert cu_seqlens.dtype == torch.int32, cu_seqlens.dtype
    sizes, held = _sizes(qkv, buffers, heads, window), _Buffers.of(buffers, lengths, cu_seqlens.diff().tolist())
    out = _empty_piece(qkv, cu_seqlens, buffers, lengths, heads)
    tensors = qkv.contiguous(), *_tables(qkv.dtype, cos, sin, key_bias), out
    call("piece_attention", qkv.dtype, sizes, cu_seqlens.contiguous(), held, *tensors)
    return out
