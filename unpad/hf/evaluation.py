"""Evaluation on flat batches: the loss as the mean over all targets, and results as rows for a trainer's metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unpad.errors import RecipeError
from unpad.hf.attention import BOUNDARIES
from unpad.hf.loader import IGNORED


def is_mean_of_means(targets: np.ndarray, batch_size: int) -> bool:
    """True if the mean over rows of the means of their batches, as trainers compute it, is the mean over targets.

    Args:
        targets: of each row, (num_rows,) int64, in order.
    """
    starts = np.arange(0, len(targets), batch_size)
    rows = np.diff([*starts, len(targets)])
    return bool((np.add.reduceat(targets, starts) * len(targets) == rows * targets.sum()).all())


@dataclass
class MeanOverTargets:
    """Sum of losses and number of targets; the mean of the batches' means would depend on the batches."""

    total: float = 0.0
    num_targets: int = 0

    def add(self, mean: Tensor, num_targets: int) -> None:
        """Add a batch by its loss, the mean over its targets."""
        if num_targets:
            self.total += float(mean) * num_targets
            self.num_targets += num_targets

    @classmethod
    def of_parts(cls, parts: Sequence[Sequence[float]]) -> MeanOverTargets:
        """Sum of parts of a set: `total` and `num_targets` of each."""
        return cls(sum(total for total, _ in parts), int(sum(num for _, num in parts)))

    @property
    def mean(self) -> float:
        """In nats per target."""
        return self.total / self.num_targets


def as_rows(value: Any, bounds: Tensor, filler: float = IGNORED) -> Any:
    """Take apart what has an entry for every token of a flat batch.

    Args:
        value: a tensor (1, total_tokens, ...), or a tuple, list or mapping of such.
        bounds: (num_seqs + 1,) int, of the sequences.

    Returns:
        The same with tensors (num_seqs, longest, ...), filled up on the right, as Trainer fills them up.

    Raises:
        RecipeError: a tensor is not of that shape.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {name: as_rows(one, bounds, filler) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(as_rows(one, bounds, filler) for one in value)
    ends = bounds.tolist()
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[:2] != (1, ends[-1]):
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise RecipeError(
            f"metrics are computed of rows, and the model's output has {shape} for a flat batch of {ends[-1]} tokens",
            fix="name that output in keys_to_ignore_at_inference of the model's config",
        )
    parts = [value[0, start:stop] for start, stop in pairwise(ends)]
    return pad_sequence(parts, batch_first=True, padding_value=filler)


def inputs_as_rows(inputs: Mapping[str, Any], filler: int | None) -> dict[str, Any]:
    """The inputs of a flat batch as the padded rows of its sequences, with their `attention_mask`.

    Args:
        filler: token that fills rows up; None for -100.
    """
    bounds = inputs["cu_seq_lens_q"]
    rows: dict[str, Any] = {}
    for name, value in inputs.items():
        if name in (*BOUNDARIES, "position_ids"):
            continue
        fill = IGNORED if name == "labels" or (name == "input_ids" and filler is None) else filler
        rows[name] = as_rows(value, bounds, fill if name in ("labels", "input_ids") and fill is not None else 0)
    rows["attention_mask"] = as_rows(torch.ones_like(inputs["input_ids"]), bounds, 0)
    return rows
