"""Forward and backward passes of an update in one process, and the visual tokens that they read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.errors import is_memory_error
from unpad.models.contract import PrunesTokens, Trainable
from unpad.nn.draws import seed_generator, seeded
from unpad.nn.losses import Terms
from unpad.nn.precision import Precision, autocast
from unpad.processes.sums import GradientSum
from unpad.training.memory import DoesNotFitError, Room


def visual_tokens(model: object, batch: RaggedBatch) -> dict[str, Tensor]:
    """Visual tokens of every sample with images of a micro-batch, after the model's pass over it: (num_samples,) fp32
    by name; models without visual tokens have none."""
    if not isinstance(model, PrunesTokens) or batch.media is None or batch.media_seqs is None:
        return {}
    lengths = batch.media.layout.lengths().float()
    patches = lengths.new_zeros(batch.num_seqs).index_add_(0, batch.media_seqs, lengths)
    columns = {"visual_tokens": patches}
    columns |= {f"kept_block_{block}": expected for block, expected in enumerate(model.expected)}
    return {name: values.detach()[patches > 0] for name, values in columns.items()}


def visual_figures(columns: dict[str, Tensor]) -> dict[str, float]:
    """Mean, minimum and maximum per sample, for the patches of its images and for the tokens that entered each block.

    In soft removal each token counts by its probability of being kept.

    Args:
        columns: of a whole step, as of `visual_tokens`.
    """
    figures: dict[str, float] = {}
    for name, values in columns.items():
        if values.numel():
            figures |= {
                f"{name}_mean": float(values.double().mean()),
                f"{name}_min": float(values.min()),
                f"{name}_max": float(values.max()),
            }
    return figures


@dataclass(frozen=True)
class MicroResult:
    """Measurements of one micro-batch in training.

    Args:
        terms: sum and count of every loss term; the sums are detached.
        visual: see `visual_tokens`.
    """

    terms: Terms
    visual: dict[str, Tensor]

    def to_json(self) -> list[Any]:
        """JSON values that keep every bit."""
        terms = {name: [float(total), str(total.dtype), count] for name, (total, count) in self.terms.items()}
        return [terms, {name: values.tolist() for name, values in self.visual.items()}]

    @classmethod
    def from_json(cls, values: list[Any]) -> "MicroResult":
        """Read back `to_json`."""
        terms, visual = values
        sums = {
            name: (torch.tensor(total, dtype=getattr(torch, dtype.removeprefix("torch."))), count)
            for name, (total, dtype, count) in terms.items()
        }
        return cls(sums, {name: torch.tensor(column) for name, column in visual.items()})


def joined(parts: Sequence[MicroResult]) -> MicroResult:
    """Result of a micro-batch from those of its parts, or of a step from those of its micro-batches, in their order."""
    if len(parts) == 1:
        return parts[0]
    terms: Terms = {}
    columns: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, (total, count) in part.terms.items():
            before = terms.get(name)
            terms[name] = (total, count) if before is None else (before[0] + total, before[1] + count)
        for name, values in part.visual.items():
            columns.setdefault(name, []).append(values)
    return MicroResult(terms, {name: torch.cat(values) for name, values in columns.items()})


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of an update, and everything they need.

    Args:
        micros: micro-batches with their places in the update; place None for one that only keeps the other processes in
            step.
        loss: scalar from which the backward pass of a micro-batch starts.
        seed: of the random draws of the update.
        scale: factor of the loss, which `sums` takes out again.
        sums: adds the gradients of micro-batches; None where autograd does.
        rounded: whether `sums` rounds, which it must if the update has several micro-batches.
        room: which micro-batches are computed in parts; None for none.
    """

    micros: Sequence[tuple[int | None, RaggedBatch]]
    loss: Callable[[Terms], Tensor]
    seed: int
    precision: Precision
    scale: float = 1.0
    sums: GradientSum | None = None
    rounded: bool = False
    room: Room | None = None

    def run(self, model: Trainable) -> dict[int, MicroResult]:
        """Add the gradients of all micro-batches to those of a model's parameters; return the results by place.

        Raises:
            DoesNotFitError: a pass ran out of memory and can be cut; `.grad` is then undefined.
        """
        if self.sums is not None:
            self.sums.begin(rounded=self.rounded, takes=len(self.micros))
        results = {}
        for number, batch in self.micros:
            if number is not None:  # for layers that draw from torch's generator
                seed_generator(self.seed + number)
            parts = [batch] if self.room is None else self.room.parts(batch)
            result = joined([self._pass(model, part, is_part=len(parts) > 1) for part in parts])
            if self.sums is not None:  # the parts of a micro-batch are one summand
                self.sums.take(self.scale)
            if number is not None:
                results[number] = result
        return results

    def _pass(self, model: Trainable, batch: RaggedBatch, *, is_part: bool) -> MicroResult:
        """Compute a batch forward and backward.

        Args:
            is_part: whether it is a part of a micro-batch, which may have no targets.

        Raises:
            DoesNotFitError: it ran out of memory. The original error is released first, as its frames hold tensors.
        """
        try:
            with autocast(self.precision, batch.position_ids.device), seeded(self.seed):
                terms = model.losses(batch)
            loss = self.loss(terms)
            if not is_part or loss.requires_grad:
                loss.backward()
            detached = {name: (total.detach(), count) for name, (total, count) in terms.items()}
            return MicroResult(detached, visual_tokens(model, batch))
        except (MemoryError, RuntimeError) as error:
            if self.room is None or not is_memory_error(error):
                raise
            reason = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        raise DoesNotFitError(batch, reason)
