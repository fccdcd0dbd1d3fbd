"""Loss terms of outputs and labels, {name: (sum, count)}.

A term is a sum over targets and their number, never a mean: `step.py` divides each sum once, by its count over the
whole step, and evaluation divides by the count over the whole data. No result therefore depends on how sequences were
batched.

In bf16 on a processor, targets that the model predicts with near certainty are left out of the backward pass of
`cross_entropy`: their gradient is below the precision's rounding (gradient filtering, Wijmans et al. 2024, arXiv
2411.09009, there of single numbers on a GPU). fp32 and fp64 leave out nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from unpad.nn.autograd import apply
from unpad.nn.linear import computing_copy, product
from unpad.nn.native import library
from unpad.nn.native.cross_entropy import cross_entropy_ as native_cross_entropy
from unpad.nn.native.cross_entropy import head_backward, head_forward, supports_head
from unpad.nn.precision import wide_dtype, widened
from unpad.nn.scope import Scope

Terms = dict[str, tuple[Tensor, int]]
_all_rows: Scope[bool] = Scope(False)

CHUNK_BYTES = 32 << 20  # see `chunk_bytes`
# Of an accelerator's memory, and at most: losses hold a few times the logits.
CARD_SHARE, CARD_BYTES = 1 / 32, 5 << 28
# Rows of zeros complete many targets to a multiple of this: matrix libraries prepare a kernel for every new number of
# rows, and batches rarely have equal numbers of targets.
ROUND_ROWS = 64
UNLIKELY = 80.0  # nats
# Logits that torch turns into losses and gradients at a time: few enough for a core's cache in fp32.
BLOCK_CELLS = 1 << 18
# In bf16 a target is left out of both products of the backward pass when the gradient of its logits is below this share
# of the root mean square over the targets; all that are left out have at most this share of the whole norm.
NEGLIGIBLE = 2.0**-8  # the spacing of bf16's numbers
MOST_KEPT = 7 / 8  # of the targets, above which all take part: copying the others would cost what it saves
LEAST_VOCAB = 1024  # below which the products are too small to gain


def cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropy of `hidden @ weight.T` against `labels`, computed chunk by chunk.

    The forward pass computes the gradient, so that nothing of size (targets, vocabulary) is kept.

    Args:
        hidden: (num_targets, dim), at target positions only; its dtype is the computing dtype.
        weight: (vocab_size, dim).
        labels: (num_targets,) int64.
        label_smoothing: share of each target spread evenly over the vocabulary (Szegedy et al. 2016, arXiv 1512.00567).

    Returns:
        The smoothed sum, with a gradient, and the plain sum of negative log-likelihoods, without.
        Both are scalars in nats, in fp32 or wider.
    """
    return apply(_CrossEntropy, hidden, weight, labels, label_smoothing)


def token_nll(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood of every target, (num_targets,) in nats, fp32 or wider; for evaluation, without gradient.

    Arguments as in `cross_entropy`.
    """
    low = computing_copy(weight, hidden.dtype)
    parts = [hidden.new_zeros(0, dtype=wide_dtype(hidden.dtype))]
    for x, y in _chunks(hidden, labels, weight.shape[0]):
        parts.append(_score(product(x, low)[: len(y)], y, 0.0, want_grad=False)[1])
    return torch.cat(parts)


def target_nll(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood of every target, (num_targets,) in nats, fp32 or wider, with a gradient.

    Where each target's gradient has a factor of its own, known only after the forward pass: the backward pass computes
    the logits again, so that nothing of size (targets, vocabulary) is kept. Arguments as in `cross_entropy`.
    """
    return apply(_TargetNll, hidden, weight, labels)


def chunk_bytes(memory: int | None) -> int:
    """Bytes of the logits of one chunk; (targets, vocabulary) never exists as a whole.

    Args:
        memory: bytes of the accelerator, free or not: what is free differs between a run and its continuation, and the
            gradient has other bits in other chunks. None on a processor, whose caches are small.
    """
    return CHUNK_BYTES if memory is None else min(int(memory * CARD_SHARE), CARD_BYTES)


def memory_of(device: torch.device) -> int | None:
    """Bytes of an accelerator's memory; None for a processor."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def chunk_rows(memory: int | None, itemsize: int, vocab_size: int) -> int:
    """Targets of one chunk, whose logits have this many bytes each; `memory` as in `chunk_bytes`."""
    return max(64, chunk_bytes(memory) // (itemsize * vocab_size) // ROUND_ROWS * ROUND_ROWS)


@contextmanager
def all_rows() -> Iterator[None]:
    """Leave no target out of the backward pass inside, in this thread; for comparing."""
    with _all_rows.of(True):
        yield


def _chunks(hidden: Tensor, labels: Tensor, vocab_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of hidden states and their labels; rows of zeros, whose logits and gradients are 0, may follow the last."""
    rows = chunk_rows(memory_of(hidden.device), hidden.itemsize, vocab_size)
    chunks = list(hidden.split(rows))
    if len(hidden) >= 16 * ROUND_ROWS and (missing := -len(hidden) % ROUND_ROWS):
        chunks[-1] = F.pad(chunks[-1], (0, 0, 0, missing))
    return zip(chunks, labels.split(rows), strict=True)


def _score(logits: Tensor, labels: Tensor, smoothing: float, want_grad: bool) -> tuple[Tensor, Tensor]:
    """Smoothed and plain loss of every row, both (rows,) in fp32 or wider.

    With `want_grad` the logits (rows, vocab_size) are overwritten with the gradient of the smoothed losses' sum.
    """
    if library.runs(logits):
        return native_cross_entropy(logits, labels, smoothing, want_grad)
    if _waits(logits):
        return _score_at_once(logits, labels, smoothing, want_grad)
    rows = max(1, BLOCK_CELLS // logits.shape[1])
    blocks = zip(logits.split(rows), labels.split(rows), strict=True)
    parts = [_score_block(block, y, smoothing, want_grad) for block, y in blocks]
    loss, nll = (torch.cat(column) for column in zip(*parts, strict=True))
    return loss, nll


def _waits(x: Tensor) -> bool:
    """True if reading a number of x waits for all that was launched before, as on an accelerator."""
    return x.device.type != "cpu"


def _score_at_once(logits: Tensor, labels: Tensor, smoothing: float, want_grad: bool) -> tuple[Tensor, Tensor]:
    """`_score` without a number that is read: no step depends on the losses, and none loses digits."""
    log_p, at_label = logits.log_softmax(-1, dtype=wide_dtype(logits.dtype)), labels[:, None]
    nll = -log_p.gather(1, at_label)[:, 0]
    loss = (1 - smoothing) * nll - smoothing * log_p.mean(-1) if smoothing else nll
    if want_grad:
        _put_gradient(logits, log_p.exp_(), at_label, smoothing)
    return loss, nll


def _score_block(logits: Tensor, labels: Tensor, smoothing: float, want_grad: bool) -> tuple[Tensor, Tensor]:
    wide, at_label = widened(logits), labels[:, None]
    p = wide.softmax(-1)
    nll = -p.gather(1, at_label)[:, 0].log()
    if bool((unlikely := nll > UNLIKELY).any()):  # the softmax lost digits of such a probability, or all
        nll[unlikely] = -wide[unlikely].log_softmax(-1).gather(1, at_label[unlikely])[:, 0]
    loss = nll
    if smoothing:
        log_z = nll + wide.gather(1, at_label)[:, 0]
        loss = (1 - smoothing) * nll + smoothing * (log_z - wide.mean(-1))
    if want_grad:
        _put_gradient(logits, p, at_label, smoothing)
    return loss, nll


def _put_gradient(logits: Tensor, p: Tensor, at_label: Tensor, smoothing: float) -> None:
    """Overwrite logits with their gradient: the softmax `p`, which is changed, minus the smoothed target."""
    if smoothing:
        p -= smoothing / p.shape[1]
    p.scatter_add_(1, at_label, p.new_full(at_label.shape, smoothing - 1))
    logits.copy_(p)


def _kept_rows(nll: Tensor, dtype: torch.dtype, vocab_size: int, smoothing: float) -> Tensor | None:
    """Rows of a chunk that the products of the backward pass take, int64 in order, or None for all.

    Only on the processor, where reading a number does not wait, and without smoothing, because its gradient is
    not small where the target is certain.

    Args:
        nll: negative log-likelihood of every row's target, (rows,).
        dtype: of the logits.
    """
    wide_enough = dtype == torch.bfloat16 and vocab_size >= LEAST_VOCAB
    if not wide_enough or smoothing or _waits(nll) or _all_rows.get():
        return None
    size = -torch.expm1(-nll)  # 1 - probability of the target; the gradient's norm is this to 1.42 times this
    negligible = size < NEGLIGIBLE * size.square().mean().sqrt()
    num = len(nll) - int(negligible.sum())
    num += -num % ROUND_ROWS
    return negligible.sort(stable=True).indices[:num].sort().values if num <= MOST_KEPT * len(nll) else None


def _at_once(
    hidden: Tensor, low: Tensor, labels: Tensor, smoothing: float, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Both sums of `cross_entropy` and its gradients, where wanted, without logits in memory; the weight's in fp32."""
    row_loss, row_nll, log_z = head_forward(hidden, low, labels, smoothing)
    grad_hidden: Tensor | None = None
    grad_weight: Tensor | None = None
    if any(wanted):
        kept = _kept_rows(row_nll, low.dtype, len(low), smoothing)
        rows = (hidden, labels, row_nll, log_z)
        x, y, nll, z = rows if kept is None else [row.index_select(0, kept) for row in rows]
        both = head_backward(x, low, y, smoothing, nll, z, *wanted)
        grad_hidden, grad_weight = (grad if want else None for grad, want in zip(both, wanted, strict=True))
        if kept is not None and grad_hidden is not None:
            grad_hidden = torch.zeros_like(hidden).index_copy_(0, kept, grad_hidden)
    return row_loss.sum(), row_nll.sum(), grad_hidden, grad_weight


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        wide = wide_dtype(hidden.dtype)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        low = computing_copy(weight, hidden.dtype)
        if supports_head(hidden, low):
            loss, nll, *gradients = _at_once(hidden, low, labels, smoothing, (need_hidden, need_weight))
            ctx.save_for_backward(*gradients)
            ctx.mark_non_differentiable(nll)
            return loss, nll
        grad_hidden = hidden.new_empty(len(hidden) + ROUND_ROWS, hidden.shape[1]) if need_hidden else None
        grad_weight: Tensor | None = None
        loss, nll = hidden.new_zeros((), dtype=wide), hidden.new_zeros((), dtype=wide)
        at = 0
        for x, y in _chunks(hidden, labels, weight.shape[0]):
            grad = x @ low.t()  # logits, (rows, vocab_size); _score puts their gradient in their place
            row_loss, row_nll = _score(grad[: len(y)], y, smoothing, need_hidden or need_weight)
            loss, nll = loss + row_loss.sum(), nll + row_nll.sum()
            kept = _kept_rows(row_nll, grad.dtype, grad.shape[1], smoothing) if need_hidden or need_weight else None
            if kept is not None:
                grad, x = grad.index_select(0, kept), x.index_select(0, kept)
            if grad_hidden is not None and kept is not None:
                grad_hidden[at : at + len(y)] = 0
                grad_hidden[at : at + len(y)].index_copy_(0, kept, grad @ low)
            elif grad_hidden is not None:
                torch.matmul(grad, low, out=grad_hidden[at : at + len(x)])
            if need_weight:
                part = grad.t() @ x
                # One chunk stays in low precision; several are summed in a wider one.
                grad_weight = part if grad_weight is None else grad_weight.to(wide).add_(part)
            at += len(y)
        if need_weight and grad_weight is None:
            grad_weight = torch.zeros_like(low)
        ctx.save_for_backward(None if grad_hidden is None else grad_hidden[: len(hidden)], grad_weight)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*(None if saved is None else saved * grads[0] for saved in ctx.saved_tensors), None, None)


class _TargetNll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        return token_nll(hidden, weight, labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        low = computing_copy(weight, hidden.dtype)
        grad_hidden = [hidden.new_zeros(0, hidden.shape[1])]
        grad_weight = torch.zeros_like(low, dtype=wide_dtype(hidden.dtype))
        at = 0
        for x, y in _chunks(hidden, labels, weight.shape[0]):
            grad = x @ low.t()  # logits, (rows, vocab_size); _score puts their gradient in their place
            _score(grad[: len(y)], y, 0.0, want_grad=True)
            grad[: len(y)] *= grads[0][at : at + len(y), None]
            if need_hidden:
                grad_hidden.append((grad @ low)[: len(y)])
            if need_weight:
                grad_weight += grad.t() @ x
            at += len(y)
        return torch.cat(grad_hidden) if need_hidden else None, grad_weight if need_weight else None, None
