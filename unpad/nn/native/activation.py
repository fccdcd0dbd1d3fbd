"""Activations as one operator, `unpad::activation`, with its gradient."""

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

KINDS = {"relu": 0, "gelu": 1, "geglu": 2, "swiglu": 3}  # as in kernels.h
GATED = frozenset({"geglu", "swiglu"})


def activation(kind: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """relu, gelu (with erf), or the gated kinds: geglu gelu(gate) * up, swiglu silu(gate) * up; of x + bias.

    Args:
        kind: a key of `KINDS`.
        x: (total_tokens, hidden), or (total_tokens, 2 * hidden) for the gated kinds, gate first; bf16, fp32 or fp64.
        bias: as wide as x and of its dtype.

    Returns:
        (total_tokens, hidden) of the dtype of x.
    """
    grad = torch.is_grad_enabled()
    y: Tensor = apply(_Activation, kind, x, bias) if grad else torch.ops.unpad.activation.default(kind, x, bias)
    return y


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: str, x: Tensor, bias: Tensor | None) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(x, bias)
        y: Tensor = torch.ops.unpad.activation.default(kind, x, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor | None]:
        x, bias = ctx.saved_tensors
        grad_x, grad_bias = torch.ops.unpad.activation_backward.default(ctx.kind, grads[0], x, bias)
        return None, grad_x, None if bias is None else grad_bias.to(bias.dtype)


_library = torch.library.Library("unpad", "FRAGMENT")
_library.define("activation(str kind, Tensor x, Tensor? bias) -> Tensor")
_library.define("activation_backward(str kind, Tensor grad_y, Tensor x, Tensor? bias) -> (Tensor, Tensor)")


@cache
def _functions() -> tuple[Callable[..., None], Callable[..., None]]:
    sizes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    return (
        function("activation_forward", None, *sizes, *[ctypes.c_void_p] * 3),
        function("activation_backward", None, *sizes, *[ctypes.c_void_p] * 5),
    )


def _output(kind: str, x: Tensor, bias: Tensor | None) -> Tensor:
    """Empty tensor for y."""
    return x.new_empty((x.shape[0], x.shape[1] // 2 if kind in GATED else x.shape[1]))


def _grads(kind: str, grad_y: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Empty tensors for the gradients of x and of the bias, the latter wide and without numbers for no bias."""
    return torch.empty_like(x), x.new_empty(0 if bias is None else x.shape[1], dtype=wide_dtype(x.dtype))


def _forward(kind: str, x: Tensor, bias: Tensor | None) -> Tensor:
    assert x.shape[1] % 2 == 0 or kind not in GATED, "gate and values differ in width"
    x, y = x.contiguous(), _output(kind, x, bias)
    threads = torch.get_num_threads()
    _functions()[0](code(x.dtype), KINDS[kind], *y.shape, threads, x.data_ptr(), _bias(bias, x), y.data_ptr())
    return y


def _backward(kind: str, grad_y: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    grad_y, x = grad_y.contiguous(), x.contiguous()
    grad_x, grad_bias = grads = _grads(kind, grad_y, x, bias)
    addresses = grad_y.data_ptr(), x.data_ptr(), _bias(bias, x), grad_x.data_ptr()
    at_bias = None if bias is None else grad_bias.data_ptr()
    _functions()[1](code(x.dtype), KINDS[kind], *grad_y.shape, torch.get_num_threads(), *addresses, at_bias)
    return grads


def _bias(bias: Tensor | None, x: Tensor) -> int | None:
    """Address of a bias that fits."""
    assert bias is None or (bias.dtype == x.dtype and bias.shape == x.shape[1:]), "bias does not match"
    return pointer(bias)


_library.impl("activation", _forward, "CPU")
_library.impl("activation_backward", _backward, "CPU")
torch.library.register_fake("unpad::activation", _output, lib=_library)
torch.library.register_fake("unpad::activation_backward", _grads, lib=_library)
