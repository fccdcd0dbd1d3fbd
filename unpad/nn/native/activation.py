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
from unpad.nn.native.library import code, function

KINDS = {"relu": 0, "gelu": 1, "geglu": 2, "swiglu": 3}  # as in kernels.h
GATED = frozenset({"geglu", "swiglu"})


def activation(kind: str, x: Tensor) -> Tensor:
    """relu, gelu (with erf), or the gated kinds: geglu gelu(gate) * up, swiglu silu(gate) * up.

    Args:
        kind: a key of `KINDS`.
        x: (total_tokens, hidden), or (total_tokens, 2 * hidden) for the gated kinds, gate first; bf16, fp32 or fp64.

    Returns:
        (total_tokens, hidden) of the dtype of x.
    """
    grad = torch.is_grad_enabled()
    y: Tensor = apply(_Activation, kind, x) if grad else torch.ops.unpad.activation.default(kind, x)
    return y


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: str, x: Tensor) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(x)
        y: Tensor = torch.ops.unpad.activation.default(kind, x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, torch.ops.unpad.activation_backward.default(ctx.kind, grads[0], ctx.saved_tensors[0])


_library = torch.library.Library("unpad", "FRAGMENT")
_library.define("activation(str kind, Tensor x) -> Tensor")
_library.define("activation_backward(str kind, Tensor grad_y, Tensor x) -> Tensor")


@cache
def _functions() -> tuple[Callable[..., None], Callable[..., None]]:
    sizes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    return (
        function("activation_forward", None, *sizes, *[ctypes.c_void_p] * 2),
        function("activation_backward", None, *sizes, *[ctypes.c_void_p] * 3),
    )


def _output(kind: str, x: Tensor) -> Tensor:
    """Empty tensor for y."""
    return x.new_empty((x.shape[0], x.shape[1] // 2 if kind in GATED else x.shape[1]))


def _forward(kind: str, x: Tensor) -> Tensor:
    assert x.shape[1] % 2 == 0 or kind not in GATED, "gate and values differ in width"
    x, y = x.contiguous(), _output(kind, x)
    threads = torch.get_num_threads()
    _functions()[0](code(x.dtype), KINDS[kind], *y.shape, threads, x.data_ptr(), y.data_ptr())
    return y


def _backward(kind: str, grad_y: Tensor, x: Tensor) -> Tensor:
    grad_y, x = grad_y.contiguous(), x.contiguous()
    grad_x = torch.empty_like(x)
    addresses = grad_y.data_ptr(), x.data_ptr(), grad_x.data_ptr()
    _functions()[1](code(x.dtype), KINDS[kind], *grad_y.shape, torch.get_num_threads(), *addresses)
    return grad_x


def _fake_backward(kind: str, grad_y: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_library.impl("activation", _forward, "CPU")
_library.impl("activation_backward", _backward, "CPU")
torch.library.register_fake("unpad::activation", _output, lib=_library)
torch.library.register_fake("unpad::activation_backward", _fake_backward, lib=_library)
