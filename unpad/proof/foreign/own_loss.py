"""A loss or step of a trainer's own: its value on sequences alone, and whether batches alone make it wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from unpad.proof.foreign.first_update import ForeignTrainer, TrainerStep, take_step
from unpad.proof.foreign.judge import raise_memory
from unpad.proof.foreign.known import Batch
from unpad.proof.foreign.measure import UpdateResults
from unpad.proof.foreign.targets import logits_noted
from unpad.proof.foreign.update import IGNORE, LABELS, Known, Update, read_batch, read_update

FITS = 1e-5  # relative difference of two losses that are the same
MORE = 7  # cells of padding that are added to a row
NO_MEAN = "{} is a loss of the trainer's own, and no mean over targets"
OWN_STEP = (
    "training_step makes a gradient of its own, which of several rows is not the sum of theirs: there is none to "
    "compare with"
)


def alone_by_trainer(
    trainer: ForeignTrainer, alone: Sequence[Batch], weights: Sequence[float], logits: list[Tensor], accumulation: int
) -> tuple[UpdateResults, list[float]]:
    """The trainer's own loss of every sequence as an update of its own: their weighted sum, and each loss.

    Args:
        alone: the batch of each sequence with a target.
    """
    gradient: dict[str, Tensor] = {}
    losses = list[float]()
    for batch, weight in zip(alone, weights, strict=True):
        step = _step_alone(trainer, batch, accumulation)
        losses.append(step.loss)
        for name, value in step.gradient.items():
            gradient[name] = gradient[name] + weight * value if name in gradient else weight * value
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    return UpdateResults(logits, total, gradient, sum(losses) / max(len(losses), 1)), losses


def is_mean_of_means(update: Update, losses: Mapping[int, float], loss: float) -> bool:
    """True if a loss is that of its micro-batches, each a mean over its targets, by their number or not divided by it.

    A mean over sequences is none.

    Args:
        losses: of the sequences alone, by the number of the piece.
    """
    if _same(loss, sum(losses.values()) / len(losses)):
        return False
    means = list[float]()
    for index in range(len(update.batches)):
        pieces = [piece for piece, _, _ in update.places(index) if piece in losses]
        counts = [sum(label != IGNORE for label in update.labels_of(update.pieces[piece])) for piece in pieces]
        shares = [losses[piece] * count for piece, count in zip(pieces, counts, strict=True)]
        means += [sum(shares) / sum(counts)] if pieces else []
    num, mean = len(means), sum(means) / max(len(means), 1)
    return num > 1 and any(_same(loss, factor * mean) for factor in (1, num, 1 / num))


def counts_padding(trainer: ForeignTrainer, batch: Batch) -> bool:
    """True if more masked padding changes the loss of a row."""
    shape = read_batch(batch).ids.shape
    if not isinstance(batch.get("attention_mask"), Tensor):
        return False

    def wide(name: str, value: object) -> object:
        if not isinstance(value, Tensor) or value.shape[:2] != shape:
            return value
        further = (0, 0) * (value.dim() - 2)
        return nn.functional.pad(value, (*further, 0, MORE), value=IGNORE if name in LABELS else 0)

    try:
        wider = _step_alone(trainer, {name: wide(name, value) for name, value in batch.items()}).loss
    except Exception as error:  # a loss that takes no other padding
        raise_memory(error)
        return False
    return not _same(wider, _step_alone(trainer, batch).loss)


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= FITS * abs(other)


def _step_alone(trainer: ForeignTrainer, batch: Batch, accumulation: int = 1) -> TrainerStep:
    """A batch as an update of its own, with a setting of the accumulation."""
    before = trainer.args.gradient_accumulation_steps
    trainer.args.gradient_accumulation_steps = accumulation
    try:
        batches, num_items = trainer.get_batch_samples(iter([dict(batch)]), 1, trainer.args.device)
        return take_step(trainer, batches, num_items)
    finally:
        trainer.args.gradient_accumulation_steps = before


def pull(
    trainer: ForeignTrainer, alone: Callable[[Known], Batch], ids: list[int], labels: list[int], given: list[int]
) -> Tensor | None:
    """Gradient of the trainer's loss of a sequence alone with respect to its logits; see `targets.Pull`."""
    batch = alone(Known(ids, labels))
    read = read_batch(batch)
    places = read_update([read], [Known(ids, labels)]).places(0)
    if len(places) != 1:
        return None
    _, row, cells = places[0]
    exchanged = dict(batch)
    for name, value in read.labels.items():
        shift = int(name == "shift_labels")
        values = torch.tensor(given[shift:] + [IGNORE] * shift).to(value)
        made = value.clone().reshape(read.ids.shape)
        made[row, cells] = torch.where(made[row, cells] == IGNORE, made[row, cells], values)
        exchanged[name] = made.reshape(value.shape)
    with logits_noted(trainer.model) as noted:
        _step_alone(trainer, exchanged)
    pulls = [logits.grad for logits in noted if logits.grad is not None and logits.shape[:-1] == read.ids.shape]
    return sum(pulls[1:], pulls[0])[row, cells] if pulls else None
