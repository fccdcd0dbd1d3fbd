"""Residual add, dropout and normalisation as one operator, `unpad::add_norm`, with its gradient."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unpad.nn.autograd import apply
from unpad.nn.native.library import code, function, pointer
from unpad.nn.precision import wide_dtype


class _Norm(ctypes.Structure):
    """`struct unpad_norm` of kernels.h."""

    _fields_ = (
        ("total_tokens", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("eps", ctypes.c_double),
        ("dropout", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("places", ctypes.c_void_p),
        ("centred", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


def add_norm(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    centred: bool,
    dropout: float = 0.0,
    seed: int = 0,
    places: Tensor | None = None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """sum = residual + dropout(delta); y = normalise(sum) * weight + bias. All four tensors may need a gradient.

    Args:
        residual: (total_tokens, width), wide: fp64 for fp64 activations, fp32 for others.
        delta: (total_tokens, width) of `dtype`, output of the previous layer; None for none.
        weight, bias: (width,), wide; bias None for none.
        eps: added to the variance.
        centred: True for LayerNorm, False for RMSNorm.
        dropout: share of `delta` set to zero, below 1; the rest is divided by 1 - dropout.
        seed: 0 to 2**63 - 1; determines which numbers stay, the same in forward and backward.
        places: (total_tokens,) int64, of the tokens for dropout; None: those in the run.
        dtype: of activations, a key of `DTYPES`.

    Returns:
        sum (total_tokens, width), wide, `residual` itself without a delta; y (total_tokens, width) of `dtype`.
    """
    settings = (eps, centred, dropout, seed, None if places is None else places.contiguous())
    if torch.is_grad_enabled():
        both: tuple[Tensor, Tensor] = apply(_AddNorm, residual, delta, weight, bias, settings, dtype)
        return both
    total, y, _ = torch.ops.unpad.add_norm.default(residual, delta, weight, bias, *settings, dtype)
    return residual if delta is None else total, y


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        settings: tuple[float, bool, float, int, Tensor | None],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        total, y, stats = torch.ops.unpad.add_norm.default(residual, delta, weight, bias, *settings, dtype)
        if delta is None:
            total = residual
        ctx.save_for_backward(total, stats, weight, settings[4])
        ctx.settings, ctx.dtype = settings[:4], dtype
        ctx.has_delta, ctx.has_bias = delta is not None, bias is not None
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_total, grad_y = grads
        total, stats, weight, places = ctx.saved_tensors
        if grad_y is None:  # only the sum was used
            grad_y = torch.zeros_like(total, dtype=ctx.dtype)
        grad_residual, grad_delta, grad_weight, grad_bias = torch.ops.unpad.add_norm_backward.default(
            grad_y, grad_total, total, stats, weight, ctx.has_delta, ctx.has_bias, *ctx.settings, places
        )
        return (
            grad_residual,
            grad_delta if ctx.has_delta else None,
            grad_weight,
            grad_bias if ctx.has_bias else None,
            None,
            None,
        )


_library = torch.library.Library("unpad", "FRAGMENT")
_SETTINGS = "float eps, bool centred, float dropout, int seed, Tensor? places"
_library.define(
    f"add_norm(Tensor residual, Tensor? delta, Tensor weight, Tensor? bias, {_SETTINGS}, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "add_norm_backward(Tensor grad_y, Tensor? grad_sum, Tensor sum, Tensor stats, Tensor weight, bool has_delta,"
    f" bool has_bias, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _outputs(residual: Tensor, delta: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for sum, y and stats; an operator may not return its argument: without delta sum is empty."""
    total = residual.new_empty(residual.shape if delta is not None else 0)
    return total, residual.new_empty(residual.shape, dtype=dtype), residual.new_empty((len(residual), 2))


def _grads(grad_y: Tensor, weight: Tensor, has_delta: bool, has_bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors for the gradients of residual, delta, weight and bias, without numbers for a missing tensor."""
    return (
        weight.new_empty(grad_y.shape),
        grad_y.new_empty(grad_y.shape if has_delta else 0),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape if has_bias else 0),
    )


@cache
def _functions() -> tuple[Callable[..., None], Callable[..., None]]:
    sizes = [ctypes.c_int, ctypes.POINTER(_Norm)]
    return (
        function("add_norm_forward", None, *sizes, *[ctypes.c_void_p] * 7),
        function("add_norm_backward", None, *sizes, *[ctypes.c_void_p] * 9),
    )


def _sizes(shape: torch.Size, eps: float, centred: bool, dropout: float, seed: int, places: Tensor | None) -> _Norm:
    assert 0 <= dropout < 1, f"dropout of {dropout}"
    return _Norm(shape[0], shape[1], eps, dropout, seed, pointer(places), centred, torch.get_num_threads())


def _forward(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    dropout: float,
    seed: int,
    places: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = wide_dtype(dtype)
    assert residual.dtype == wide, f"activations of {dtype} with a residual of {residual.dtype}"
    for vector in (weight,) if bias is None else (weight, bias):
        assert vector.dtype == wide, f"parameters of {vector.dtype} with a residual of {wide}"
        assert vector.shape == residual.shape[1:], "parameters do not match"
    residual = residual.contiguous()
    if delta is not None:
        assert delta.dtype == dtype, f"delta is {delta.dtype}, not {dtype}"
        assert delta.shape == residual.shape, "delta does not match"
        delta = delta.contiguous()
    total, y, stats = _outputs(residual, delta, dtype)
    _functions()[0](
        code(dtype),
        _sizes(residual.shape, eps, centred, dropout, seed, places),
        residual.data_ptr(),
        pointer(delta),
        pointer(weight),
        pointer(bias),
        total.data_ptr(),
        y.data_ptr(),
        stats.data_ptr(),
    )
    return total, y, stats


def _backward(
    grad_y: Tensor,
    grad_sum: Tensor | None,
    total: Tensor,
    stats: Tensor,
    weight: Tensor,
    has_delta: bool,
    has_bias: bool,
    eps: float,
    centred: bool,
    dropout: float,
    seed: int,
    places: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_y, total = grad_y.contiguous(), total.contiguous()
    grad_sum = None if grad_sum is None else grad_sum.contiguous()
    grads = _grads(grad_y, weight, has_delta, has_bias)
    grad_residual, grad_delta, grad_weight, grad_bias = grads
    _functions()[1](
        code(grad_y.dtype),
        _sizes(grad_y.shape, eps, centred, dropout, seed, places),
        grad_y.data_ptr(),
        pointer(grad_sum),
        total.data_ptr(),
        pointer(stats),
        pointer(weight),
        grad_residual.data_ptr(),
        grad_delta.data_ptr() if has_delta else None,
        grad_weight.data_ptr(),
        grad_bias.data_ptr() if has_bias else None,
    )
    return grads


def _fake_forward(
    residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(residual, delta, settings[-1])


def _fake_backward(
    grad_y: Tensor,
    grad_sum: Tensor | None,
    total: Tensor,
    stats: Tensor,
    weight: Tensor,
    has_delta: bool,
    has_bias: bool,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _grads(grad_y, weight, has_delta, has_bias)


_library.impl("add_norm", _forward, "CPU")
_library.impl("add_norm_backward", _backward, "CPU")
torch.library.register_fake("unpad::add_norm", _fake_forward, lib=_library)
torch.library.register_fake("unpad::add_norm_backward", _fake_backward, lib=_library)
