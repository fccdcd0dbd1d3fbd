"""The plan: which sequences form each optimizer step and each micro-batch, and the fate of every token.

A plan is data made by a pure function. It does not know ranks: rank r of W takes micro-batches r, r + W, ... of a step.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import import_module

import numpy as np

from unpad.batching.grouping import Grouping, sum_runs
from unpad.batching.ledger import Ledger, entry
from unpad.batching.pieces import Pieces, TargetCount, account, check_lengths, cut_and_count
from unpad.recipes.training import PlanSettings


@dataclass(frozen=True, eq=False)
class Micro:
    """What one forward pass sees.

    Args:
        seq_ids: (num_seqs,) int64.
        starts, stops, first_target: (num_seqs,) int32, as in Pieces.
        pad_to: 0 is ragged; else every sequence is padded to it, a (batch, pad_to) rectangle.
        fill_to: 0, or the tokens of the flat run with the filler at its end.
        epoch_seed: seed and epoch, where whatever is drawn anew in every epoch begins.
    """

    seq_ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    first_target: np.ndarray
    pad_to: int
    fill_to: int
    epoch_seed: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False)
class Plan:
    """Pieces in order, cut into micro-batches and steps; offsets as in Grouping.

    Args:
        order: indices into pieces, (n,) int64; every piece once, except those of a last step left out.
        micro_offsets: (num_micros + 1,) int64 into order.
        step_offsets: (num_steps + 1,) int64 into the micro-batches.
        pad_to, fill_to: (num_micros,) int32, as in Micro.
        epoch_seed: as in Micro.
    """

    pieces: Pieces
    order: np.ndarray
    micro_offsets: np.ndarray
    step_offsets: np.ndarray
    pad_to: np.ndarray
    fill_to: np.ndarray
    ledger: Ledger
    strategy: str
    epoch_seed: tuple[int, int] = (0, 0)

    @property
    def num_steps(self) -> int:
        return len(self.step_offsets) - 1

    @property
    def num_micros(self) -> int:
        return len(self.micro_offsets) - 1

    def step(self, index: int) -> list[Micro]:
        """The micro-batches of one step, in order."""
        if not 0 <= index < self.num_steps:
            raise IndexError(f"step {index} of {self.num_steps}")
        micros = []
        for i in range(self.step_offsets[index], self.step_offsets[index + 1]):
            part = self.pieces.take(self.order[self.micro_offsets[i] : self.micro_offsets[i + 1]])
            pad_to, fill_to = int(self.pad_to[i]), int(self.fill_to[i])
            micros.append(
                Micro(part.seq_ids, part.starts, part.stops, part.first_target, pad_to, fill_to, self.epoch_seed)
            )
        return micros

    @property
    def micro_tokens(self) -> np.ndarray:
        """Real tokens per micro-batch, (num_micros,) int64."""
        return sum_runs(self.pieces.lengths[self.order], self.micro_offsets)

    @property
    def micro_cells(self) -> np.ndarray:
        """Tokens computed per micro-batch, real and padded, (num_micros,) int64."""
        padded = self.pad_to * np.diff(self.micro_offsets)
        return np.maximum(np.maximum(padded, self.fill_to), self.micro_tokens)

    @property
    def real_tokens(self) -> int:
        """Tokens shown, the context of overlapping windows included."""
        return int(self.micro_tokens.sum())

    @property
    def padded_tokens(self) -> int:
        """Tokens computed: real ones, padding and filler."""
        return int(self.micro_cells.sum())

    @property
    def pad_share(self) -> float:
        """Share of the computed tokens that is padding or filler; 0 for an empty plan."""
        cells = self.padded_tokens
        return 1 - self.real_tokens / cells if cells else 0.0

    def fingerprint(self) -> str:
        """sha256 of what the plan makes a run do; equal plans have equal fingerprints on every machine."""
        digest = hashlib.sha256(self.strategy.encode())
        pieces = self.pieces
        for array in (
            pieces.seq_ids, pieces.starts, pieces.stops, pieces.first_target,
            self.order, self.micro_offsets, self.step_offsets, self.pad_to, self.fill_to,
        ):  # fmt: skip
            digest.update(f"{len(array)},".encode())
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()


def plan(
    lengths: np.ndarray,
    settings: PlanSettings,
    *,
    seed: int,
    epoch: int,
    max_tokens: int | None = None,
    seq_ids: np.ndarray | None = None,
    targets: TargetCount | None = None,
) -> Plan:
    """Plan one epoch. Pure: equal arguments give an equal plan.

    Args:
        lengths: positions per sequence, indexed by sequence id, (num_sequences,) int.
        settings: the recipe's section; its strategy names the function that groups the pieces.
        max_tokens: the model's context; the smaller of it and settings.max_tokens holds.
        seq_ids: the sequences of this epoch, (n,) int, repeats allowed; None is every sequence once.
        targets: counts targets with loss inside spans; None says that every position is one. A sequence without
            positions is planned where this gives it a target.

    Raises:
        PlanError: the settings do not fit the lengths.
    """
    limits = [limit for limit in (settings.max_tokens, max_tokens) if limit is not None]
    settings = settings.at_epoch(epoch).model_copy(update={"max_tokens": min(limits, default=None)})
    lengths = check_lengths(lengths)
    pieces, counts, lost = cut_and_count(lengths, seq_ids, settings, targets)
    rng = np.random.default_rng([seed, epoch])
    strategy = import_module(f"unpad.batching.strategies.{settings.strategy}")
    grouping: Grouping = strategy.group(pieces.lengths, settings, rng)
    kept = pieces
    if settings.drop_last:
        grouping, left_out = _without_short_last_step(grouping, pieces.lengths, settings.tokens_per_step)
        gone = pieces.take(left_out)
        lost += entry("dropped", "last_step", (gone.stops - gone.first_target).sum(), gone.seq_ids)
        kept, counts = pieces.take(~left_out), counts[~left_out]
    ledger = lost + account(kept, counts, lengths, settings.overflow)
    assert ledger.total == int((lengths if seq_ids is None else lengths[seq_ids]).sum()), "the ledger does not add up"
    return Plan(pieces, *grouping, ledger, settings.strategy, (seed, epoch))


def _without_short_last_step(grouping: Grouping, lengths: np.ndarray, tokens: int) -> tuple[Grouping, np.ndarray]:
    """Leave out a last step that has room left in `tokens`; also return its pieces, (num_pieces,) bool."""
    order, micro_offsets, step_offsets, pad_to, fill_to = grouping
    left_out = np.zeros(len(lengths), bool)
    if len(step_offsets) > 1:
        micros = step_offsets[-2]
        last = order[micro_offsets[micros] :]
        # A step of whole sequences seldom reaches the number exactly: it is full when no other piece would fit.
        if lengths[last].sum() < tokens and lengths[last].sum() + lengths.min() <= tokens:
            left_out[last] = True
            kept = order[: micro_offsets[micros]]
            return Grouping(
                kept, micro_offsets[: micros + 1], step_offsets[:-1], pad_to[:micros], fill_to[:micros]
            ), left_out
    return grouping, left_out
