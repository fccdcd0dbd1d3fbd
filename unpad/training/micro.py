"""Counts and results of one micro-batch, as processes tell them to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.nn.losses import Terms


@dataclass(frozen=True)
class MicroCounts:
    """Counts of one micro-batch.

    Args:
        sequences, tokens: of the corpus, without the filler that completes a row.
        padded_tokens: computed tokens, real ones included.
        num_targets: labels that count.
        terms: targets of every loss term.
    """

    sequences: int
    tokens: int
    padded_tokens: int
    num_targets: int
    terms: dict[str, int]


class CountsTargets(Protocol):
    """Interface of a model that counts the targets of its loss terms."""

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]: ...


def count_micro(model: CountsTargets, batch: RaggedBatch) -> MicroCounts:
    """Count one micro-batch."""
    lengths = batch.layout.lengths()
    real = torch.ones_like(lengths, dtype=torch.bool) if batch.seq_ids is None else batch.seq_ids >= 0
    sequences, tokens = int(real.sum()), int(lengths[real].sum())
    return MicroCounts(sequences, tokens, batch.total_tokens, batch.num_targets, model.count_targets(batch))


@dataclass(frozen=True)
class MicroResult:
    """Measurements of one micro-batch in training.

    Args:
        terms: sum and count of every loss term; the sums are detached.
        visual: as of `visual_tokens`.
    """

    terms: Terms
    visual: dict[str, Tensor]

    def to_json(self) -> list[Any]:
        """JSON values that keep every bit."""
        terms = {name: [float(total), str(total.dtype), count] for name, (total, count) in self.terms.items()}
        return [terms, {name: values.tolist() for name, values in self.visual.items()}]

    @classmethod
    def from_json(cls, values: list[Any]) -> MicroResult:
        """Read back `to_json`."""
        terms, visual = values
        sums = {
            name: (torch.tensor(total, dtype=getattr(torch, dtype.removeprefix("torch."))), count)
            for name, (total, dtype, count) in terms.items()
        }
        return cls(sums, {name: torch.tensor(column) for name, column in visual.items()})


def joined(parts: Sequence[MicroResult]) -> MicroResult:
    """Result of a micro-batch from those of its parts, in their order."""
    terms: Terms = {}
    columns: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, (total, count) in part.terms.items():
            before = terms.get(name)
            terms[name] = (total, count) if before is None else (before[0] + total, before[1] + count)
        for name, values in part.visual.items():
            columns.setdefault(name, []).append(values)
    return MicroResult(terms, {name: torch.cat(values) for name, values in columns.items()})


def counts_to_json(
    model: CountsTargets, micros: Sequence[RaggedBatch], numbers: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Counts of this process's micro-batches by place, for the others."""
    return {number: asdict(count_micro(model, batch)) for number, batch in zip(numbers, micros, strict=True)}


def counts_of_all(told: Sequence[dict[int, dict[str, Any]]]) -> list[MicroCounts]:
    """Counts of all micro-batches in the order of the update.

    Args:
        told: `counts_to_json` of all processes.
    """
    rows = {int(number): MicroCounts(**row) for own in told for number, row in own.items()}
    return [rows[number] for number in sorted(rows)]
