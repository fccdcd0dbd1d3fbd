"""Linear layers that compute in low precision from copies of their weights.

Autocast makes the copies anew in every forward pass. Inside `keep_copies` they stay until the weight changes, and the
native optimizer writes them in the same pass that updates the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from unpad.native import library
from unpad.native.small_linear import MAX_ROWS, small_linear


@dataclass
class _Copy:
    value: Tensor
    version: int  # of the parameter when the copy was made


# What the innermost `keep_copies` of this thread keeps: parameter -> _Copy.
_kept: ContextVar[WeakTensorKeyDictionary | None] = ContextVar("_kept", default=None)
_owned: WeakKeyDictionary[object, WeakTensorKeyDictionary] = WeakKeyDictionary()


@contextmanager
def keep_copies(owner: object | None = None) -> Iterator[None]:
    """Keep low-precision copies of parameters inside, each until its parameter changes.

    Only for code that knows every writer: a write through `.data`, or by torch's fused optimizers, goes unseen unless
    `parameters_changed` tells of it.

    Args:
        owner: the copies are there again the next time, as long as this object lives; None forgets them at the end.
    """
    if owner is not None:
        copies = _owned.setdefault(owner, WeakTensorKeyDictionary())
    else:
        outer = _kept.get()
        copies = WeakTensorKeyDictionary() if outer is None else outer
    token = _kept.set(copies)
    try:
        yield
    finally:
        _kept.reset(token)


def parameters_changed(parameters: Iterable[Tensor]) -> None:
    """Say that parameters were written to behind autograd's back, so that their copies are made anew."""
    torch.autograd.graph.increment_version(parameters)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype matrix products run in: autocast's where it is on, else the input's."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def computing_copy(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter in the computing dtype, without gradient."""
    if parameter.dtype == dtype:
        return parameter.detach()
    copies = _kept.get()
    if copies is None:
        return parameter.detach().to(dtype)
    kept: _Copy | None = copies.get(parameter)
    if kept is None or kept.value.dtype != dtype or kept.value.device != parameter.device:
        with torch.inference_mode(False), torch.no_grad():  # a copy first made for inference may be trained with later
            kept = _Copy(parameter.detach().to(dtype), parameter._version)
        copies[parameter] = kept
    elif kept.version != parameter._version:
        with torch.no_grad():
            kept.value.copy_(parameter)
        kept.version = parameter._version
    return kept.value


def kept_copy(parameter: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The copy that `computing_copy` keeps of a parameter in this dtype; None where there is none.

    Whoever writes to both behind autograd's back calls `copies_written` then.
    """
    copies = _kept.get()
    kept: _Copy | None = None if copies is None else copies.get(parameter)
    return kept.value if kept is not None and kept.value.dtype == dtype else None


def copies_written(parameters: Iterable[Tensor]) -> None:
    """Say that the kept copies of these parameters hold their newest values."""
    copies = _kept.get()
    for parameter in parameters:
        if copies is not None and parameter in copies:
            copies[parameter].version = parameter._version


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias of one dtype; few rows without gradient, as in decoding, have a kernel of their own."""
    if not torch.is_grad_enabled() and len(x) <= MAX_ROWS and library.runs(x):
        return small_linear(x, weight, bias)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """y = x W^T + b over a flat run, (total_tokens, in) to (total_tokens, out), in the computing dtype."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        if self.weight.dtype == dtype:
            return product(x, self.weight, self.bias)
        if not torch.is_grad_enabled():
            bias = None if self.bias is None else computing_copy(self.bias, dtype)
            return product(x.to(dtype), computing_copy(self.weight, dtype), bias)
        y: Tensor = _LowPrecision.apply(x.to(dtype), self.weight, self.bias)
        return y


class _LowPrecision(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        low = computing_copy(weight, x.dtype)
        ctx.save_for_backward(x, low)
        return F.linear(x, low, None if bias is None else computing_copy(bias, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            grad @ low if need_x else None,
            grad.t() @ x if need_weight else None,
            grad.sum(0) if need_bias else None,
        )
