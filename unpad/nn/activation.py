"""Activations of the feed-forward part, plain and gated (Shazeer 2020, arXiv 2002.05202)."""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from unpad.nn.autograd import apply
from unpad.nn.linear import rows_are_independent
from unpad.nn.native import library
from unpad.nn.native.library import call, operator
from unpad.nn.precision import wide_dtype, widened

Kind = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "geglu", "geglu_tanh", "swiglu"]
GATED = ("geglu", "geglu_tanh", "swiglu")
KINDS = {"relu": 0, "gelu": 1, "geglu": 2, "swiglu": 3}  # of the kernels, as in kernels.h


# --------------------------------------------------------------------------- the operator `unpad::activation`


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
    return apply(_Activation, kind, x, bias) if grad else _forward(kind, x, bias)


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


# --------------------------------------------------------------------------- of any kind, with or without kernels


def activate(kind: Kind, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute act(x + bias), or act(gate) * value for the gated kinds.

    Args:
        kind: quick_gelu is x * sigmoid(1.702 x), the approximation of gelu that CLIP was trained with (Hendrycks and
            Gimpel 2016, arXiv 1606.08415, section 2); gelu_tanh and geglu_tanh have their approximation by tanh.
        x: (total_tokens, hidden), or (total_tokens, 2 * hidden) with the gate first.
        bias: as wide as x, of its dtype; None for none.

    Returns:
        (total_tokens, hidden).
    """
    if kind in KINDS and library.runs(x):
        return activation(kind, x, bias)
    if bias is not None:
        x = x + bias
    if rows_are_independent(x):
        return _activate_each(kind, x)
    if kind in GATED:
        gate, value = x.chunk(2, -1)
        if kind == "swiglu":
            return F.silu(gate) * value
        return F.gelu(gate, approximate="tanh" if kind == "geglu_tanh" else "none") * value
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return F.relu(x) if kind == "relu" else F.gelu(x)


def _activate_each(kind: Kind, x: Tensor) -> Tensor:
    """The same by operations that give a number the same bits wherever it stands: torch's own activations compute the
    last numbers of a tensor by another formula."""
    x, value = x.chunk(2, -1) if kind in GATED else (x, None)
    wide = widened(x)
    if kind == "relu":
        y = wide.relu()
    elif kind in ("swiglu", "quick_gelu"):
        y = wide / (1 + (wide * (-1.702 if kind == "quick_gelu" else -1)).exp())
    elif kind in ("gelu", "geglu"):
        y = wide * 0.5 * (1 + (wide * math.sqrt(0.5)).erf())
    else:
        y = wide * 0.5 * (1 + (math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)).tanh())
    return y.to(x.dtype) if value is None else y.to(x.dtype) * value
