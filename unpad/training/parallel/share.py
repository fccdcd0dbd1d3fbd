"""The share of an update that one process computes: its micro-batches, their random draws, and sums over all
processes."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from unpad.batching.balance import assign, micro_cost
from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Micro
from unpad.models.contract import Trainable
from unpad.nn.draws import draw
from unpad.processes.group import Group
from unpad.processes.sums import GradientSum
from unpad.training.memory import Room
from unpad.training.parallel.parallelism import ONE_PROCESS, Lockstep, Parallelism
from unpad.training.passes import MicroResult


@dataclass(frozen=True)
class MicroCounts:
    """Counts of one micro-batch.

    Args:
        sequences, tokens: counts of the corpus, without the filler that completes a row.
        padded_tokens: computed tokens, real ones included.
        num_targets: labels that count.
        terms: targets of every loss term.
    """

    sequences: int
    tokens: int
    padded_tokens: int
    num_targets: int
    terms: dict[str, int]


def count_micro(model: Trainable, batch: RaggedBatch) -> MicroCounts:
    """Count one micro-batch."""
    return MicroCounts(*batch.num_real, batch.total_tokens, batch.num_targets, model.count_targets(batch))


def counts_to_json(
    model: Trainable, micros: Sequence[RaggedBatch], numbers: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Counts of this process's micro-batches by place, to send to the others."""
    return {number: asdict(count_micro(model, batch)) for number, batch in zip(numbers, micros, strict=True)}


def counts_of_all(of_processes: Sequence[dict[int, dict[str, Any]]]) -> list[MicroCounts]:
    """Counts of all micro-batches in the order of the update.

    Args:
        of_processes: `counts_to_json` of all processes.
    """
    rows = {int(number): MicroCounts(**row) for counts in of_processes for number, row in counts.items()}
    return [rows[number] for number in sorted(rows)]


@dataclass(frozen=True)
class Share:
    """The part of an update that this process computes.

    Args:
        numbers: places of its micro-batches in the update, ascending.
        counts: of all micro-batches of the update, in its order.
        seed: (seed, step) of the draws of the update; None takes a seed from torch's generator.
        sums: adds gradients over micro-batches and processes; None where autograd adds those of one process.
        lockstep: None where every process computes its micro-batches by itself.
        room: cuts micro-batches that do not fit into memory; None if these end the run.
    """

    numbers: Sequence[int]
    counts: Sequence[MicroCounts]
    seed: tuple[int, int] | None = None
    parallelism: Parallelism = ONE_PROCESS
    sums: GradientSum | None = None
    lockstep: Lockstep | None = None
    room: Room | None = None

    @property
    def group(self) -> Group:
        return self.parallelism.group

    @property
    def num_targets(self) -> int:
        """Labels that count, of the whole update."""
        return sum(micro.num_targets for micro in self.counts)

    @property
    def is_uncut(self) -> bool:
        """True if micro-batches stay whole because other processes wait for gradients or passes of this one."""
        return self.room is None and self.group.size > 1

    def total(self, term: str) -> int:
        """Targets of a loss term in the whole update."""
        return sum(micro.terms[term] for micro in self.counts)

    def passes(self, micros: Sequence[RaggedBatch], weights: Iterable[str]) -> Iterator[tuple[int | None, RaggedBatch]]:
        """Micro-batches of this process with targets of these terms, by place; in lockstep also its other micro-batches
        and empty ones, without a place.

        Args:
            micros: of this process, as `numbers`.
        """
        names, numbered = list(weights), list(zip(self.numbers, micros, strict=True))
        if self.lockstep is not None:  # all wait for the slowest of a pass: the largest ones go together
            numbered.sort(key=lambda entry: -self.counts[entry[0]].padded_tokens)
        for number, batch in numbered:
            if any(self.counts[number].terms[name] for name in names):
                yield number, batch.numbered(sum(micro.sequences for micro in self.counts[:number]))
            elif self._has_passes(names):
                yield None, batch
        if self.lockstep is not None and self._has_passes(names):
            yield from ((None, self.lockstep.empty) for _ in range(len(micros), self.lockstep.num_passes))

    def _has_passes(self, names: Sequence[str]) -> bool:
        """True if all processes compute every pass; False for an update without targets."""
        return self.lockstep is not None and any(self.total(name) for name in names)

    def draw_seed(self) -> int:
        """Seed of the draws of the update."""
        return draw() if self.seed is None else step_seed(*self.seed)

    @contextmanager
    def given_up_on_error(self) -> Iterator[None]:
        """Abandon the sums if the block raises, so that no process waits for this one."""
        try:
            yield
        except BaseException:
            if self.sums is not None:
                self.sums.give_up()
            raise

    def to_json(self, results: dict[int, MicroResult]) -> list[Any] | None:
        """Message to the others: results of this process's micro-batches by place, parameters with a gradient as bits
        of a hexadecimal number, and the bound of `room`."""
        if self.group.size == 1:
            return None
        used = f"{sum(1 << index for index in self.sums.used) if self.sums is not None else 0:x}"
        learnt = None if self.room is None else [self.room.most, self.room.messages]
        return [{number: result.to_json() for number, result in results.items()}, used, learnt]

    def of_all(self, local: dict[int, MicroResult], of_processes: Sequence[Any]) -> list[MicroResult]:
        """Results of all micro-batches in the order of the update; `.grad` then holds the sums over all processes.

        Args:
            of_processes: `to_json` of all processes.
        """
        used = set() if self.sums is None else set(self.sums.used)
        results = local
        if self.group.size > 1:
            results = {
                int(number): MicroResult.from_json(row) for rows, _, _ in of_processes for number, row in rows.items()
            }
            bits = reduce(or_, (int(digits, 16) for _, digits, _ in of_processes))
            used = {index for index in range(bits.bit_length()) if bits >> index & 1}
            if self.room is not None:
                self.room.agree([learnt for *_, learnt in of_processes])
        if self.sums is not None:
            self.sums.finish(self.group, used)
        return [results[number] for number in sorted(results)]


def whole_share(model: Trainable, micros: Sequence[RaggedBatch]) -> Share:
    """The share of a process that computes all micro-batches of an update."""
    return Share(range(len(micros)), [count_micro(model, batch) for batch in micros])


def step_seed(seed: int, step: int) -> int:
    """Seed of the random draws of a step."""
    return int.from_bytes(hashlib.blake2b(f"{seed},{step}".encode(), digest_size=7).digest(), "little")


def own_numbers(
    micros: Sequence[Micro], group: Group, cells_per_token: float, attended: np.ndarray | None = None
) -> list[int]:
    """Places of the micro-batches of an update that this process computes, assigned by cost as in
    `batching.shares.assign`.

    Args:
        cells_per_token, attended: as in `micro_cost`.
    """
    if group.size == 1:
        return list(range(len(micros)))
    return assign([micro_cost(micro, cells_per_token, attended) for micro in micros], group.size)[group.rank]
