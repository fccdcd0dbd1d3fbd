"""Proof that an update on our batches is the trainer's own: the same targets, loss and gradient over the same rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn
from transformers import Trainer

from unpad.errors import ProofError, RecipeError
from unpad.hf.checks import has_standard_loss, is_sft, name_of_loss, own_counts
from unpad.hf.loader import IGNORED, Examples, collate
from unpad.hf.rows import CollatedRows, is_stock
from unpad.proof.foreign.certificate import MEAN, TAKEN, ForeignCertificate
from unpad.proof.foreign.first_update import BEGUN, FirstUpdate, begin, first_update, proving
from unpad.proof.foreign.judge import NO_ROUTER_LOSS, Precision, describe, judge, raise_memory
from unpad.proof.foreign.lengths import within
from unpad.proof.foreign.measure import UpdateResults
from unpad.proof.foreign.trainer import TrainerCase
from unpad.proof.foreign.update import Known

UNLIKE = 3  # least number of unlike sequences with a target, so that mixing them up, or their weights, shows
MOST_ROWS, MOST_TOKENS = 24, 8192  # of an update that is proved; of a larger one a part is
ADDED = 6  # rows of the data that are added to an update with fewer unlike sequences
OWN_BATCHES = "train with the trainer's own batches; unpad.prove_trainer(trainer) says whether these are right"
FLAT = (
    f"hand the model all of the batch, sum over the labels that are not {IGNORED}, divide by num_items_in_batch, and "
    "read no attention_mask, attention weights or rows, which a flat batch does not have"
)
TARGETS = ("targets", "unknown", "cut")  # findings that say that a batch has others than its rows


@dataclass(frozen=True, eq=False)
class OwnUpdate:
    """The trainer's own update, before anything is replaced.

    Args:
        rows: what it is made of, as the collator is given it.
        known: the sequences of these rows with the targets that the collator gives them alone.
        num_batches: micro-batches of the update that is proved.
        certificate: of the update; None if it cannot be computed, and `failure` says why.
        begun: what the trainer's training begins with, which a loss may read, by the name of the attribute.
        truths: loss and gradient of the sequences one at a time, by whether they were computed in fp64; they and
            `begun` are empty after `prove_ours`, since they are as large as the model.
        is_standard: whether the loss is that of transformers or TRL.
        loss: its name.
    """

    rows: CollatedRows
    known: list[Known]
    num_batches: int
    certificate: ForeignCertificate | None
    failure: str
    begun: dict[str, object]
    truths: dict[bool, UpdateResults]
    is_standard: bool
    loss: str


# --------------------------------------------------------------------------- the trainer's own


def take_own(trainer: Trainer, rows: CollatedRows, examples: Examples) -> OwnUpdate:
    """Compute the trainer's first update by itself, and judge it.

    Raises:
        RecipeError: its collator gives rows others in a batch than alone, or its own loss is not the one of its
            sequences one at a time.
    """
    standard, loss = has_standard_loss(trainer), name_of_loss(trainer)
    with _alone(trainer) as (model, notes):
        first, failure = _first(trainer, rows, examples)
        small = rows.like(first.examples)
        places = [(number, part) for number in range(len(small)) for part, _ in enumerate(small.sequences(number))]
        known = [one for number in range(len(small)) for one in small.sequences(number)]
        truths: dict[bool, UpdateResults] = {}
        certificate = None
        if not failure:
            # Here, where numbers that a collator makes are as in training, and not in the precision of the proof.
            made = [small.alone(*place) for place in places]
            alone = [dict(send_to_device(dict(one), trainer.args.device)) for one in made]
            case = TrainerCase(trainer, model, first, known=known, alone=alone, truths=truths)
            certificate = judge(model, _precision(trainer), case.measure, notes)
            failure = certificate.refused or ""
        begun = {name: vars(trainer)[name] for name in BEGUN if name in vars(trainer)}
    own = OwnUpdate(small, known, len(first.batches), certificate, failure, begun, truths, standard, loss)
    refuse_own(own)
    return own


@contextmanager
def _alone(trainer: Trainer) -> Iterator[tuple[nn.Module, list[str]]]:
    """`proving`, in this process alone: others compute the same, and nothing is sent."""
    with ExitStack() as stack:
        model, notes = stack.enter_context(proving(trainer))
        stack.enter_context(own_counts(trainer.args))
        for name in ("gather", "gather_for_metrics"):  # restored with the rest of the accelerator
            vars(trainer.accelerator)[name] = _itself
        yield model, notes


def _precision(trainer: Trainer) -> Precision:
    """That of both updates: the head that TRL adds to a model computes in fp32."""
    return "fp32" if is_sft(trainer) else "auto"


def _itself(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


def _first(trainer: Trainer, rows: CollatedRows, examples: Examples) -> tuple[FirstUpdate, str]:
    """The first update, and why it cannot be made, if so; with rows of the data added where it would show too little.

    Several processes make it of rows of the data by the collator, since their loaders wait for each other.
    """
    first, failure = FirstUpdate([], None, [], rows.collate), ""
    if trainer.accelerator.num_processes > 1:
        begin(trainer, trainer.get_train_dataloader())
    else:
        try:
            first = first_update(trainer)
        except ProofError:
            raise
        except Exception as error:
            raise_memory(error)
            failure = describe(error)
    given = list(first.examples)
    if len(given) > MOST_ROWS or _tokens(rows, given) > MOST_TOKENS:
        longest = max(given, key=lambda row: _tokens(rows, [row]))
        given = [longest, *(row for row in given if row is not longest)]
    while len(given) > UNLIKE and (len(given) > MOST_ROWS or _tokens(rows, given) > MOST_TOKENS):
        given = given[: max(UNLIKE, len(given) // 2)]
    if len(given) == len(first.examples) and _num_unlike(rows, given) >= UNLIKE:
        return first, failure
    with_targets = [place[0] for place, count in zip(examples.places, examples.targets, strict=True) if count]
    spread = torch.linspace(0, len(with_targets) - 1, min(ADDED, len(with_targets))).round().long().tolist()
    if _num_unlike(rows, given) < UNLIKE:
        given += [rows.data[number] for number in dict.fromkeys(with_targets[at] for at in spread)]
    micros = trainer.args.gradient_accumulation_steps * trainer.accelerator.num_processes
    batches = len(first.batches) or micros
    try:
        made = [rows.batch(part) for part in unequal(given, min(batches, max(1, len(given) // 2)))]
    except RecipeError as error:
        return FirstUpdate(first.batches, first.num_items, given, rows.collate), failure or error.summary
    made = [send_to_device(dict(one), trainer.args.device) for one in made]
    taken, num_items = trainer.get_batch_samples(iter(made), len(made), trainer.args.device)
    return FirstUpdate(taken, num_items, given, rows.collate), ""


def _tokens(rows: CollatedRows, given: Sequence[Any]) -> int:
    return sum(len(one.ids) for row in given for one in rows.like([row]).sequences(0))


def _num_unlike(rows: CollatedRows, given: Sequence[Any]) -> int:
    """Number of sequences of some rows that have a target and are not alike."""
    small = rows.like(given)
    known = [one for number in range(len(small)) for one in small.sequences(number)]
    return len({tuple(one.ids) for one in known if any(label != IGNORED for label in one.labels)})


def unequal(items: Sequence[Any], num: int) -> list[list[Any]]:
    """Cut a list into `num` parts, the first as large as can be: a mean of means shows."""
    least = len(items) // (num + 1) if num > 1 else 0
    small = max(least, 1)
    first = len(items) - small * (num - 1)
    starts = [0, *range(first, len(items), small)] if num > 1 else [0]
    return [list(items[start:stop]) for start, stop in zip(starts, [*starts[1:], len(items)], strict=True)]


def refuse_own(own: OwnUpdate) -> None:
    """Refuse what shows in the trainer's own update, and cannot be kept or mended.

    Raises:
        RecipeError: the collator in a batch does otherwise than alone, or the user's own loss is wrong.
    """
    collator = own.rows.name
    if own.failure:
        if not (own.is_standard and is_stock(own.rows.collator)):
            raise RecipeError(
                f"the trainer cannot compute its own first update, so nothing can be compared with it: {own.failure}",
                fix="mend that first; attach compares the update on its batches with the trainer's own",
            )
        return
    assert own.certificate is not None
    other = [one.advice for one in own.certificate.failed if any(text in one.advice for text in TAKEN.values())]
    if other:
        raise RecipeError(f"{own.loss}: {other[0]}", fix="compare logits[:, :-1] with labels[:, 1:]")
    unlike = [finding for finding in own.certificate.failed if finding.kind in TARGETS]
    if unlike:
        reasons = "; ".join(f"{one.claim}: {one.measured:g} ({one.advice})" for one in unlike)
        raise RecipeError(
            f"the first update has other targets than its rows, as the collator {collator} gives them alone: {reasons}",
            fix="let the collator give a row in a batch the tokens and labels that it has alone",
        )
    if own.certificate.passed is False and not own.is_standard:
        raise RecipeError(
            f"the trainer's first update is not that of its sequences one at a time, and its loss is your own "
            f"({own.loss}): {_reasons(own.certificate)}",
            fix=f"{MEAN}, or train with the trainer's own batches",
        )


def _reasons(certificate: ForeignCertificate) -> str:
    found = [f"{one.claim} ({one.measured:.2g}): {one.advice}" for one in certificate.failed]
    return f"{certificate.verdict}; " + "; ".join(found)


# --------------------------------------------------------------------------- ours


def prove_ours(trainer: Trainer, own: OwnUpdate, limits: dict[str, int]) -> ForeignCertificate:
    """Compute the update of the same rows on our batches, by the trainer with them, and compare.

    Args:
        limits: of `thresholds`.

    Raises:
        ProofError: it has other targets, another loss or another gradient than the rows have one at a time.
    """
    with _alone(trainer) as (model, notes):
        vars(trainer).update(own.begun)
        examples = Examples(own.rows, own.rows.columns)
        numbers = [index for index in range(len(examples)) if examples.lengths[index]]
        items = [examples[index] for index in numbers]
        parts = unequal(numbers, max(1, min(own.num_batches, len(items) // 2)))
        parts = [run for part in parts for run in within(part, examples.lengths[part].tolist(), limits)]
        device = trainer.args.device
        joined = partial(collate, columns=own.rows.columns)
        made = [send_to_device(joined([examples[index] for index in part]), device) for part in parts]
        batches, num_items = trainer.get_batch_samples(iter(made), len(made), device)
        first = FirstUpdate(batches, num_items, list(items), joined)
        alone = [dict(send_to_device(joined([item]), device)) for item in items]
        known = [one for one in own.known if one.ids]
        case = TrainerCase(trainer, model, first, known=known, alone=alone, reference=own.truths)
        certificate = judge(model, _precision(trainer), case.measure, notes)
    own.truths.clear()
    own.begun.clear()
    if certificate.passed is False:
        reason = f"refused: {certificate.refused}" if certificate.refused else _reasons(certificate)
        raise ProofError(
            f"the update on flat batches is not that of its sequences one at a time, with {own.loss}: {reason}",
            fix=OWN_BATCHES if own.is_standard else f"{FLAT}, or {OWN_BATCHES}",
        )
    return certificate


def warn_of_own(own: OwnUpdate, ours: ForeignCertificate) -> None:
    """Warn of what was wrong in the trainer's own update and is right on our batches, and of what is not compared."""
    if own.failure:
        text = f"the trainer could not compute its own first update, so ours was not compared with it: {own.failure}"
        warnings.warn(text, stacklevel=4)
    elif own.certificate is not None and own.certificate.passed is False:
        text = f"the trainer's own first update was not right, and is on flat batches: {_reasons(own.certificate)}"
        text += ". predict and compute_metrics still read the trainer's own batches"
        warnings.warn(text, stacklevel=4)
    if NO_ROUTER_LOSS in ours.notes:
        text = "the router's auxiliary loss is one of each micro-batch, and flat ones have other sequences"
        warnings.warn(f"{text}: it is another, and was not compared", stacklevel=4)
