"""Forward and backward passes of an update in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.nn.draws import GeneratorState, SplitDraws
from unpad.nn.losses import Terms
from unpad.nn.precision import Precision, autocast
from unpad.processes.sums import GradientSum
from unpad.training.micro import MicroResult, joined
from unpad.training.room import Room, fits
from unpad.training.visual import visual_tokens


class HasLosses(Protocol):
    """Interface of a model to a pass: loss terms of a batch."""

    def losses(self, batch: RaggedBatch) -> Terms: ...


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of an update, and all that they need.

    Args:
        micros: micro-batches with their places in the update; None where a process computes one for the others' sake.
        loss: what the backward pass of a micro-batch begins with.
        seed_draws: seeds the random draws of the micro-batch at a place.
        scale: factor of the loss, which `sums` takes out again.
        sums: adds the gradients of micro-batches; None where autograd does.
        room: which micro-batches are computed in parts; None for none.
        counts_visual: whether results have the visual tokens of their micro-batches.
    """

    micros: Sequence[tuple[int | None, RaggedBatch]]
    loss: Callable[[Terms], Tensor]
    seed_draws: Callable[[int], None]
    precision: Precision
    scale: float = 1.0
    sums: GradientSum | None = None
    room: Room | None = None
    counts_visual: bool = False

    def one_by_one(self, model: HasLosses) -> dict[int, MicroResult]:
        """Add the gradients of all micro-batches to those of a model's parameters; return the results by place.

        Raises:
            DoesNotFitError: a pass has run out of memory; `.grad` is undefined then.
        """
        results = {}
        for number, batch in self.micros:
            if number is not None:
                self.seed_draws(number)
            result = self._compute(model, batch) if self.room is None else self._within(self.room, model, batch)
            if self.sums is not None:  # the parts of a micro-batch are one summand
                self.sums.take(self.scale)
            if number is not None:
                results[number] = result
        return results

    def _compute(self, model: HasLosses, batch: RaggedBatch) -> MicroResult:
        """Compute a batch forward and backward."""
        terms = self._terms(model, batch, nullcontext())
        self.loss(terms).backward()
        return self._result(model, batch, terms)

    def _within(self, room: Room, model: HasLosses, batch: RaggedBatch) -> MicroResult:
        """Compute a micro-batch in the parts that have room."""
        parts = room.parts(batch)
        if len(parts) == 1:
            return fits(batch, partial(self._compute, model, batch))
        state, draws = GeneratorState(batch.position_ids.device), SplitDraws()
        for part in parts if room.measures else ():
            with torch.no_grad():
                fits(part, partial(self._terms, model, part, draws.measure()))
        results = []
        for part in parts:
            state.restore()
            results.append(fits(part, partial(self._compute_part, model, part, draws.part())))
        return joined(results)

    def _compute_part(self, model: HasLosses, part: RaggedBatch, draws: AbstractContextManager[None]) -> MicroResult:
        """Compute a part forward and backward; it may have no targets."""
        terms = self._terms(model, part, draws)
        loss = self.loss(terms)
        if loss.requires_grad:
            loss.backward()
        return self._result(model, part, terms)

    def _terms(self, model: HasLosses, batch: RaggedBatch, draws: AbstractContextManager[None]) -> Terms:
        with autocast(self.precision, batch.position_ids.device), draws:
            return model.losses(batch)

    def _result(self, model: HasLosses, batch: RaggedBatch, terms: Terms) -> MicroResult:
        detached = {name: (total.detach(), count) for name, (total, count) in terms.items()}
        return MicroResult(detached, visual_tokens(model, batch) if self.counts_visual else {})
