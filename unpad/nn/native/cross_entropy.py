"""Cross-entropy that overwrites rows of logits with their gradient: the operator `unpad::cross_entropy_`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from unpad.nn.native.library import code, function, pointer
from unpad.nn.precision import wide_dtype


def cross_entropy_(logits: Tensor, labels: Tensor, smoothing: float, want_grad: bool) -> tuple[Tensor, Tensor]:
    """Loss of every row; with `want_grad` the logits are overwritten with the gradient of `loss.sum()`.

    Args:
        logits: (num_rows, vocab_size) bf16, fp32 or fp64, contiguous.
        labels: (num_rows,) int64, each below vocab_size.
        smoothing: share of each target spread evenly over the vocabulary.

    Returns:
        loss and nll, (num_rows,) fp32 or fp64, in nats: smoothed and plain negative log-likelihood. No autograd.

    Raises:
        IndexError: a label is outside the vocabulary; the logits are then unchanged.
    """
    loss, nll = torch.ops.unpad.cross_entropy_.default(logits, labels, smoothing, want_grad)
    if want_grad:
        torch.autograd.graph.increment_version(logits)
    return loss, nll


_library = torch.library.Library("unpad", "FRAGMENT")
_library.define("cross_entropy_(Tensor(a!) logits, Tensor labels, float smoothing, bool want_grad) -> (Tensor, Tensor)")


@cache
def _function() -> Callable[..., None]:
    sizes = [ctypes.c_int, *[ctypes.c_int64] * 2, ctypes.c_double, *[ctypes.c_int] * 2]
    return function("cross_entropy", ctypes.c_int64, *sizes, *[ctypes.c_void_p] * 4)


def _outputs(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Empty tensors for loss and nll."""
    wide = wide_dtype(logits.dtype)
    return logits.new_empty(len(logits), dtype=wide), logits.new_empty(len(logits), dtype=wide)


def _forward(logits: Tensor, labels: Tensor, smoothing: float, want_grad: bool) -> tuple[Tensor, Tensor]:
    assert labels.dtype == torch.int64, f"labels are {labels.dtype}"
    assert labels.shape == logits.shape[:1], "one label per row"
    labels, (loss, nll) = labels.contiguous(), _outputs(logits)
    outside = _function()(
        code(logits.dtype),
        *logits.shape,
        smoothing,
        want_grad,
        torch.get_num_threads(),
        pointer(logits),
        labels.data_ptr(),
        loss.data_ptr(),
        nll.data_ptr(),
    )
    if outside:
        raise IndexError(f"{outside} labels are out of range of a vocabulary of {logits.shape[1]}")
    return loss, nll


def _fake(logits: Tensor, labels: Tensor, smoothing: float, want_grad: bool) -> tuple[Tensor, Tensor]:
    return _outputs(logits)


_library.impl("cross_entropy_", _forward, "CPU")
torch.library.register_fake("unpad::cross_entropy_", _fake, lib=_library)
