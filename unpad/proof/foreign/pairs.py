"""The certificate for a model and a collator of others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from unpad.errors import ProofError
from unpad.proof.foreign.advice import Measured, findings
from unpad.proof.foreign.certificate import ForeignCertificate
from unpad.proof.foreign.known import Collated, known_of_masks, labels_alone, listed, raise_memory, with_padding_token
from unpad.proof.foreign.measure import in_batches, moves, objective_of, one_at_a_time
from unpad.proof.foreign.model import (
    ExpertsByName,
    alone_inputs,
    logits_of,
    no_router_loss,
    untouched,
    untouched_generators,
)
from unpad.proof.foreign.precision import EXACT, NAMES, NUDGE, SEEN, Errors, by_rounding, dtype_of, relative, wide
from unpad.proof.foreign.update import ForeignBatch, Update, read_batch, read_labels, read_update

Collate = Callable[..., Collated]
Wanted = Literal["auto", "fp64", "own"]
MOST_REFUSED = 300  # characters of an exception's message
NO_ROUTER_LOSS = (
    "the router's auxiliary loss is left out: it is a mean per batch, and depends on batching by definition"
)
OWN_LOSS = "the model's loss is not the mean cross-entropy of its logits; it is compared with itself, one at a time"


def prove_callable(
    model: nn.Module,
    collate: Collate,
    sequences: Sequence[Sequence[int]],
    *,
    loss_masks: Sequence[Sequence[bool]] | None = None,
    precision: Wanted = "auto",
    seed: int = 0,
) -> ForeignCertificate:
    """Prove that the batches of a collator are, to a causal model, the sequences one at a time.

    The batches are together one update. The truth is `model(input_ids=ids)` of each sequence alone, without mask,
    positions or cache, and the mean of the cross-entropy over all targets. Nothing of the model changes.

    Args:
        model: any torch module; `model(**batch)` returns logits of every token, (rows, width, vocabulary), as a tensor
            or as `logits` of an object or mapping, and a `loss` if its `forward` has a parameter `labels`.
        collate: `collate(sequences)`, or `collate(sequences, loss_masks)` where those are given, returns a batch or a
            list of them: `input_ids`, `labels` (the token itself at each target, -100 elsewhere) or `shift_labels`,
            and whatever else the model reads.
        sequences: token ids of at least two sequences; different ones, best of different lengths.
        loss_masks: True where a token is a target; without them the targets are those that `collate([sequence])`
            labels, so that a collator may mask prompts.
        precision: "fp64" on a copy of the model, "own" in the model's dtype, or the first where the model really
            computes in fp64 ("auto"). Bounds are 1e-10 in fp64, else multiples of what one rounding of all weights
            changes.
        seed: of random numbers that the collator draws.

    Raises:
        ProofError: fewer than two sequences, none with a target, batches that cannot be read, or precision="fp64" with
            a model that computes parts in less.
    """
    with untouched_generators(seed), no_router_loss(model) as router, untouched(model):
        known = known_of_masks(sequences, loss_masks)
        if len(known) < 2:
            raise ProofError("prove needs at least two sequences", fix="pass more sequences")
        try:
            given = [list(one.ids) for one in known]
            collated = collate(given) if loss_masks is None else collate(given, [list(mask) for mask in loss_masks])
        except Exception as error:
            return ForeignCertificate((), NAMES.get(dtype_of(model), "other"), refused=refusal(error))
        batches = [read_batch(one) for one in listed(collated)]
        if loss_masks is None:
            alone = [labels_alone(partial(collate, [list(one.ids)]), one.ids) for one in known]
            known = [replace(one, labels=labels) for one, labels in zip(known, alone, strict=True)]
            known = with_padding_token(known, batches)
        update = read_update(batches, known)
        if update.num_wanted == 0:
            raise ProofError("no sequence of the batches has a target", fix="pass sequences of two or more tokens")
        notes = (NO_ROUTER_LOSS,) if router else ()
        with ready(model, update, precision) as subject:
            return certify_update(subject, update, notes)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model in evaluation mode, ready to compute in the precision of the proof."""

    model: nn.Module
    dtype: torch.dtype
    update: Update


def certify_update(subject: Subject, update: Update, notes: tuple[str, ...]) -> ForeignCertificate:
    """Measure an update in both ways, and judge it."""
    model, update = subject.model, subject.update
    exact = subject.dtype == torch.float64
    objective = objective_of(model, update, max(1e-5, 16 * torch.finfo(subject.dtype).eps))
    notes = (*notes, OWN_LOSS) if objective.own else notes
    size = (len({piece.sequence for piece in update.pieces}), sum(p.length for p in update.pieces), update.num_wanted)
    truth = one_at_a_time(model, update, objective)
    try:
        found = in_batches(model, update, objective)
        moved = moves(lambda inputs: model(**inputs), update)
    except ProofError:
        raise
    except Exception as error:
        return ForeignCertificate((), NAMES.get(subject.dtype, "other"), refusal(error), notes, *size)
    if moved.itself == 0:
        raise ProofError("the logits do not depend on the tokens", fix="prove a model with weights other than zero")
    if exact:
        bounds = Errors(EXACT, EXACT, EXACT)
    else:
        own = by_rounding(model, torch.finfo(subject.dtype).eps, lambda: one_at_a_time(model, update, objective))
        bounds = own.errors(truth).bounds(subject.dtype)
    measured = Measured(update, read_labels(update), found.errors(truth), moved, bounds, bool(truth.gradient))
    name = NAMES.get(subject.dtype, "other")
    return ForeignCertificate(findings(model, measured), name, None, notes, *size)


@contextmanager
def ready(model: nn.Module, update: Update, precision: Wanted) -> Iterator[Subject]:
    """A copy of the model in fp64 where that is wanted and possible, else the model itself, in evaluation mode."""
    if precision != "own":
        exact = _in_fp64(model, update)
        if exact is not None:
            with wide():
                yield Subject(exact, torch.float64, _to(update, next(exact.parameters()).device, torch.float64))
            return
        if precision == "fp64":
            raise ProofError("the model computes parts in less than fp64", fix='use precision="auto"')
    model.eval()
    yield Subject(model, dtype_of(model), _to(update, next(model.parameters()).device, None))


def _in_fp64(model: nn.Module, update: Update) -> nn.Module | None:
    """A copy that computes in fp64, or None: it cannot be copied or raises, or a part of it computes in less."""
    try:
        exact = copy.deepcopy(model).double().eval()
    except Exception as error:
        raise_memory(error)
        return None
    exact.zero_grad(set_to_none=True)
    for experts in (None, "eager"):  # the grouped products of transformers' experts have no fp64
        if experts is not None:
            if not isinstance(exact, ExpertsByName):
                return None
            exact.set_experts_implementation(experts)
        try:
            with wide(), torch.no_grad():
                return exact if _is_exact(exact, update) else None
        except Exception as error:
            raise_memory(error)
    return None


def _is_exact(model: nn.Module, update: Update) -> bool:
    """True if a change of all weights that fp32 cannot see moves the logits by about as much."""
    piece = min((piece for piece in update.pieces if piece.length > 1), key=lambda piece: piece.length)
    inputs = alone_inputs(model, update.ids_of(piece))

    def logits() -> Tensor:
        return logits_of(model(**inputs))

    before = logits()
    response = relative(by_rounding(model, NUDGE, logits), before)
    return before.dtype == torch.float64 and SEEN[0] <= response <= SEEN[1]


def _to(update: Update, device: torch.device, floats: torch.dtype | None) -> Update:
    """The update on a device, with inputs that are floating-point numbers in another dtype."""

    def moved(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        value = value.to(device)
        return value.to(floats) if floats is not None and value.is_floating_point() else value

    batches = [
        ForeignBatch(
            {name: moved(value) for name, value in batch.inputs.items()},
            {name: value.to(device) for name, value in batch.labels.items()},
            batch.ids.to(device),
            batch.targets.to(device),
            batch.real.to(device),
        )
        for batch in update.batches
    ]
    owners, filler = [one.to(device) for one in update.owners], [one.to(device) for one in update.filler]
    return replace(update, batches=batches, owners=owners, filler=filler)


def refusal(error: Exception) -> str:
    """The message of an exception on one line.

    Raises:
        Exception: the given one, if memory is lacking: that says nothing about a batch.
    """
    raise_memory(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MOST_REFUSED]}".rstrip(": ")
