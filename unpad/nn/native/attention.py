"""Attention as operators with names in profiles: of whole sequences with its gradient (attention.h), and of new tokens
that follow held ones, in pieces of prompts (attention.h) and one per sequence (decode.h)."""

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unpad.batching.layout import Layout
from unpad.nn.attend import Attend
from unpad.nn.autograd import apply, refuse_second_derivative
from unpad.nn.native.library import call, computes, fields, operator, pointer
from unpad.nn.precision import wide_dtype

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 128


def supports(dtype: torch.dtype, head_dim: int) -> bool:
    """True if the enabled kernels support such heads."""
    return computes(dtype) and _fits(dtype, head_dim)


def _fits(dtype: torch.dtype, head_dim: int) -> bool:
    multiple = 2 if dtype == torch.float64 else 16
    return MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM and head_dim % multiple == 0


def native_attention(qkv: Tensor, layout: Layout, heads: int, how: Attend) -> Tensor:
    """Attention within each sequence and nowhere else; dropout draws by `how.seed` and the layout's bases.

    Args:
        qkv: (total_tokens, heads + 2 * kv_heads, head_dim) bf16, fp32 or fp64: queries, keys, values.

    Returns:
        (total_tokens, heads, head_dim) of qkv's type. Gradient flows to qkv, qkv_bias and key_bias.
    """
    cos, sin = how.rotary if how.rotary is not None else (None, None)
    scale = 1 / math.sqrt(qkv.shape[2]) if how.scale is None else how.scale
    sizes, draws = (heads, (qkv.shape[1] - heads) // 2), (how.dropout, int(how.seed or 0), layout.bases)
    settings = *sizes, how.causal, scale, cos, sin, *draws, how.window or 0
    return apply(_Attention, qkv, how.qkv_bias, how.key_bias, layout.cu_seqlens, *settings)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, qkv_bias: Tensor | None, key_bias: Tensor | None, cu_seqlens: Tensor, *settings: Any
    ) -> Tensor:
        out, log_z = attention_forward(qkv, qkv_bias, key_bias, cu_seqlens, *settings)
        cos, sin = settings[4:6]
        *ctx.settings, bases, ctx.window = settings[:4] + settings[6:]
        ctx.save_for_backward(qkv, qkv_bias, key_bias, cu_seqlens, cos, sin, bases, out, log_z)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attention")
        *shared, cos, sin, bases, out, log_z = ctx.saved_tensors
        before, after, key_bias = ctx.settings[:4], (*ctx.settings[4:], bases, ctx.window), shared[2]
        wants_qkv_bias, wants_bias = bool(ctx.needs_input_grad[1]), bool(ctx.needs_input_grad[2])
        grad_qkv, grad_bias = attention_backward(grads[0], out, log_z, *shared, *before, cos, sin, *after, wants_bias)
        return (
            grad_qkv,
            grad_qkv.flatten(1).sum(0) if wants_qkv_bias else None,
            grad_bias.sum(0).to(key_bias.dtype) if wants_bias else None,
            *[None] * 11,
        )


# --------------------------------------------------------------------------- operators

_INPUTS = (
    "Tensor qkv, Tensor? qkv_bias, Tensor? key_bias, Tensor cu_seqlens, int heads, int kv_heads, bool causal, "
    "float scale, Tensor? cos, Tensor? sin, float dropout, int seed, Tensor? bases, int window"
)


class AttentionSizes(ctypes.Structure):
    """`struct unpad_attention` of kernels.h."""

    _fields_ = fields(
        "q num_seqs total_tokens heads kv_heads head_dim",
        "d scale dropout",
        "u seed",
        "p bases",
        "q window",
        "i causal num_threads",
    )


class _Inputs(NamedTuple):
    """Inputs that forward and backward share, in the order of `_INPUTS`."""

    qkv: Tensor
    qkv_bias: Tensor | None
    key_bias: Tensor | None
    cu_seqlens: Tensor
    heads: int
    kv_heads: int
    causal: bool
    scale: float
    cos: Tensor | None
    sin: Tensor | None
    dropout: float
    seed: int
    bases: Tensor | None
    window: int

    def readable(self) -> "_Inputs":
        """The same as kernels read it: contiguous, and tables wide."""
        wide = wide_dtype(self.qkv.dtype)
        key_bias, cos, sin = (
            None if x is None else x.to(wide).contiguous() for x in (self.key_bias, self.cos, self.sin)
        )
        return self._replace(
            qkv=self.qkv.contiguous(), cu_seqlens=self.cu_seqlens.contiguous(), key_bias=key_bias, cos=cos, sin=sin
        )

    def sizes(self) -> AttentionSizes:
        total, rows, head_dim = self.qkv.shape
        assert self.heads % self.kv_heads == 0, (self.heads, self.kv_heads)
        assert rows == self.heads + 2 * self.kv_heads, (tuple(self.qkv.shape), self.heads, self.kv_heads)
        assert _fits(self.qkv.dtype, head_dim), (self.qkv.dtype, head_dim)
        assert self.cu_seqlens.dtype == torch.int32, self.cu_seqlens.dtype
        end = int(self.cu_seqlens[-1])
        assert end == total, f"the layout ends at {end}, the run at {total}"
        assert 0 <= self.dropout < 1, self.dropout
        assert self.window >= 0, self.window
        assert self.causal or not self.window, "a window is of causal attention"
        numbers = len(self.cu_seqlens) - 1, total, self.heads, self.kv_heads, head_dim, self.scale, self.dropout
        draws, threads = (self.seed, pointer(self.bases)), torch.get_num_threads()
        return AttentionSizes(*numbers, *draws, window=self.window, causal=self.causal, num_threads=threads)

    def call(self, function: str, *results: Tensor | None) -> None:
        """Call a compiled function on these inputs and its own arrays."""
        bias = self.qkv_bias
        assert bias is None or bias.dtype == self.qkv.dtype, f"qkv_bias is {bias.dtype}"
        assert bias is None or bias.numel() == self.qkv.shape[1] * self.qkv.shape[2], "qkv_bias does not match"
        tensors = self.cu_seqlens, self.qkv, bias, self.cos, self.sin, self.key_bias, *results
        call(function, self.qkv.dtype, self.sizes(), *tensors)


def _empty_forward(qkv: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """Empty results of the forward pass."""
    total, _, head_dim = qkv.shape
    heads = settings[3]
    return qkv.new_empty((total, heads, head_dim)), qkv.new_empty((heads, total), dtype=wide_dtype(qkv.dtype))


@operator("ragged_attention", _empty_forward, schema=f"({_INPUTS}) -> (Tensor, Tensor)")
def attention_forward(*given: Any) -> tuple[Tensor, Tensor]:
    """Out (total_tokens, heads, head_dim), and log_z (heads, total_tokens) wide, the log of each softmax's sum."""
    inputs = _Inputs(*given).readable()
    out, log_z = _empty_forward(*inputs)
    inputs.call("attention_forward", out, log_z)
    return out, log_z


def _empty_backward(grad_out: Tensor, out: Tensor, log_z: Tensor, qkv: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """Empty results of the backward pass."""
    kv_heads, wants_bias = settings[4], settings[-1]
    shape = (kv_heads, len(qkv)) if wants_bias else (0,)
    return torch.empty_like(qkv), qkv.new_empty(shape, dtype=wide_dtype(qkv.dtype))


@operator(
    "ragged_attention_backward",
    _empty_backward,
    schema=f"(Tensor grad_out, Tensor out, Tensor log_z, {_INPUTS}, bool wants_bias) -> (Tensor, Tensor)",
)
def attention_backward(grad_out: Tensor, out: Tensor, log_z: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """Gradient of qkv, and of key_bias per key head, (kv_heads, total_tokens) wide, or (0,) if unwanted."""
    *shared, wants_bias = given
    inputs, grad_out = _Inputs(*shared).readable(), grad_out.contiguous()
    grad_qkv, grad_bias = _empty_backward(grad_out, out, log_z, *inputs, wants_bias)
    inputs.call("attention_backward", out, log_z, grad_out, grad_qkv, grad_bias if wants_bias else None)
    return grad_qkv, grad_bias


def supports_decoding(dtype: torch.dtype, head_dim: int) -> bool:
    """True if the kernel of one token supports such heads, if `library.enabled`."""
    return dtype == torch.float64 or head_dim % 16 == 0


def decode_attention(qkv: Tensor, buffers: Sequence[Tensor], lengths: Sequence[int], heads: int, how: Attend) -> Tensor:
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
    qkv: Tensor, cu_seqlens: Tensor, buffers: Sequence[Tensor], lengths: Sequence[int], heads: int, how: Attend
) -> Tensor:
    """Store the new keys and values of every sequence behind the held ones and attend causally to all; no gradient.

    In fp32 and bf16 a token gets the same bits wherever its sequence is cut into pieces.

    Args:
        qkv: (total_tokens, heads + 2 * kv_heads, head_dim), new tokens of heads as `supports`.
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
    def of(cls, buffers: Sequence[Tensor], lengths: Sequence[int], news: Sequence[int]) -> "_Buffers":
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
    assert supports_decoding(qkv.dtype, qkv.shape[2]), (qkv.dtype, qkv.shape[2])
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
