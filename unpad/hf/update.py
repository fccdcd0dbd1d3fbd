"""An update of a trainer, on its own batches or on ours, compared with its sequences one at a time."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import Trainer

from unpad.errors import ProofError, RecipeError
from unpad.hf.checks import COUNT_TARGETS, is_another_loss, loss_of_logits, loss_of_ones_own, own_counts, refuse_methods
from unpad.hf.loader import IGNORED, PLACE, Examples, collate
from unpad.hf.rows import Alone, CollatedRows, Collator
from unpad.proof.foreign.certificate import MEAN, TAKEN, ForeignCertificate
from unpad.proof.foreign.judge import NO_ROUTER_LOSS, OWN_LOSS, ComparedUpdate, Precision, judge, refused
from unpad.proof.foreign.kinds import no_trainer_of_tokens
from unpad.proof.foreign.lengths import within
from unpad.proof.foreign.measure import (
    FollowedLoss,
    UpdateResults,
    logits_in_batches,
    objective_of,
    one_at_a_time,
    take_gradient,
)
from unpad.proof.foreign.model import called, no_router_loss, untouched, untouched_generators
from unpad.proof.foreign.targets import taken_by
from unpad.proof.foreign.undisturbed import undisturbed, without_dropout
from unpad.proof.foreign.update import (
    LABELS,
    LabelledSequence,
    Update,
    converted,
    labelled,
    read_batch,
    read_update,
    refuse_missing,
)

LEAST_ROWS = 3  # of an update that is proved, so that mixing sequences up, or their weights, shows
ADDED_ROWS = 7  # of the data, where an update has fewer
MOST_ROWS, MOST_TOKENS = 24, 8192
BEGUN = ("state", "is_in_train")  # attributes of a trainer that `_begin` gives
OF_TOKENS = (  # inputs of a model that say which tokens there are, and where sequences begin
    *("input_ids", "attention_mask", "position_ids", "use_cache", "seq_idx"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)
OF_LOSS = (*LABELS, "fused_lm_head", "num_items_in_batch", "return_dict")  # inputs that belong to the loss of a model
OWN_BATCHES = "train with the trainer's own batches; unpad.prove_trainer(trainer) says whether these are right"
FLAT = (
    f"hand the model all of the batch, sum over the labels that are not {IGNORED}, divide by num_items_in_batch, and "
    "read no attention_mask, attention weights or rows, which a flat batch does not have"
)


@dataclass(frozen=True, eq=False)
class TrainerUpdate:
    """Micro-batches of an update of a trainer, and the sequences that they are made of.

    Args:
        model: the trainer's, without what accelerate puts around it.
        batches, num_items: as `get_batch_samples` gives them.
        sequences: with the targets that they have alone.
        alone: batch of each sequence alone; empty if nobody knows them.
        truths: loss and gradient of the sequences one at a time, by whether they are in fp64: those that were measured,
            or of an earlier update of the same sequences.
        doubts: as of `ComparedUpdate`.
    """

    trainer: Trainer
    model: nn.Module
    batches: Sequence[Mapping[str, Any]]
    num_items: Tensor | int | None
    sequences: Sequence[LabelledSequence]
    alone: Sequence[Mapping[str, Any]] = ()
    truths: dict[bool, UpdateResults] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, trainer: Trainer, model: nn.Module, batches: Sequence[Mapping[str, Any]], sequences: Sequence[Alone]
    ) -> TrainerUpdate:
        """An update of batches that a collator made."""
        made = _on_device(trainer, batches)
        taken, num_items = trainer.get_batch_samples(iter(made), len(made), trainer.args.device)
        return cls(trainer, model, taken, num_items, []).of_rows(sequences)

    def of_rows(self, sequences: Sequence[Alone], doubts: Sequence[str] = ()) -> TrainerUpdate:
        """The update as one of sequences that are known as the collator makes them."""
        alone = _on_device(self.trainer, [one.batch for one in sequences])
        return replace(self, sequences=[one.sequence for one in sequences], alone=alone, doubts=tuple(doubts))

    def certificate(self, precision: Precision, notes: Sequence[str]) -> ForeignCertificate:
        return judge(self.model, precision, self._compare, notes)

    def _compare(self, exact: bool) -> ComparedUpdate:
        """The update where weights are in their precision already; `exact` for fp64."""
        if not exact:
            return self._comparison(exact)
        # In fp64 too: attention reads a mask of another precision than its own wrongly.
        batches, alone = (converted(list(made), floats=torch.float64) for made in (self.batches, self.alone))
        return replace(self, batches=batches, alone=alone)._comparison(exact)

    def _comparison(self, exact: bool) -> ComparedUpdate:
        try:
            step = self._step(self.batches, self.num_items)
        except Exception as error:
            raise refused(error) from error
        update = self._update(step.inputs)
        forward = partial(called, self.trainer.model)
        steps = [step]

        def together() -> UpdateResults:
            step = steps.pop() if steps else self._step(self.batches, self.num_items)
            return UpdateResults(logits_in_batches(forward, update), step.loss, step.gradient)

        comparison = ComparedUpdate(
            update,
            lambda: one_at_a_time(self.model, update, FollowedLoss(returned=False, own=False)),
            together,
            forward,
            self.truths.get(exact),
            doubts=self.doubts,
        )
        own = loss_of_ones_own(self.trainer)
        if not own and not is_another_loss(self.trainer) and not objective_of(self.model, update).own:
            self.truths.setdefault(exact, comparison.alone())
            return replace(comparison, truth=self.truths[exact])
        if not self.alone:
            raise ProofError("the loss is one of rows as the collator makes them", fix="leave sequences= out")
        if exact not in self.truths:
            self.truths[exact] = self._truth(update)
        return replace(
            comparison,
            truth=self.truths[exact],
            own=own,
            notes=(OWN_LOSS,),
            taken=taken_by(self.sequences, self._loss_of),
        )

    def _update(self, inputs: Sequence[Mapping[str, Any]]) -> Update:
        """The sequences in the model's inputs, with what the model gets of each besides its tokens."""
        labels = [{name: batch[name] for name in LABELS if name in batch} for batch in self.batches]
        batches = [read_batch({**one, **label}) for one, label in zip(inputs, labels, strict=True)]
        update = read_update(batches, self.sequences, complete=bool(self.alone))
        refuse_missing(update)
        names = {name for batch in batches for name, value in batch.inputs.items() if value is not None} - {*OF_TOKENS}
        given = [{name: batch[name] for name in names if name in batch} for batch in self.alone]
        return replace(update, given=dict(enumerate(given)))

    def _truth(self, update: Update) -> UpdateResults:
        """The trainer's own loss of every sequence as an update of its own, weighted by targets."""
        counts = {at: sum(label != IGNORED for label in one.labels) for at, one in enumerate(self.sequences)}
        counts, total = {at: count for at, count in counts.items() if count}, sum(counts.values())
        gradient, means = dict[str, Tensor](), dict[int, float]()
        for number, count in counts.items():
            step = self._step_alone(self.alone[number])
            means[number] = step.loss
            for name, value in step.gradient.items():
                part = count / total * value
                gradient[name] = gradient[name] + part if name in gradient else part
        return UpdateResults([], sum(means[at] * count / total for at, count in counts.items()), gradient, means)

    def _loss_of(self, number: int, ids: list[int], labels: list[int]) -> float:
        """The trainer's loss of a sequence with other tokens and labels."""
        batch = dict(self.alone[number])
        given = {"input_ids": ids, "labels": labels, "shift_labels": [*labels[1:], IGNORED]}
        like = batch["input_ids"]
        return self._step_alone(
            {**batch, **{name: like.new_tensor([given[name]]) for name in given if name in batch}}
        ).loss

    def _step_alone(self, batch: Mapping[str, Any]) -> TrainerStep:
        batches, num_items = self.trainer.get_batch_samples(iter([dict(batch)]), 1, self.trainer.args.device)
        return self._step(batches, num_items)

    def _step(self, batches: Sequence[Mapping[str, Any]], num_items: Tensor | int | None) -> TrainerStep:
        """`training_step` over micro-batches, and the inputs that the model gets."""
        calls: list[dict[str, Any]] = []

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled() and not args:
                calls.append(dict(kwargs))

        trainer = self.trainer
        trainer.current_gradient_accumulation_steps = len(batches)  # as `train` does; there is none before
        loss, inputs = 0.0, []
        hook = trainer.model.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
        try:
            for batch in batches:
                calls.clear()
                loss += float(trainer.training_step(trainer.model, dict(batch), num_items))
                given = next((call for call in calls if "input_ids" in call), dict(batch))
                inputs.append({name: value for name, value in given.items() if name not in OF_LOSS})
        finally:
            hook.remove()
        return TrainerStep(loss, take_gradient(trainer.model), inputs)


@dataclass(frozen=True, eq=False)
class TrainerStep:
    """Loss and gradient of an update by `training_step`, and the inputs that the model got."""

    loss: float
    gradient: dict[str, Tensor]
    inputs: list[dict[str, Any]]


def _on_device(trainer: Trainer, batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [send_to_device(dict(batch), trainer.args.device) for batch in batches]


@contextmanager
def proving(trainer: Trainer) -> Iterator[tuple[nn.Module, list[str]]]:
    """The model of a trainer and notes on omitted parts; inside, steps have no side effects and no dropout.

    Other processes compute the same, and nothing is sent.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    with (
        untouched_generators(),
        undisturbed(trainer),
        untouched(model),
        no_router_loss(model) as router,
        warnings.catch_warnings(),
        without_dropout(model),
        own_counts(trainer.args),
    ):
        warnings.simplefilter("ignore")  # of a step that is not meant to be one
        for name in ("gather", "gather_for_metrics"):  # restored with the rest of the accelerator
            vars(trainer.accelerator)[name] = _itself
        if hasattr(trainer, "aux_loss_enabled"):  # of TRL, which adds that loss by itself
            router |= trainer.aux_loss_enabled
            trainer.aux_loss_enabled = False
        notes = [NO_ROUTER_LOSS] if router else []
        if trainer.accelerator.mixed_precision != "no":
            notes.append(f"training will run in {trainer.accelerator.mixed_precision}; the proof does without")
        yield model, notes


def _itself(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


def _begin(trainer: Any, loader: object) -> None:
    """Give a trainer the state that `train` begins with, which a loss may read."""
    try:
        num_epochs, steps_per_epoch, *_, max_steps = trainer.set_initial_training_values(trainer.args, loader)
    except ValueError:  # neither max_steps nor a length: `train` raises it too
        return
    trainer._init_training_state(max_steps, steps_per_epoch, num_epochs, None, None)
    vars(trainer)["is_in_train"] = True


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
        trainer: a Trainer of transformers, SFTTrainer of TRL, or a subclass, built and not yet run.
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
    if "lomo" in str(trainer.args.optim).lower():
        raise ProofError("this optimizer changes weights during backward", fix="prove with another optim")
    if reason := no_trainer_of_tokens(trainer):
        raise ProofError(reason.what, fix=reason.fix)
    refuse_methods(trainer, COUNT_TARGETS)
    with proving(trainer) as (model, notes):
        batches, num_items, examples, collator = _first(trainer)
        update = TrainerUpdate(trainer, model, batches, num_items, labelled(sequences or [[0]], loss_masks))
        if sequences is None:
            update = update.of_rows(*_alone(trainer, examples, collator))
        return update.certificate(precision, notes)


def _alone(trainer: Trainer, examples: Sequence[Any], collator: Collator) -> tuple[list[Alone], list[str]]:
    """The sequences of the rows that a collator was given, and what may not be meant."""
    attachment = vars(trainer).get("attachment")
    if attachment is not None:
        places = [tuple(example[PLACE].tolist()) for example in examples]
        return [attachment.rows.sequences(number)[part] for number, part in places], []
    settings = trainer.args.to_dict()
    if settings.get("packing") and settings["packing_strategy"] == "wrapped":
        raise ProofError(
            "packing_strategy is wrapped: rows do not say where sequences begin",
            fix='use packing_strategy="bfd", or pass the token ids as sequences=',
        )
    rows = CollatedRows(examples, collator, trainer.data_collator)
    rows.check()
    return [one for number in range(len(rows)) for one in rows.sequences(number) if one.sequence.ids], rows.doubts()


def _first(trainer: Trainer) -> tuple[list[Any], Tensor | int | None, list[Any], Collator]:
    """The first update of the trainer's loader: its batches, their number of targets, rows, and the collator.

    Raises:
        ProofError: the loader is empty, or has no collator to watch.
    """
    loader = trainer.get_train_dataloader()
    _begin(trainer, loader)
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
    return batches, num_items, [row for rows in calls[: len(batches)] for row in rows], collator


# --------------------------------------------------------------------------- the same update on our batches


@dataclass(frozen=True, eq=False)
class OwnUpdate:
    """An update by the trainer's own loss and collator, before anything is replaced.

    Args:
        rows: what it is made of, as the collator is given it.
        sequences: of these rows; num_batches: micro-batches that they were in.
        certificate: of the update; None if it cannot be computed, and `failure` says why.
        begun: what the trainer's training begins with, which a loss may read, by the name of the attribute.
        truths: as of `TrainerUpdate`; they and `begun` are empty after `prove_ours`, since they are as large as the
            model.
        loss: name of a loss of the user's own; empty for one that needs no logits but those of targets.
    """

    rows: CollatedRows
    sequences: Sequence[LabelledSequence]
    num_batches: int
    certificate: ForeignCertificate | None
    failure: str
    begun: dict[str, Any]
    truths: dict[bool, UpdateResults]
    loss: str


def take_own(trainer: Trainer, rows: CollatedRows, examples: Examples) -> OwnUpdate:
    """Compute an update of rows of the data by the trainer itself, and judge it.

    Raises:
        RecipeError: the user's own loss is not the mean over the targets of its sequences one at a time.
    """
    loss, args = loss_of_logits(trainer), trainer.args
    with proving(trainer) as (model, notes):
        _begin(trainer, trainer.get_train_dataloader())
        micros = args.gradient_accumulation_steps * trainer.accelerator.num_processes
        most = min(len(rows), args.per_device_train_batch_size * micros)
        numbers = _chosen(examples, most)
        small = rows.like([rows.data[number] for number in numbers])
        sequences = [one for number in range(len(small)) for one in small.sequences(number) if one.sequence.ids]
        size = -(-len(small) // -(-most // args.per_device_train_batch_size))  # as many micro-batches as of all rows
        certificate, failure, truths = None, "", dict[bool, UpdateResults]()
        parts = [small.data[start : start + size] for start in range(0, len(small), size)]
        try:
            update = TrainerUpdate.of(trainer, model, [small.batch(part) for part in parts], sequences)
        except RecipeError as error:
            failure = error.summary
        else:
            update = replace(update, truths=truths)
            certificate = update.certificate("fp32", notes)
            failure = certificate.refused or ""
        begun = {name: vars(trainer)[name] for name in BEGUN if name in vars(trainer)}
    known = [one.sequence for one in sequences]
    own = OwnUpdate(small, known, len(parts), certificate, failure, begun, truths, loss)
    _refuse_own(own)
    return own


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


def _refuse_own(own: OwnUpdate) -> None:
    """Refuse what shows in the trainer's own update, and cannot be kept or mended.

    Raises:
        RecipeError: it cannot be computed, or the user's own loss is wrong or no mean over targets.
    """
    if own.failure:
        if own.loss or not own.rows.is_stock:
            raise RecipeError(
                f"the trainer cannot compute its own first update, so nothing can be compared with it: {own.failure}",
                fix="mend that first; attach compares the update on its batches with the trainer's own",
            )
        return
    assert own.certificate is not None
    taken = [one.advice for one in own.certificate.failed if any(text in one.advice for text in TAKEN.values())]
    if taken:
        raise RecipeError(f"{own.loss or 'the loss'}: {taken[0]}", fix="compare logits[:, :-1] with labels[:, 1:]")
    if own.loss and not own.certificate.passed:
        raise RecipeError(
            f"the trainer's first update is not that of its sequences one at a time, and its loss is your own "
            f"({own.loss}): {_reasons(own.certificate)}",
            fix=f"{MEAN}, or train with the trainer's own batches",
        )


def _reasons(certificate: ForeignCertificate) -> str:
    failed = [f"{one.claim} ({one.measured:.2g}): {one.advice}" for one in certificate.failed]
    gaps = [one.gap for one in certificate.findings if one.passed is None and one.applies]
    return f"{certificate.verdict}; " + "; ".join(failed or dict.fromkeys(gaps))


def prove_ours(trainer: Trainer, own: OwnUpdate, limits: dict[str, int]) -> ForeignCertificate:
    """Compute the update of the same rows on our batches, by the trainer with them, and compare.

    In fp32, as our kernels of attention are those of training there.

    Args:
        limits: of `thresholds`.

    Raises:
        ProofError: it has other targets, another loss or another gradient than the rows have one at a time.
    """
    with proving(trainer) as (model, notes):
        vars(trainer).update(own.begun)
        examples = Examples(own.rows, own.rows.columns)
        numbers, sequences = [index for index in range(len(examples)) if examples.lengths[index]], [*own.sequences]
        if len(numbers) == 1:  # twice, which changes no mean, but shows whether the model keeps them apart
            numbers, sequences = numbers * 2, sequences * 2
        parts = unequal(numbers, max(1, min(own.num_batches, len(numbers) // 2)))
        parts = [run for part in parts for run in within(part, examples.lengths[part].tolist(), limits)]
        joined = partial(collate, columns=own.rows.columns)
        alone = [Alone(one, joined([examples[at]])) for at, one in zip(numbers, sequences, strict=True)]
        made = [joined([examples[index] for index in part]) for part in parts]
        update = replace(TrainerUpdate.of(trainer, model, made, alone), truths=dict(own.truths))
        certificate = update.certificate("fp32", notes)
    own.truths.clear()
    own.begun.clear()
    if certificate.passed is False or (own.loss and not certificate.passed):
        reason = f"refused: {certificate.refused}" if certificate.refused else _reasons(certificate)
        loss = own.loss or f"the loss of {type(trainer).__name__}"
        raise ProofError(
            f"the update on flat batches is not that of its sequences one at a time, with {loss}: {reason}",
            fix=f"{FLAT}, or {OWN_BATCHES}" if own.loss else OWN_BATCHES,
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
    found = list[str]()
    if own.failure:
        found.append(f"the trainer could not compute its own first update, to compare ours with: {own.failure}")
    elif own.certificate is not None and own.certificate.passed is False:
        text = f"the trainer's own first update was not right, and is on flat batches: {_reasons(own.certificate)}"
        found.append(f"{text}. predict and compute_metrics still read the trainer's own batches")
    if NO_ROUTER_LOSS in ours.notes:
        text = "the router's auxiliary loss is one of each micro-batch, and flat ones have other sequences"
        found.append(f"{text}: it is another, and was not compared")
    return found
