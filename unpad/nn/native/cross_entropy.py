"""Cross-entropy that overwrites rows of logits with their gradient, and the head of tiled_head.h: product with the
vocabulary and cross-entropy at once, as two operators, losses and gradients."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from unpad.nn.native.library import code, function, has_function, is_plain, pointer, runs
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


# --------------------------------------------------------------------------- the head by tiles


def supports_head(hidden: Tensor, weight: Tensor) -> bool:
    """True if the operators take hidden states and a weight like these; contiguous or not."""
    sizes = hidden.shape[1] % 16 == 0 and hidden.dtype == weight.dtype == torch.bfloat16
    return sizes and runs(hidden) and is_plain(weight) and has_function("head_forward")


def head_forward(hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of rows; no autograd.

    Args:
        hidden: (num_rows, width) bf16.
        weight: (vocab_size, width) bf16.
        labels: (num_rows,) int64, each below vocab_size.
        smoothing: share of each target spread evenly over the vocabulary.

    Returns:
        loss, nll, log_z, (num_rows,) fp32, in nats: smoothed and plain negative log-likelihood, and the log of the
        softmax's sum.

    Raises:
        IndexError: a label is outside the vocabulary.
    """
    loss, nll, log_z = torch.ops.unpad.head_forward.default(hidden, weight, labels, smoothing)
    return loss, nll, log_z


def head_backward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    smoothing: float,
    nll: Tensor,
    log_z: Tensor,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the sum of losses of rows, perhaps of some of those that `head_forward` had, where they are wanted:
    of the hidden states, (num_rows, width) bf16, and of the weight, (vocab_size, width) fp32."""
    grads = torch.ops.unpad.head_backward.default(hidden, weight, labels, smoothing, nll, log_z, *wanted)
    return grads[0] if wanted[0] else None, grads[1] if wanted[1] else None


_SETTINGS = "Tensor hidden, Tensor weight, Tensor labels, float smoothing"
_library.define(f"head_forward({_SETTINGS}) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"head_backward({_SETTINGS}, Tensor nll, Tensor log_z, bool want_hidden, bool want_weight) -> (Tensor, Tensor)"
)


@cache
def _head_functions() -> tuple[Any, Any]:
    """The compiled functions, with their argument types declared once."""
    shared = [*[ctypes.c_int64] * 3, ctypes.c_double, ctypes.c_int, *[ctypes.c_void_p] * 3]
    return (
        function("head_forward", ctypes.c_int64, *shared, *[ctypes.c_void_p] * 3),
        function("head_backward", None, *shared, *[ctypes.c_void_p] * 4),
    )


def _shared(hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float) -> list[Any]:
    """Arguments that both functions share."""
    assert hidden.shape[1] == weight.shape[1], (tuple(hidden.shape), tuple(weight.shape))
    assert labels.dtype == torch.int64, f"labels are {labels.dtype}"
    assert labels.shape == hidden.shape[:1], "one label per row"
    sizes = len(hidden), hidden.shape[1], len(weight)
    return [*sizes, smoothing, torch.get_num_threads(), *map(pointer, (hidden, weight, labels))]


def _head_losses(hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, labels = hidden.contiguous(), weight.contiguous(), labels.contiguous()
    found = _empty_losses(hidden)
    if outside := _head_functions()[0](*_shared(hidden, weight, labels, smoothing), *map(pointer, found)):
        raise IndexError(f"{outside} labels are out of range of a vocabulary of {len(weight)}")
    return found


def _head_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    smoothing: float,
    nll: Tensor,
    log_z: Tensor,
    want_hidden: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    hidden, weight, labels = hidden.contiguous(), weight.contiguous(), labels.contiguous()
    grads = _empty_gradients(hidden, weight, want_hidden, want_weight)
    wanted = grads[0] if want_hidden else None, grads[1] if want_weight else None
    given = nll.contiguous(), log_z.contiguous()
    _head_functions()[1](*_shared(hidden, weight, labels, smoothing), *map(pointer, (*given, *wanted)))
    return grads


def _empty_losses(hidden: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    loss, nll, log_z = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
    return loss, nll, log_z


def _empty_gradients(hidden: Tensor, weight: Tensor, want_hidden: bool, want_weight: bool) -> tuple[Tensor, Tensor]:
    """Empty results, of no numbers where they are not wanted."""
    of_weight = torch.empty(weight.shape if want_weight else (0,), dtype=torch.float32, device=weight.device)
    return (torch.empty_like(hidden) if want_hidden else hidden.new_empty(0)), of_weight


def _fake_gradients(hidden: Tensor, weight: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    return _empty_gradients(hidden, weight, *settings[-2:])


_library.impl("head_forward", _head_losses, "CPU")
_library.impl("head_backward", _head_gradients, "CPU")
torch.library.register_fake("unpad::head_forward", _empty_losses, lib=_library)
torch.library.register_fake("unpad::head_backward", _fake_gradients, lib=_library)
