"""Cross-entropy at targets with what SFTTrainer logs of each: entropy, and whether it is the likeliest token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unpad.nn.autograd import apply
from unpad.nn.linear import computing_copy
from unpad.nn.precision import wide_dtype

CHUNK_BYTES = 32 << 20  # of the logits of one chunk; (targets, vocabulary) never exists as a whole
BLOCK_CELLS = 1 << 18  # logits that are scored at a time, few enough for a core's cache


class Scored(NamedTuple):
    """Scores of targets.

    Args:
        total: sum of the negative log-likelihoods, a scalar in nats, with a gradient.
        nll, entropy: of every target, (num_targets,) in nats, without.
        is_top1: (num_targets,) bool.
    """

    total: Tensor
    nll: Tensor
    entropy: Tensor
    is_top1: Tensor


def scored_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Scored:
    """Score targets by `hidden @ weight.T`, chunk by chunk; the forward pass computes the gradient.

    Args:
        hidden: (num_targets, dim), in the computing dtype.
        weight: (vocab_size, dim).
        labels: (num_targets,) int64.
    """
    return Scored(*apply(_Scored, hidden, weight, labels))


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        wide = wide_dtype(hidden.dtype)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        low = computing_copy(weight, hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if need_weight else None
        rows = max(64, CHUNK_BYTES // (hidden.itemsize * len(weight)))
        parts = []
        for start in range(0, len(hidden), rows):
            span = slice(start, start + rows)
            logits = hidden[span] @ low.t()
            parts.append(_score_(logits, labels[span], need_hidden or need_weight))
            if grad_hidden is not None:
                torch.matmul(logits, low, out=grad_hidden[span])
            if grad_weight is not None and wide == logits.dtype:
                grad_weight.addmm_(logits.t(), hidden[span])
            elif grad_weight is not None:
                grad_weight += logits.t() @ hidden[span]
        nll, entropy, is_top1 = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(nll, entropy, is_top1)
        return nll.sum(), nll, entropy, is_top1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*(None if saved is None else saved * grads[0] for saved in ctx.saved_tensors), None)


def _score_(logits: Tensor, labels: Tensor, want_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Negative log-likelihood, entropy and rank of every row; logits (rows, vocab_size) become their sum's gradient."""
    rows = max(1, BLOCK_CELLS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    parts = []
    for own, label in zip(logits.split(rows), labels.split(rows), strict=True):
        x = own.to(wide_dtype(own.dtype))
        largest, place = x.max(-1)
        p = (x - largest[:, None]).exp_()
        total = p.sum(-1)
        log_z = largest + total.log()
        p /= total[:, None]
        nll = log_z - x.gather(1, label[:, None])[:, 0]
        parts.append((nll, log_z - torch.linalg.vecdot(p, x), place == label))
        if want_grad:
            p.scatter_add_(1, label[:, None], p.new_full((len(p), 1), -1))
            own.copy_(p)
    nll, entropy, is_top1 = (torch.cat(column) for column in zip(*parts, strict=True))
    return nll, entropy, is_top1
