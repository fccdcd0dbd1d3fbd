"""Outputs and labels -> named terms {name: (sum, count)}.

A term is a sum over targets and the number of those targets, never a mean: `step.py` divides each sum once, by its
count over the whole optimizer step, and evaluation divides by the count over the whole data. That is why no number
depends on how sequences were batched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Terms = dict[str, tuple[Tensor, int]]

# Logits of one chunk take this many cells; (targets, vocabulary) never exists as a whole.
CHUNK_CELLS = 1 << 22


def cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropy of `hidden @ weight.T + bias` against `labels`, made chunk by chunk.

    The gradient is formed in the forward pass, so nothing of size (targets, vocabulary) is kept.

    Args:
        hidden: (num_targets, dim), at target positions only.
        weight: (vocab_size, dim) of the same dtype.
        bias: (vocab_size,) or None.
        labels: (num_targets,) int64.
        label_smoothing: share of each target spread evenly over the vocabulary (Szegedy et al. 2016, arXiv 1512.00567).

    Returns:
        The smoothed sum, which has a gradient, and the plain sum of negative log-likelihoods, which has none.
        Both are scalars in nats, in fp32 or wider.
    """
    return _CrossEntropy.apply(hidden, weight, bias, labels, label_smoothing)


def token_nll(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """Negative log-likelihood of every target, (num_targets,) in nats, fp32 or wider; for evaluation, without gradient.

    Arguments as in `cross_entropy`.
    """
    rows = max(64, CHUNK_CELLS // weight.shape[0])
    wide = torch.promote_types(hidden.dtype, torch.float32)
    parts = [hidden.new_zeros(0, dtype=wide)]
    for x, y in zip(hidden.split(rows), labels.split(rows), strict=True):
        logits = (x @ weight.t()).to(wide)
        if bias is not None:
            logits += bias
        parts.append(logits.logsumexp(-1) - logits.gather(1, y[:, None])[:, 0])
    return torch.cat(parts)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if need_bias and bias is not None else None
        loss, nll = hidden.new_zeros((), dtype=wide), hidden.new_zeros((), dtype=wide)
        vocab_size = weight.shape[0]
        rows = max(64, CHUNK_CELLS // vocab_size)
        for x, y, at in zip(hidden.split(rows), labels.split(rows), range(0, len(labels), rows), strict=False):
            logits = (x @ weight.t()).to(wide)  # (rows, vocab_size)
            if bias is not None:
                logits += bias
            log_z = logits.logsumexp(-1, keepdim=True)
            chunk_nll = (log_z[:, 0] - logits.gather(1, y[:, None])[:, 0]).sum()
            nll += chunk_nll
            loss += (1 - smoothing) * chunk_nll
            if smoothing:
                loss += smoothing * (log_z[:, 0] - logits.mean(-1)).sum()
            if not (need_hidden or need_weight or need_bias):
                continue
            grad = logits.sub_(log_z).exp_()  # softmax, then minus the smoothed target
            if smoothing:
                grad -= smoothing / vocab_size
            grad.scatter_add_(1, y[:, None], grad.new_full((len(y), 1), smoothing - 1))
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            low = grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.matmul(low, weight, out=grad_hidden[at : at + len(y)])
            if grad_weight is not None:
                grad_weight += low.t() @ x
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            None if grad is None else (grad * grads[0]).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None)
