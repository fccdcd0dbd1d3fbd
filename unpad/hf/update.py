"""An update of a trainer, on its own batches or on ours, compared with its sequences one at a time."""

import copy
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import Trainer

from unpad.errors import ProofError, RecipeError
from unpad.hf.checks import COUNT_TARGETS, is_sft, loss_of_ones_own, refuse_losses, refuse_methods
from unpad.hf.loader import MICRO, MICROS, PLACE, Examples, collate_update, micros_of
from unpad.hf.padding import PairsUpdate
from unpad.hf.rows import CollatedRows, Collator
from unpad.proof.foreign import measure
from unpad.proof.foreign.certificate import ForeignCertificate
from unpad.proof.foreign.judge import NO_ROUTER_LOSS, ComparedUpdate, Precision, describe, judge, raise_memory
from unpad.proof.foreign.kinds import columns_of_rows, no_trainer_of_tokens
from unpad.proof.foreign.lengths import RowLimit, within
from unpad.proof.foreign.model import config_of
from unpad.proof.foreign.undisturbed import proving
from unpad.proof.foreign.update import LabelledSequence, Update, converted, labelled, read_batch, read_update

LEAST_ROWS = 3  # of an update that is proved, so that mixing sequences up, or their weights, shows
ADDED_ROWS = 7  # of the data, where an update has fewer
MOST_ROWS, MOST_TOKENS = 24, 3072  # of an update that is enough
Rows = Sequence[Sequence[LabelledSequence]]
OWN_BATCHES = "train with the trainer's own batches; unpad.prove_trainer(trainer) says whether these are right"


@dataclass(frozen=True, eq=False)
class TrainerUpdate:
    """Micro-batches of an update of a trainer, and the sequences that they are made of.

    Args:
        model: the trainer's, without what accelerate puts around it.
        batches, num_items: as `get_batch_samples` gives them.
        sequences: with the targets that they have alone.
        complete: False if there may be more of them than the batches hold.
        truth: loss and gradient of the sequences one at a time by an earlier model; None for this one.
        doubts: as of `ComparedUpdate`; whole: as of `Update`.
    """

    trainer: Trainer
    model: nn.Module
    batches: Sequence[Mapping[str, Any]]
    num_items: Tensor | int | None
    sequences: Sequence[LabelledSequence]
    complete: bool = True
    truth: measure.UpdateResults | None = None
    doubts: tuple[str, ...] = ()
    whole: Update | None = None

    @classmethod
    def of(
        cls, trainer: Trainer, batches: Sequence[Any], sequences: Sequence[LabelledSequence], **fields: Any
    ) -> "TrainerUpdate":
        """An update of batches that a collator made."""
        made = [send_to_device(dict(batch), trainer.args.device) for batch in batches]
        taken, num_items = trainer.get_batch_samples(iter(made), len(made), trainer.args.device)
        model = trainer.accelerator.unwrap_model(trainer.model)
        return cls(trainer, model, taken, num_items, sequences, **fields)

    def certificate(self, precision: Precision, notes: Sequence[str]) -> ForeignCertificate:
        return judge(self.model, precision, self._compare, notes)

    def _compare(self, exact: bool) -> ComparedUpdate:
        """The update where weights are in their precision already; `exact` for fp64."""
        # In fp64 too: attention reads a mask of another precision than its own wrongly.
        batches = converted(list(self.batches), floats=torch.float64) if exact else self.batches
        read = list(map(read_batch, _micros(batches)))
        update = replace(read_update(read, self.sequences, complete=self.complete), whole=self.whole)
        sequences = update.one_at_a_time()
        own = loss_of_ones_own(self.trainer)
        if not own and (measure.error_of_loss(self.model, sequences) or 0) > measure.OTHER_LOSS:
            own = f"the loss of {type(self.model).__name__}"
        return ComparedUpdate(
            update,
            lambda: measure.one_at_a_time(self.model, sequences),
            lambda: measure.UpdateResults(measure.logits_in_batches(self._forward, update), *self.step(batches)),
            self._forward,
            self.truth,
            own,
            self.doubts,
        )

    def _forward(self, inputs: Mapping[str, object]) -> Any:
        return self.trainer.model(**{**inputs, **({"use_cache": False} if is_sft(self.trainer) else {})})  # as it does

    def step(self, batches: Sequence[Mapping[str, Any]]) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradient of an update by `training_step` over its micro-batches."""
        trainer, loss = self.trainer, 0.0
        trainer.current_gradient_accumulation_steps = len(batches)  # as `train` does; there is none before
        for batch in batches:
            loss += float(trainer.training_step(trainer.model, dict(batch), self.num_items))
        return loss, measure.take_gradient(trainer.model)


# --------------------------------------------------------------------------- the first update of a loader


def prove_trainer(
    trainer: object,
    sequences: Sequence[Sequence[int]] | None = None,
    *,
    loss_masks: Sequence[Sequence[bool]] | None = None,
    precision: Precision = "auto",
) -> ForeignCertificate:
    """Prove that a trainer's model computes the same from its first update as from the sequences one at a time.

    What is judged goes through the trainer's own loader, `get_batch_samples` and `training_step`, without dropout, a
    router's auxiliary loss and mixed precision. Nothing is updated or left changed: weights, gradients, the optimizer,
    generators, modes, the trainer's state and order of data; only a data stream that cannot be restarted is read ahead.

    Args:
        trainer: a Trainer of transformers, SFTTrainer or a trainer of pairs of TRL, or a subclass, built and not yet
            run.
        sequences: token ids of all sequences of the data; by default those that its collator makes of each row alone
            that the trainer gives to it, which it may have cut before, split where they are packed.
        loss_masks: of `sequences`, True where a token is a target; by default all but the first.
        precision: as of `prove_callable`.

    Raises:
        ProofError: another kind of trainer; several processes; batches without labels.
        RecipeError, SourceError: the collator gives a row no meaning by itself; `sequences` do without.
    """
    if not isinstance(trainer, Trainer):
        raise ProofError(
            f"{type(trainer).__name__} is no trainer of transformers", fix="use unpad.prove_callable with its model"
        )
    if trainer.accelerator.num_processes > 1 or trainer.args.n_gpu > 1:
        raise ProofError("the trainer runs in several processes or on several devices", fix="prove it in one process")
    of_pairs = columns_of_rows(trainer)
    if (sequences or not of_pairs) and (reason := no_trainer_of_tokens(trainer)):
        raise ProofError(reason.what, fix=reason.fix)
    refuse_methods(trainer, COUNT_TARGETS)
    if not of_pairs:
        refuse_losses(trainer)
    with proving(trainer) as (model, notes):
        batches, num_items, examples, collator = _first(trainer)
        if of_pairs:
            step = TrainerUpdate(trainer, model, batches, num_items, ()).step
            return PairsUpdate.of(trainer, step, batches, of_pairs, examples, collator).certificate(precision, notes)
        if sequences is not None:
            update = TrainerUpdate(trainer, model, batches, num_items, labelled(sequences, loss_masks), complete=False)
            return update.certificate(precision, notes)
        rows, doubts = _alone(trainer, [example for some in examples for example in some], collator)
        given = [one for row in rows for one in row]
        update = TrainerUpdate(trainer, model, batches, num_items, given, doubts=tuple(doubts))
        if not loss_of_ones_own(trainer):  # which may divide by a number that it knows of all rows
            update = _part(update, examples, rows, collator)
        return update.certificate(precision, notes)


def _part(update: TrainerUpdate, examples: Sequence[Sequence[Any]], rows: Rows, collator: Collator) -> TrainerUpdate:
    """An update of enough rows, in as many micro-batches, and of all of them for what is counted.

    Args:
        examples: rows of each micro-batch as the collator was given them.
        rows: the sequences of each.
    """
    micros = [micro for some in examples for micro in (micros_of(some) if _is_ours(update.trainer) else [some])]
    kept = enough(rows, list(map(len, micros)))
    if len(kept) == len(rows):
        return update
    numbers = iter(range(len(rows)))
    made = [collator(copy.deepcopy([one for one in some if next(numbers) in kept])) for some in examples]
    sequences = [one for row in sorted(kept) for one in rows[row]]
    whole = read_update(list(map(read_batch, _micros(update.batches))), update.sequences)
    return TrainerUpdate.of(update.trainer, made, sequences, doubts=update.doubts, whole=whole)


def _is_ours(trainer: Trainer) -> bool:
    """True if the trainer has flat batches of ours."""
    return "attachment" in vars(trainer)


def _micros(batches: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Batches that the model sees of those of a loader."""
    return [micro for batch in batches for micro in batch.get(MICROS, [batch])]


def enough(rows: Rows, sizes: Sequence[int]) -> set[int]:
    """Numbers of rows of an update that are enough to judge it: MOST_TOKENS tokens, or more where rows are long.

    The longest and every micro-batch's shortest are among them. The rest are of the first micro-batches, so that shares
    of targets differ, and a mean of means shows.

    Args:
        rows: the sequences of each.
        sizes: numbers of rows of each micro-batch.
    """
    length = [sum(len(one.ids) for one in row) for row in rows]
    has_targets = [any(one.num_targets for one in row) for row in rows]
    batches = [range(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
    kept = {max(some, key=lambda row: (has_targets[row], -length[row])) for some in batches}
    kept.add(max(range(len(rows)), key=lambda row: (has_targets[row], length[row], row)))  # of alike ones another
    for row in range(len(rows)):
        if sum(length[one] for one in {*kept, row}) <= MOST_TOKENS:
            kept.add(row)
    return kept


def _alone(trainer: Trainer, examples: Sequence[Any], collator: Collator) -> tuple[Rows, list[str]]:
    """The sequences of each row that a collator was given, and what may not be meant."""
    if _is_ours(trainer):
        places, given = [tuple(example[PLACE].tolist()) for example in examples], vars(trainer)["attachment"].rows
        return [[given.row(number).sequences()[part]] for number, part in places], []
    settings = trainer.args.to_dict()
    if settings.get("packing") and settings["packing_strategy"] == "wrapped":
        what = "packing_strategy is wrapped: rows do not say where sequences begin"
        raise ProofError(what, fix='use packing_strategy="bfd", or pass the token ids as sequences=')
    rows = CollatedRows(examples, collator, trainer.data_collator)
    rows.check()
    return [[one for one in rows.row(number).sequences() if one.ids] for number in range(len(rows))], rows.doubts()


def _first(trainer: Trainer) -> tuple[list[Any], Tensor | int | None, list[list[Any]], Collator]:
    """The first update of the trainer's loader: its batches, their number of targets, their rows, and the collator.

    Raises:
        ProofError: the loader is empty, or has no collator to watch.
    """
    loader = trainer.get_train_dataloader()
    inner: Any = getattr(loader, "base_dataloader", loader)  # accelerate has one around it
    if not hasattr(inner, "collate_fn"):
        raise ProofError("the trainer's loader has no collator to watch", fix="prove its model by unpad.prove_callable")
    before = (inner.collate_fn, inner.num_workers, inner.timeout)
    collator, calls = copy.deepcopy(inner.collate_fn), list[list[Any]]()

    def recorded(rows: list[Any]) -> Any:
        calls.append(copy.deepcopy(rows))
        return collator(copy.deepcopy(rows))  # it may change rows that the data hold

    inner.collate_fn, inner.num_workers, inner.timeout = recorded, 0, 0
    try:
        iterator = iter(loader)
        wanted = trainer.args.gradient_accumulation_steps
        batches, num_items = trainer.get_batch_samples(iterator, wanted, trainer.args.device)
        if isinstance(iterator, Generator):
            iterator.close()
    finally:
        inner.collate_fn, inner.num_workers, inner.timeout = before
    if not batches:
        raise ProofError("the trainer's loader is empty", fix="give the trainer a train_dataset")
    # Loaders of accelerate are one batch ahead.
    return batches, num_items, calls[: len(batches)], collator


# --------------------------------------------------------------------------- the same update on our batches


@dataclass(frozen=True, eq=False)
class OwnUpdate:
    """An update by the trainer's own collator, before anything is replaced.

    Args:
        rows: what it is made of, as the collator is given it.
        sequences: of these rows; num_batches: micro-batches that they were in.
        truth: loss and gradient of these sequences one at a time.
        certificate: of the update.
    """

    rows: CollatedRows
    sequences: Sequence[LabelledSequence]
    num_batches: int
    truth: measure.UpdateResults
    certificate: ForeignCertificate


def take_own(trainer: Trainer, rows: CollatedRows, examples: Examples) -> OwnUpdate:
    """Compute an update of rows of the data by the trainer itself, and judge it.

    Raises:
        RecipeError: it cannot be computed, or is by another loss than the mean over the targets of its sequences.
    """
    args = trainer.args
    with proving(trainer) as (model, notes):
        most = args.gradient_accumulation_steps * trainer.accelerator.num_processes * args.per_device_train_batch_size
        most = min(len(rows), most)
        small = rows.like([rows.data[number] for number in _chosen(examples, most)])
        sequences = [one for one in small.sequences() if one.ids]
        size = -(-len(small) // -(-most // args.per_device_train_batch_size))  # as many micro-batches as of all rows
        parts = [small.data[start : start + size] for start in range(0, len(small), size)]
        batches = [small.batch(part) for part in parts]
        try:
            with measure.not_below_fp32(model):
                truth = measure.one_at_a_time(model, sequences)
        except Exception as error:
            raise_memory(error)
            longest = max(len(one.ids) for one in sequences)
            limit = getattr(config_of(model), "max_position_embeddings", "own")
            what = f"the model cannot compute sequences of up to {longest} tokens alone: {describe(error)}"
            raise RecipeError(what, fix=f"cut or leave out rows longer than its {limit} positions") from error
        certificate = TrainerUpdate.of(trainer, batches, sequences, truth=truth).certificate("fp32", notes)
    if certificate.refused is not None:
        what = f"the trainer cannot compute its own first update: {certificate.refused}"
        raise RecipeError(what, fix="mend that first; attach compares the update on its batches with the trainer's own")
    if is_of_another_loss(certificate):
        raise RecipeError(f"the trainer's first update is {_reasons(certificate)}", fix=OWN_BATCHES)
    return OwnUpdate(small, sequences, len(parts), truth, certificate)


def _chosen(examples: Examples, most: int) -> list[int]:
    """Rows with targets for an update of at most so many, spread over the data, the longest among them."""
    numbers = dict[int, int]()
    for place, length, num_targets in zip(examples.places, examples.lengths, examples.targets, strict=True):
        if num_targets:
            numbers[place[0]] = numbers.get(place[0], 0) + int(length)
    rows = list(numbers)
    num = min(len(rows), MOST_ROWS, most if most >= LEAST_ROWS else ADDED_ROWS)
    longest = max(rows, key=lambda row: numbers[row])
    spread = [rows[int(at)] for at in torch.linspace(0, len(rows) - 1, num).round()]
    chosen = list(dict.fromkeys([longest, *spread]))[:num]
    while len(chosen) > LEAST_ROWS and sum(numbers[row] for row in chosen) > MOST_TOKENS:
        chosen = chosen[: max(LEAST_ROWS, len(chosen) // 2)]
    return chosen


def is_of_another_loss(certificate: ForeignCertificate) -> bool:
    """True if the loss is not the mean cross-entropy over targets, and none that is accused."""
    loss = certificate.finding("loss")
    return loss is not None and loss.passed is None


def _reasons(certificate: ForeignCertificate) -> str:
    failed = [f"{one.claim} ({one.measured:.2g}): {one.advice}" for one in certificate.failed]
    gaps = [one.gap for one in certificate.findings if one.passed is None and one.applies]
    return f"{certificate.verdict}: " + "; ".join(failed or dict.fromkeys(gaps))


def prove_ours(trainer: Trainer, own: OwnUpdate, limit: RowLimit | None) -> ForeignCertificate:
    """Compute the update of the same rows on our batches, by the trainer with them, and compare.

    In fp32, as our kernels of attention are those of training there.

    Args:
        limit: of `row_limit`.

    Raises:
        ProofError: it has other targets, another loss or another gradient than the rows have one at a time.
    """
    with proving(trainer) as (_, notes):
        examples = Examples(own.rows)
        numbers, sequences = [index for index in range(len(examples)) if examples.lengths[index]], [*own.sequences]
        if len(numbers) == 1:  # twice, which changes no mean, but shows whether the model keeps them apart
            numbers, sequences = numbers * 2, sequences * 2
        parts = unequal(numbers, max(2, min(own.num_batches, len(numbers) // 2)))
        parts = [run for part in parts for run in within(part, examples.lengths[part].tolist(), limit)]
        chosen = [{**examples[index], MICRO: number} for number, part in enumerate(parts) for index in part]
        made = TrainerUpdate.of(trainer, [collate_update(chosen)], sequences, truth=own.truth)
        certificate = made.certificate("fp32", notes)
    if certificate.passed is False or is_of_another_loss(certificate):
        loss = loss_of_ones_own(trainer) or f"the loss of {type(trainer).__name__}"
        raise ProofError(
            f"the update on flat batches is not that of its sequences one at a time, with {loss}: "
            f"{certificate.refused or _reasons(certificate)}",
            fix=OWN_BATCHES,
        )
    return certificate


def unequal(items: Sequence[Any], num: int) -> list[list[Any]]:
    """Cut a list into `num` parts, the first as large as can be: a mean of means shows."""
    small = max(len(items) // (num + 1), 1) if num > 1 else len(items)
    first = len(items) - small * (num - 1)
    starts = [0, *range(first, len(items), small)] if num > 1 else [0]
    return [list(items[start:stop]) for start, stop in zip(starts, [*starts[1:], len(items)], strict=True)]


def doubts_of_own(own: OwnUpdate, ours: ForeignCertificate) -> list[str]:
    """What was wrong in the trainer's own update and is right on our batches, and what is not compared."""
    doubts = list[str]()
    if own.certificate.passed is False:
        text = f"the trainer's own first update was not right, and is on flat batches: {_reasons(own.certificate)}"
        doubts.append(f"{text}. predict and compute_metrics still read the trainer's own batches")
    if NO_ROUTER_LOSS in ours.notes:
        text = "the router's auxiliary loss is one of each micro-batch, and flat ones have other sequences"
        doubts.append(f"{text}: it is another, and was not compared")
    return doubts
