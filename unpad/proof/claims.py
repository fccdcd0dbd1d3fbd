"""Claims of the certificate that depend on what a model reads.

Each kind of input has a file of this folder, which `Model.claims` names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.models.contract import Model
from unpad.nn.precision import Precision
from unpad.proof.line import Line
from unpad.proof.measure import Outputs, Variant


@dataclass(frozen=True)
class Case:
    """A model under proof and its sequences.

    Args:
        model: in training's precision, in mode origin.
        alone: every sequence as a batch of its own, straight from the data.
        base: all of them in one run.
        packed: the same sequences as the data batches them.
        weights: of the loss terms.
    """

    model: Model
    alone: list[RaggedBatch]
    base: RaggedBatch
    packed: Variant
    weights: dict[str, float]
    precision: Precision
    device: torch.device


def no_lines(case: Case) -> list[Line]:
    """No further lines."""
    return []


@dataclass(frozen=True)
class Claims:
    """Functions of the certificate for models of one kind of input.

    Args:
        alone: the sequences of a flat run, each as a batch of its own.
        outputs: hidden states of every sequence of a batch.
        leaves: returns the batch with inputs that require gradients, and each such input with the sequence of each row.
        order: name of the line of `order_line`.
        order_line: later inputs never change an earlier output; for causal models.
        more_lines: further lines, at the end of the certificate.
    """

    alone: Callable[[RaggedBatch], list[RaggedBatch]]
    outputs: Outputs
    leaves: Callable[[Model, RaggedBatch], tuple[RaggedBatch, list[tuple[Tensor, Tensor]]]]
    order: str
    order_line: Callable[[Model, RaggedBatch], Line]
    more_lines: Callable[[Case], list[Line]] = no_lines


def claims_of(model: Model) -> Claims:
    """Import the claims of a model."""
    claims: Claims = import_module(f"unpad.proof.{model.claims}").CLAIMS
    return claims
