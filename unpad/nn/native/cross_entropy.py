"""Cross-entropy that overwrites rows of logits with their gradient, and the head of tiled_head.h: product with the
vocabulary and cross-entropy at once, as two operators, losses and gradients."""

from typing import Any

import torch
from torch import Tensor

from unpad.nn.native.library import call, has_function, is_plain, operator, runs
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
    loss, nll = _losses_of_logits(logits, labels, smoothing, want_grad)
    if want_grad:
        torch.autograd.graph.increment_version(logits)
    return loss, nll


def _empty(logits: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """Empty tensors for loss and nll."""
    wide = wide_dtype(logits.dtype)
    return logits.new_empty(len(logits), dtype=wide), logits.new_empty(len(logits), dtype=wide)


@operator("cross_entropy_", _empty, changes=["logits"])
def _losses_of_logits(logits: Tensor, labels: Tensor, smoothing: float, want_grad: bool) -> tuple[Tensor, Tensor]:
    labels, results, threads = _readable(labels, len(logits)), _empty(logits), torch.get_num_threads()
    sizes = *logits.shape, smoothing, want_grad, threads
    _check(call("cross_entropy", logits.dtype, *sizes, logits, labels, *results), logits.shape[1])
    return results


def _readable(labels: Tensor, num_rows: int) -> Tensor:
    """Labels as kernels read them."""
    assert labels.dtype == torch.int64, f"labels are {labels.dtype}"
    assert labels.shape == (num_rows,), "one label per row"
    return labels.contiguous()


def _check(outside: int, vocab_size: int) -> None:
    if outside:
        raise IndexError(f"{outside} labels are out of range of a vocabulary of {vocab_size}")


# --------------------------------------------------------------------------- the head by tiles


def supports_head(hidden: Tensor, weight: Tensor) -> bool:
    """True if the operators take hidden states and a weight like these; contiguous or not."""
    sizes = hidden.shape[1] % 16 == 0 and hidden.dtype == weight.dtype == torch.bfloat16
    return sizes and runs(hidden) and is_plain(weight) and has_function("head_forward")


def _empty_losses(hidden: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    loss, nll, log_z = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
    return loss, nll, log_z


@operator("head_forward", _empty_losses)
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
    results = _empty_losses(hidden)
    _check(call("head_forward", *_inputs(hidden, weight, labels, smoothing), *results), len(weight))
    return results


def _empty_gradients(hidden: Tensor, weight: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """Empty results, of no numbers where they are not wanted."""
    want_hidden, want_weight = settings[-2:]
    of_weight = torch.empty(weight.shape if want_weight else (0,), dtype=torch.float32, device=weight.device)
    return (torch.empty_like(hidden) if want_hidden else hidden.new_empty(0)), of_weight


@operator("head_backward", _empty_gradients)
def head_backward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    smoothing: float,
    nll: Tensor,
    log_z: Tensor,
    want_hidden: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the sum of losses of rows, perhaps of some of those that `head_forward` had: of the hidden states,
    (num_rows, width) bf16, and of the weight, (vocab_size, width) fp32; without numbers where they are not wanted."""
    grads = _empty_gradients(hidden.contiguous(), weight, want_hidden, want_weight)
    wanted = grads[0] if want_hidden else None, grads[1] if want_weight else None
    call("head_backward", *_inputs(hidden, weight, labels, smoothing), nll.contiguous(), log_z.contiguous(), *wanted)
    return grads


def _inputs(hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float) -> list[Any]:
    """Arguments that both functions share."""
    assert hidden.shape[1] == weight.shape[1], (tuple(hidden.shape), tuple(weight.shape))
    sizes = len(hidden), hidden.shape[1], len(weight), smoothing, torch.get_num_threads()
    return [*sizes, hidden.contiguous(), weight.contiguous(), _readable(labels, len(hidden))]
