"""The optimizer's update and the norm before it: the operators `unpad::adamw_` and `unpad::grad_square_sum`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from unpad.native.library import library, pointer

# `struct unpad_parameter` of kernels.h.
_PARAMETER = np.dtype(
    [
        ("numel", np.int64),
        ("value", np.uint64),
        ("exp_avg", np.uint64),
        ("exp_avg_sq", np.uint64),
        ("grad", np.uint64),
        ("copy", np.uint64),
        ("lr", np.float64),
        ("weight_decay", np.float64),
        ("step", np.int64),
        ("grad_is_bf16", np.int64),
    ]
)


def grad_square_sum(grads: Sequence[Tensor]) -> float:
    """Sum of squares of all numbers of all gradients (bf16 or fp32, any shapes), in fp64; the same for any threads."""
    return torch.ops.unpad.grad_square_sum.default(grads) if grads else 0.0  # an empty list has no device


def adamw_(
    values: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    *,
    lrs: Sequence[float],
    weight_decays: Sequence[float],
    steps: Sequence[int],
    betas: tuple[float, float],
    eps: float,
    grad_scale: float = 1.0,
) -> None:
    """AdamW as torch.optim.AdamW computes it, for all tensors at once; every list has one entry per tensor.

    Args:
        values, exp_avgs, exp_avg_sqs: fp32, contiguous, changed in place.
        grads: bf16 or fp32, of the shape of their value.
        copies: bf16, receive the new value rounded; None where there is none.
        lrs, weight_decays: of each tensor; the decay is decoupled: value *= 1 - lr * weight_decay.
        steps: the number of this update of each tensor, from 1.
        grad_scale: factor of all gradients, such as that of clipping.
    """
    if not values:
        return  # an empty list has no device
    torch.ops.unpad.adamw_.default(
        values, grads, exp_avgs, exp_avg_sqs, copies, lrs, weight_decays, steps, *betas, eps, grad_scale
    )
    torch.autograd.graph.increment_version([*values, *(copy for copy in copies if copy is not None)])


_library = torch.library.Library("unpad", "FRAGMENT")
_library.define("grad_square_sum(Tensor[] grads) -> float")
_library.define(
    "adamw_(Tensor(a!)[] values, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)?[] copies, float[] lrs, float[] weight_decays, int[] steps, float beta1, float beta2, float eps,"
    " float grad_scale) -> ()"
)


@cache
def _functions() -> tuple[Callable[..., float], Callable[..., None]]:
    square_sum, update = library().unpad_grad_square_sum, library().unpad_adamw
    square_sum.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    square_sum.restype = ctypes.c_double
    update.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_double] * 4, ctypes.c_int]
    update.restype = None
    return square_sum, update


def _table(grads: Sequence[Tensor]) -> np.ndarray:
    """One record per tensor, with what concerns its gradient filled in."""
    table = np.zeros(len(grads), _PARAMETER)
    table["numel"] = [grad.numel() for grad in grads]
    table["grad"] = [pointer(grad) for grad in grads]
    table["grad_is_bf16"] = [grad.dtype == torch.bfloat16 for grad in grads]
    return table


def _pointers(tensors: Sequence[Tensor | None], like: Sequence[Tensor], dtype: torch.dtype) -> list[int]:
    """Addresses of tensors that the kernel reads and writes as `dtype`, in the size of `like`; 0 for None."""
    for tensor, other in zip(tensors, like, strict=True):
        assert tensor is None or (tensor.dtype == dtype and tensor.numel() == other.numel()), "tensors do not match"
    return [pointer(tensor) or 0 for tensor in tensors]


def _square_sum(grads: Sequence[Tensor]) -> float:
    # Made here: reading a gradient of another layout must not need the caller's care.
    grads = [grad.contiguous() for grad in grads]
    table = _table(grads)
    return _functions()[0](table.ctypes.data, len(table), torch.get_num_threads())


def _update(
    values: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    lrs: Sequence[float],
    weight_decays: Sequence[float],
    steps: Sequence[int],
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float,
) -> None:
    grads = [grad.contiguous() for grad in grads]
    table = _table(grads)
    table["value"] = _pointers(values, grads, torch.float32)
    table["exp_avg"] = _pointers(exp_avgs, grads, torch.float32)
    table["exp_avg_sq"] = _pointers(exp_avg_sqs, grads, torch.float32)
    table["copy"] = _pointers(copies, grads, torch.bfloat16)
    table["lr"], table["weight_decay"], table["step"] = lrs, weight_decays, steps
    _functions()[1](table.ctypes.data, len(table), beta1, beta2, eps, grad_scale, torch.get_num_threads())


_library.impl("grad_square_sum", _square_sum, "CPU")
_library.impl("adamw_", _update, "CPU")
torch.library.register_fake("unpad::adamw_", lambda *arguments: None, lib=_library)
