"""The share of an update that one process computes: its micro-batches, their random draws, and sums over all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Micro
from unpad.batching.shares import assign, micro_cost
from unpad.nn.losses import Terms
from unpad.processes.fast_sums import FastSum
from unpad.processes.group import ALONE, Group
from unpad.processes.sums import ExactSum, GradientSum


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


@dataclass(frozen=True)
class Lockstep:
    """Passes over the micro-batches of an update that all processes compute together, as a divided model needs it.

    Args:
        num_passes: of every process.
        empty: a batch without sequences, for those of a process beyond its micro-batches.
    """

    num_passes: int
    empty: RaggedBatch


@dataclass(frozen=True)
class Share:
    """The part of an update that this process computes.

    Args:
        numbers: places of its micro-batches in the update, ascending.
        counts: of all micro-batches of the update, in its order.
        seed: (seed, step) of the draws of the update; None leaves the generator as it is.
        sums: adds gradients over micro-batches and processes; None where autograd adds those of one process.
        lockstep: None where every process computes its micro-batches by itself.
    """

    numbers: Sequence[int]
    counts: Sequence[MicroCounts]
    seed: tuple[int, int] | None = None
    group: Group = ALONE
    sums: GradientSum | None = None
    lockstep: Lockstep | None = None

    @property
    def num_targets(self) -> int:
        """Labels that count, of the whole update."""
        return sum(micro.num_targets for micro in self.counts)

    def total(self, term: str) -> int:
        """Targets of a loss term in the whole update."""
        return sum(micro.terms[term] for micro in self.counts)

    def passes(self, micros: Sequence[RaggedBatch], weights: Iterable[str]) -> Iterator[tuple[int | None, RaggedBatch]]:
        """Micro-batches of this process with targets of these terms, by place; in lockstep the others too, and empty
        ones, all without a place.

        Args:
            micros: of this process, as `numbers`.
        """
        names, own = list(weights), list(zip(self.numbers, micros, strict=True))
        if self.lockstep is not None:  # all wait for the dearest of a pass: the processes' largest go together
            own.sort(key=lambda one: -self.counts[one[0]].padded_tokens)
        for number, batch in own:
            if any(self.counts[number].terms[name] for name in names):
                yield number, batch
            elif self._has_passes(names):
                yield None, batch
        if self.lockstep is not None and self._has_passes(names):
            yield from ((None, self.lockstep.empty) for _ in range(len(micros), self.lockstep.num_passes))

    def _has_passes(self, names: Sequence[str]) -> bool:
        """True if all processes compute every pass; none does in an update without targets."""
        return self.lockstep is not None and any(self.total(name) for name in names)

    def seed_draws(self, number: int) -> None:
        """Seed the draws of a micro-batch by its place in the update. The first goes on with the generator that the
        update has begun with, which has its seed."""
        if self.seed is not None and (number > 0 or self.lockstep is not None):
            torch.manual_seed(step_seed(*self.seed, number))

    @contextmanager
    def given_up_on_error(self) -> Iterator[None]:
        """Give the sums up where the block raises, so that no process waits for those of this one."""
        try:
            yield
        except BaseException:
            if self.sums is not None:
                self.sums.give_up()
            raise

    def to_json(self, own: dict[int, MicroResult]) -> list[Any] | None:
        """Results of this process's micro-batches by place, and which parameters have a gradient, for the others."""
        if self.group.size == 1:
            return None
        used = sorted(self.sums.used) if self.sums is not None else []
        return [{number: result.to_json() for number, result in own.items()}, used]

    def of_all(self, own: dict[int, MicroResult], told: Sequence[Any]) -> list[MicroResult]:
        """Results of all micro-batches in the order of the update; `.grad` then holds the sums over all processes.

        Args:
            told: `to_json` of all processes.
        """
        used = set() if self.sums is None else set(self.sums.used)
        results = own
        if self.group.size > 1:
            results = {int(number): MicroResult.from_json(row) for rows, _ in told for number, row in rows.items()}
            used = used.union(*(indices for _, indices in told))
        if self.sums is not None:
            self.sums.finish(self.group, used)
        return [results[number] for number in sorted(results)]


def whole(model: CountsTargets, micros: Sequence[RaggedBatch]) -> Share:
    """The share of a process that computes all micro-batches of an update."""
    return Share(range(len(micros)), [count_micro(model, batch) for batch in micros])


def step_seed(seed: int, step: int, number: int = 0) -> int:
    """Seed of the random draws of one micro-batch of a step; that of the first is the seed of the step."""
    text = f"{seed},{step}" if number == 0 else f"{seed},{step},{number}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def gradient_sum(group: Group, kind: str, parameters: Sequence[nn.Parameter]) -> GradientSum | None:
    """The sum that a recipe's `train.sums` names; None where autograd adds the gradients of one process."""
    if kind == "exact":
        return ExactSum(parameters)
    return FastSum(parameters, group) if group.size > 1 else None


def own_numbers(
    micros: Sequence[Micro], group: Group, cells_per_token: float, attended: np.ndarray | None = None
) -> list[int]:
    """Places of the micro-batches of an update that this process computes, by cost; as `batching.shares.assign`.

    Args:
        cells_per_token, attended: as in `micro_cost`.
    """
    if group.size == 1:
        return list(range(len(micros)))
    return assign([micro_cost(micro, cells_per_token, attended) for micro in micros], group.size)[group.rank]


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
