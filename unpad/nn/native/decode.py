"""Attention of decode.h as one operator, which stores a new token per row and attends to its whole row."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from unpad.nn.native.attention import AttentionSizes
from unpad.nn.native.library import code, function, pointer
from unpad.nn.precision import wide_dtype


def supports(dtype: torch.dtype, head_dim: int) -> bool:
    """True if the kernel supports such heads, if `library.enabled`."""
    return dtype == torch.float64 or head_dim % 16 == 0


def decode_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    heads: int,
    rotary: tuple[Tensor, Tensor] | None,
    window: int | None = None,
) -> Tensor:
    """Write each row's new key and value into the cache and attend to the keys of the row; no gradient.

    Args:
        qkv: (num_rows, heads + 2 * kv_heads, head_dim) bf16, fp32 or fp64, one token per row: queries, keys, values.
        keys, values: (num_rows, kv_heads, capacity, head_dim) of qkv's type, changed at [row, :, lengths[row]].
        lengths: (num_rows,) int64, earlier tokens of each row, below capacity.
        rotary: cosines and sines of `rotary_table`, which rotate queries and keys first.
        window: keys seen at most, the new one and those just before it; None for all.

    Returns:
        (num_rows, heads, head_dim).
    """
    cos, sin = rotary if rotary is not None else (None, None)
    out: Tensor = _decode_attention(qkv, keys, values, lengths, heads, cos, sin, window or 0)
    return out


_library = torch.library.Library("unpad", "FRAGMENT")
_library.define(
    "decode_attention(Tensor qkv, Tensor(a!) keys, Tensor(b!) values, Tensor lengths, int heads, Tensor? cos,"
    " Tensor? sin, int window) -> Tensor"
)
_decode_attention = torch.ops.unpad.decode_attention.default


@cache
def _function() -> Any:
    sizes = [ctypes.c_int, ctypes.POINTER(AttentionSizes), ctypes.c_int64]
    return function("decode_attention", None, *sizes, *[ctypes.c_void_p] * 7)


def _decode(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    window: int,
) -> Tensor:
    qkv = qkv.contiguous()
    num_rows, _, head_dim = qkv.shape
    _, kv_heads, capacity, _ = keys.shape
    assert keys.shape == values.shape == (num_rows, kv_heads, capacity, head_dim), "the cache has other rows"
    assert qkv.shape[1] == heads + 2 * kv_heads, (tuple(qkv.shape), heads, kv_heads)
    assert keys.dtype == values.dtype == qkv.dtype, "mixed dtypes"
    assert supports(qkv.dtype, head_dim), (qkv.dtype, head_dim)
    assert lengths.dtype == torch.int64, "lengths are int64"
    assert lengths.shape == (num_rows,), "one length per row"
    assert num_rows == 0 or int(lengths.max()) < capacity, "the cache is full"
    wide = wide_dtype(qkv.dtype)
    tables = (None if table is None else table.to(wide).contiguous() for table in (cos, sin))
    out = qkv.new_empty((num_rows, heads, head_dim))
    sizes = AttentionSizes(
        num_seqs=num_rows,
        total_tokens=num_rows,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
        causal=True,
        num_threads=torch.get_num_threads(),
    )
    _function()(
        code(qkv.dtype),
        sizes,
        capacity,
        pointer(lengths),
        pointer(qkv),
        *map(pointer, tables),
        pointer(keys),
        pointer(values),
        pointer(out),
    )
    return out


def _fake(qkv: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, heads: int, *settings: Any) -> Tensor:
    return qkv.new_empty((qkv.shape[0], heads, qkv.shape[2]))


_library.impl("decode_attention", _decode, "CPU")
torch.library.register_fake("unpad::decode_attention", _fake, lib=_library)
