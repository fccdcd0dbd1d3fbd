"""Gradients of an update, and two ways to batch one that have the same."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.models.contract import Model
from unpad.training.step import accumulate


def gradients(model: Model, micros: Sequence[RaggedBatch]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients of every parameter, 0 where nothing reaches it, and the mean of every term that counts."""
    model.zero_grad()
    sums, counts = accumulate(model, micros, dict.fromkeys(model.weights, 1.0), "fp32")
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return grads, {name: float(value) / counts[name] for name, value in sums.items() if counts[name]}


def assert_same_update(
    model: Model, expected: Sequence[RaggedBatch], *others: Sequence[RaggedBatch], atol: float = 1e-10
) -> dict[str, Tensor]:
    """Other micro-batches of the same sequences have the gradients and terms of the expected ones; the gradients."""
    grads, terms = gradients(model, expected)
    for micros in others:
        other_grads, other_terms = gradients(model, micros)
        assert other_terms == pytest.approx(terms, abs=1e-10, rel=1e-10)
        for name, grad in grads.items():
            torch.testing.assert_close(other_grads[name], grad, rtol=1e-9, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    return grads
