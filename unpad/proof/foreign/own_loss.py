"""A loss or step of a trainer's own: what it may couple, how it weighs rows, and why it is wrong."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from unpad.proof.foreign.certificate import BY_ARGUMENTS
from unpad.proof.foreign.first_update import FirstUpdate, ForeignTrainer, TrainerStep, own_divisor, take_step
from unpad.proof.foreign.judge import raise_memory
from unpad.proof.foreign.known import Batch
from unpad.proof.foreign.locate import Span
from unpad.proof.foreign.measure import EXACT, OWN, UpdateResults, relative
from unpad.proof.foreign.targets import logits_noted
from unpad.proof.foreign.update import IGNORE, LABELS, ForeignBatch, Known, Update, read_batch, read_update

FITS = 1e-5  # relative difference of two losses that are the same
CROSSES = (
    "the loss of sequences that share a row is not the sum of theirs: it reads tokens or labels across their ends, as "
    "heads for tokens further ahead and terms of earlier targets do"
)
DIVIDED = (
    "the loss is divided by num_items_in_batch, and other batches of the same sequences have another: a term of it is "
    "one per batch or per row, or reads several rows"
)
# Loss of an update by its micro-batches, the factor of its divisor, and that of the accumulation in the arguments.
Try = Callable[[Sequence[Batch], int, int], float]


def cause_of(loss: Try, batches: Sequence[Batch], alone: Sequence[Batch], truth: float, shares_rows: bool) -> str:
    """Cause for which a loss is not that of its sequences one at a time; empty where nothing shows.

    Args:
        alone: the batch of each sequence with a target.
        truth: the loss of the sequences one at a time.
        shares_rows: whether a row of the batches has several sequences.
    """

    def tried(*given: object) -> float:
        try:
            return loss(*given)  # type: ignore[arg-type]
        except Exception as error:
            raise_memory(error)
            return float("nan")

    def same(one: float, other: float) -> bool:
        return abs(one - other) <= FITS * abs(other)

    now = tried(batches, 1, 1)
    if shares_rows and same(tried(alone, 1, 1), truth):
        return CROSSES
    if not same(tried(batches, 1, 2), now):
        return BY_ARGUMENTS
    return "" if same(tried(batches, 2, 1), now) else DIVIDED


def divisors(trainer: ForeignTrainer, alone: Sequence[Batch]) -> list[float]:
    """The number of items of each batch as an update of its own; none if one has none."""
    device = trainer.args.device
    counts = [trainer.get_batch_samples(iter([dict(batch)]), 1, device)[1] for batch in alone]
    return [] if any(count is None for count in counts) else [float(count) for count in counts if count is not None]


def adds_up(counts: Sequence[float], total: float) -> bool:
    return abs(sum(counts) - total) <= FITS * abs(total)


def own_shares(trainer: ForeignTrainer, alone: Sequence[Batch], num_items: Tensor | int | None) -> list[float] | None:
    """The share of each sequence in the update by a divisor of the trainer's own; None where targets are counted.

    A divisor that is not the sum of those of the sequences is none: it depends on the batches.
    """
    if num_items is None or not own_divisor(trainer):
        return None
    counts, total = divisors(trainer, alone), float(num_items)
    return [count / total for count in counts] if counts and total and adds_up(counts, total) else None


def alone_by_trainer(
    trainer: ForeignTrainer,
    alone: Sequence[Batch],
    weights: Sequence[Sequence[float]],
    logits: list[Tensor],
    accumulation: int,
) -> list[UpdateResults]:
    """The trainer's own loss of every sequence as an update of its own, added up by some weights.

    Args:
        alone: the batch of each sequence with a target.
        weights: for every sum, one weight per sequence.
    """
    sums = [dict[str, Tensor]() for _ in weights]
    losses = list[float]()
    for index, batch in enumerate(alone):
        step = _step_alone(trainer, batch, accumulation)
        losses.append(step.loss)
        for total, given in zip(sums, weights, strict=True):
            for name, value in step.gradient.items():
                share = given[index] * value
                total[name] = total[name] + share if name in total else share
    mean = sum(losses) / max(len(losses), 1)
    totals = [sum(map(operator.mul, given, losses)) for given in weights]
    return [UpdateResults(logits, one, total, mean) for one, total in zip(totals, sums, strict=True)]


def targeted(update: Update) -> list[Span]:
    """The pieces with a target."""
    return [piece for piece in update.pieces if any(label != IGNORE for label in update.labels_of(piece))]


def _step_alone(trainer: ForeignTrainer, batch: Batch, accumulation: int = 1) -> TrainerStep:
    """A batch as an update of its own, with a setting of the accumulation."""
    before = trainer.args.gradient_accumulation_steps
    trainer.args.gradient_accumulation_steps = accumulation
    try:
        batches, num_items = trainer.get_batch_samples(iter([dict(batch)]), 1, trainer.args.device)
        return take_step(trainer, batches, num_items)
    finally:
        trainer.args.gradient_accumulation_steps = before


BY_ROWS = "the loss is a mean over rows, each of which weighs alike whatever its targets"

BY_SUM = "the loss is a sum over rows, divided by nothing that depends on the batches"

BY_OWN_DIVISOR = "the loss is a mean over rows, weighed by a divisor that the loss makes of the rows of its batch"

MEANS = (
    "the loss divides each micro-batch by a number of its own rows, and they weigh otherwise in other micro-batches; "
    "divide by that number of the whole update, as num_items_in_batch is of the targets"
)

COUPLED = "the loss couples the rows of a batch, so that a row alone has none to compare with"

OWN_SHARES = (
    "the loss has a normalisation of its own: it is no mean over targets or rows, and no sum, of the rows' losses"
)

OWN_STEP = (
    "training_step makes a gradient of its own, which of several rows is not the sum of theirs: there is none to "
    "compare with"
)


@dataclass(frozen=True, eq=False)
class Probe:
    """Determines how a trainer's own loss combines the rows of an update.

    Args:
        alone: the batch of each sequence with a target.
    """

    trainer: ForeignTrainer
    first: FirstUpdate
    alone: list[Batch]
    update: Update

    def fitting(
        self, step: TrainerStep, truth: UpdateResults, over_rows: UpdateResults, usual: float | None
    ) -> tuple[UpdateResults, str, str]:
        """The measurement to compare the update with, a note on it, and the reason if there is none; see `combined`."""
        found, note = self.combined(step, truth, over_rows, usual)
        if found is not None and note == BY_OWN_DIVISOR and not self._fits(step, found, EXACT):
            return truth, "", OWN_SHARES
        if note or len(self.alone) < 2 or self._fits(step, truth) or found is None:
            return found or truth, note, ""
        if usual is not None and self._counts_padding():
            return truth, "", ""
        if self._couples():
            return truth, "", COUPLED
        return truth, "", "" if usual is None or self._depends_on_division() else OWN_SHARES

    def combined(
        self, step: TrainerStep, truth: UpdateResults, over_rows: UpdateResults, usual: float | None
    ) -> tuple[UpdateResults | None, str]:
        """The combination of the losses of rows that the update is, with a note where it is no mean over targets.

        Args:
            usual: the mean cross-entropy over targets, if the loss is another; a sum of it that is divided by nothing
                is a division that was forgotten.

        Returns:
            The measurement to compare the update with; None for a forgotten division.
        """
        if self._fits(step, truth) or len(self.alone) < 2:
            return truth, ""
        if self._fits(step, over_rows) and self._weighs_alike():
            return over_rows, BY_ROWS
        num = len(self.alone)
        total = {name: num * value for name, value in over_rows.gradient.items()}
        in_sum = replace(over_rows, loss=num * over_rows.loss, gradient=total)
        if usual is not None and self._fits(step, in_sum) and self._adds_up():
            forgotten = abs(in_sum.loss / (usual * self.update.num_wanted) - 1) < FITS
            return (None, "") if forgotten else (in_sum, BY_SUM)
        weighed = next((one for one in self._weighed(truth) if self._fits(step, one)), None)
        return (truth, "") if weighed is None else (weighed, BY_OWN_DIVISOR)

    def combined_if_any(
        self, step: TrainerStep, truth: UpdateResults, over_rows: UpdateResults, usual: float | None
    ) -> tuple[UpdateResults, str]:
        """`combined`; the given truth where a batch of other rows raises, or weights are known too roughly."""
        try:
            found, note = self.combined(step, truth, over_rows, usual)
        except Exception as error:
            raise_memory(error)
            return truth, ""
        roughly = found is not None and note == BY_OWN_DIVISOR and not self._fits(step, found, EXACT)
        return (truth, "") if found is None or roughly else (found, note)

    def _fits(self, step: TrainerStep, one: UpdateResults, most: float = FITS) -> bool:
        errors = UpdateResults(one.logits, step.loss, step.gradient).errors(one)
        return max(errors.loss, errors.gradient) < most

    def divides_by_itself(self) -> bool:
        """True if a batch of rows is their mean by a divisor that the loss makes of them."""
        return not self._reads_count() and self._weights(self.alone) is not None

    def couples(self) -> bool:
        """True if the loss is told to couple the rows of a batch."""
        try:
            return self._couples()
        except Exception as error:  # a loss that takes no other rows
            raise_memory(error)
            return False

    def makes_another_gradient(self, step: TrainerStep, truth: UpdateResults, own: UpdateResults) -> bool:
        """True if the trainer's step makes another gradient than that of its loss, as an adversarial one does.

        A gradient that is the sum of those of the rows is compared with that of the loss: a part of it may be lost.

        Args:
            truth: of the loss; own: of the trainer's steps of the rows alone.
        """
        found = UpdateResults(truth.logits, step.loss, step.gradient)
        errors = found.errors(truth)
        if errors.loss >= FITS or errors.gradient < OWN or own.errors(truth).gradient < OWN:
            return False
        return found.errors(own).gradient > OWN

    def _weighed(self, truth: UpdateResults) -> Iterator[UpdateResults]:
        """The mean over rows by the weights that batches of two of them show.

        The loss of rows a and b with divisors A and B is (A a + B b) / (A + B), which gives A / B. A divisor may count
        the labels of first tokens, which no position predicts.
        """
        if self._reads_count():
            return
        tries = [self.alone]
        if any(_labels_first(batch) for batch in self.update.batches):
            tries.append([_with_first_label(batch) for batch in self.alone])
        for alone in tries:
            if (weights := self._weights(alone)) is not None:
                yield from alone_by_trainer(self.trainer, alone, [weights], truth.logits, 1)

    def _reads_count(self) -> bool:
        """True if the loss of a row depends on the number of items of the update: that is no divisor of its own."""
        batches, num_items = self.trainer.get_batch_samples(iter([dict(self.alone[0])]), 1, self.trainer.args.device)
        if num_items is None:
            return False
        once, twice = (take_step(self.trainer, batches, times * num_items).loss for times in (1, 2))
        return abs(once - twice) > FITS * abs(once)

    def _weights(self, alone: Sequence[Batch]) -> list[float] | None:
        """The share of each row, of a sum of 1; None if a batch of three has another loss than these give it."""

        def ratio(one: int, other: int) -> float:
            """Weight of a row over that of another."""
            both = self._loss(alone[one], alone[other])
            return (losses[other] - both) / (both - losses[one])

        try:
            losses = [self._loss(batch) for batch in alone]
            low, high = losses.index(min(losses)), losses.index(max(losses))
            rest = [row for row in range(len(losses)) if row not in (low, high)]
            weights = [1.0] * len(losses)
            weights[high] = ratio(high, low)
            for row in rest:
                far = low if losses[high] - losses[row] < losses[row] - losses[low] else high
                weights[row] = weights[far] * ratio(row, far)
            three = (low, rest[0], high)
            mean = sum(weights[row] * losses[row] for row in three) / sum(weights[row] for row in three)
            fits = abs(self._loss(*(alone[row] for row in three)) - mean) <= FITS * abs(mean)
        except Exception as error:  # a loss that takes no such batch, losses that are alike, fewer than three rows
            raise_memory(error)
            return None
        total = sum(weights)
        return [weight / total for weight in weights] if fits and total > 0 and min(weights) >= 0 else None

    def _loss(self, *rows: Batch) -> float:
        """The loss of some rows as an update of one batch."""
        return _step_alone(self.trainer, rows[0] if len(rows) == 1 else _stacked(*rows)).loss

    def _weighs_alike(self) -> bool:
        """True if the loss of a batch of two different rows is the mean over rows, not over targets."""
        counts = [read_batch(one).num_targets for one in self.alone]
        one, two = (self.alone[index] for index in (counts.index(min(counts)), counts.index(max(counts))))
        if min(counts) == max(counts):
            return False
        losses = [_step_alone(self.trainer, batch).loss for batch in (one, two, _stacked(one, two))]
        return abs(losses[2] - (losses[0] + losses[1]) / 2) < FITS * abs(losses[2])

    def _adds_up(self) -> bool:
        """True if a batch of a row twice has twice its loss."""
        one = self.alone[0]
        once, twice = (_step_alone(self.trainer, batch).loss for batch in (one, _stacked(one, one)))
        return abs(twice - 2 * once) < FITS * abs(twice)

    def _counts_padding(self) -> bool:
        """True if more masked padding changes the loss of a row."""
        one = {"attention_mask": torch.ones_like(read_batch(self.alone[0]).ids), **self.alone[0]}
        plain, wider = (_step_alone(self.trainer, batch).loss for batch in (one, _widened(one, 7)))
        return abs(plain - wider) > FITS * abs(plain)

    def _depends_on_division(self) -> bool:
        """True if the same rows, divided otherwise among as many and as large batches, have another loss."""
        sizes = [len(read_batch(one).ids) for one in self.first.batches]
        if len(sizes) < 2 or sum(sizes) != len(self.alone):
            return False
        counts = [read_batch(one).num_targets for one in self.alone]
        ordered = [self.alone[index] for index in sorted(range(len(counts)), key=lambda index: counts[index])]
        steps = []
        for rows in (ordered, [*ordered[::2], *ordered[1::2]]):
            starts = [sum(sizes[:index]) for index in range(len(sizes))]
            made = [_stacked(*rows[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
            taken, num_items = self.trainer.get_batch_samples(iter(made), len(made), self.trainer.args.device)
            steps.append(take_step(self.trainer, taken, num_items))
        one, two = (step.loss for step in steps)
        return abs(two - one) > FITS * abs(one)

    def _couples(self) -> bool:
        """True if the effect of a token in one row on the loss, or the weights of its targets, depend on another."""
        reads = [read for read in map(read_batch, self.first.batches) if len(read.ids) > 1]
        return any(map(self._share_weights, reads)) or (bool(reads) and self._mixes(reads[0]))

    def _mixes(self, read: ForeignBatch) -> bool:
        losses = []
        for changed in ((), (0,), (1,), (0, 1)):
            ids = read.ids.clone()
            for row in changed:
                real = read.real[row].nonzero().flatten()
                cell = int(real[len(real) // 2])
                ids[row, cell] = read.ids[row, int(real[-2])]
            given = read.with_ids(ids)
            losses.append(_step_alone(self.trainer, {**given, **read.labels}).loss)
        mixed = losses[0] - losses[1] - losses[2] + losses[3]
        return abs(mixed) > FITS * max(abs(losses[0] - losses[3]), FITS * abs(losses[0]))

    def _share_weights(self, read: ForeignBatch) -> bool:
        """True if the loss pulls otherwise at the logits of every second row of a batch when the others are turned."""
        pulls = []
        for turned in (False, True):
            ids = read.ids.clone()
            for row in range(1, turned * len(ids), 2):  # as many tokens and targets, and other losses of them
                ids[row, read.real[row]] = read.ids[row, read.real[row]].flip(0)
            with logits_noted(self.trainer.model) as noted:
                _step_alone(self.trainer, {**read.with_ids(ids), **read.labels})
            pulls += [one.grad for one in noted if one.grad is not None and one.shape[:-1] == read.ids.shape][:1]
        learnt = read.targets[::2] != IGNORE
        return len(pulls) == 2 and relative(pulls[1][::2][learnt], pulls[0][::2][learnt]) > FITS


def _labels_first(batch: ForeignBatch) -> bool:
    """True if the first real token of a row has a label."""
    labels = batch.labels.get("labels")
    if labels is None:
        return False
    first = batch.real & (batch.real.cumsum(1) == 1)
    return bool((labels.reshape(batch.ids.shape)[first] != IGNORE).any())


def _with_first_label(batch: Batch) -> Batch:
    """The batch of a row in which the first real token is its own label."""
    read = read_batch(batch)
    if "labels" not in read.labels:
        return batch
    first = read.real & (read.real.cumsum(1) == 1)
    labels = read.labels["labels"]
    return {**batch, "labels": torch.where(first, read.ids, labels.reshape(read.ids.shape)).reshape(labels.shape)}


def _widened(batch: Batch, more: int) -> Batch:
    """The batch of a row with more padding on the right."""
    shape = read_batch(batch).ids.shape

    def wide(name: str, value: object) -> object:
        if not isinstance(value, Tensor) or value.shape[:2] != shape:
            return value
        further = (0, 0) * (value.dim() - 2)
        return nn.functional.pad(value, (*further, 0, more), value=IGNORE if name in LABELS else 0)

    return {name: wide(name, value) for name, value in batch.items()}


def _stacked(*rows: Batch) -> Batch:
    """Batches of one row each as one batch, padded on the right."""
    width = max(read_batch(row).ids.shape[1] for row in rows)
    full = [{**row, "attention_mask": _mask_of(row)} for row in rows]
    padded = [_widened(row, width - read_batch(row).ids.shape[1]) for row in full]
    names = [name for name, value in padded[0].items() if isinstance(value, Tensor)]
    return {name: torch.cat([value for row in padded if isinstance(value := row[name], Tensor)]) for name in names}


def _mask_of(row: Batch) -> Tensor:
    """The attention_mask of a row, of ones if it has none with an entry for every token."""
    mask, ids = row.get("attention_mask"), read_batch(row).ids
    return mask if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids)


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
