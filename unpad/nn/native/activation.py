"""Activations as one operator, `unpad::activation`, with its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unpad.nn.autograd import apply
from unpad.nn.native.library import call, operator
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
    y: Tensor = apply(_Activation, kind, x, bias) if grad else _forward(kind, x, bias)
    return y


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: str, x: Tensor, bias: Tensor | None) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(x, bias)
        return _forward(kind, x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor | None]:
        x, bias = ctx.saved_tensors
        grad_x, grad_bias = _backward(ctx.kind, grads[0], x, bias)
        return None, grad_x, None if bias is None else grad_bias.to(bias.dtype)


def _output(kind: str, x: Tensor, bias: Tensor | None) -> Tensor:
    """Empty tensor for y."""
    return x.new_empty((x.shape[0], x.shape[1] // 2 if kind in GATED else x.shape[1]))


def _grads(kind: str, grad_y: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Empty tensors for the gradients of x and of the bias, the latter wide and without numbers for no bias."""
    return torch.empty_like(x), x.new_empty(0 if bias is None else x.shape[1], dtype=wide_dtype(x.dtype))


@operator("activation", _output)
def _forward(kind: str, x: Tensor, bias: Tensor | None) -> Tensor:
    assert x.shape[1] % 2 == 0 or kind not in GATED, "gate and values differ in width"
    assert bias is None or (bias.dtype == x.dtype and bias.shape == x.shape[1:]), "bias does not match"
    x, y = x.contiguous(), _output(kind, x, bias)
    call("activation_forward", x.dtype, KINDS[kind], *y.shape, torch.get_num_threads(), x, bias, y)
    return y


@operator("activation_backward", _grads)
def _backward(kind: str, grad_y: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    grad_y, x = grad_y.contiguous(), x.contiguous()
    grad_x, grad_bias = _grads(kind, grad_y, x, bias)
    results = grad_x, None if bias is None else grad_bias
    call("activation_backward", x.dtype, KINDS[kind], *grad_y.shape, torch.get_num_threads(), grad_y, x, bias, *results)
    return grad_x, grad_bias
