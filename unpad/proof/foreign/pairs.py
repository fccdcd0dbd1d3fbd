"""The certificate for an external model and collator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from unpad.errors import ProofError
from unpad.proof.foreign.certificate import ForeignCertificate
from unpad.proof.foreign.judge import NO_ROUTER_LOSS, OWN_LOSS, Outcome, Precision, judge, refused
from unpad.proof.foreign.known import Collated, known_of_masks, labels_alone, listed, with_padding_token
from unpad.proof.foreign.measure import (
    EPS,
    Errors,
    UpdateResults,
    by_rounding,
    in_batches,
    moves,
    objective_of,
    one_at_a_time,
    take_gradient,
)
from unpad.proof.foreign.model import alone_inputs, called, loss_of, no_router_loss, untouched, untouched_generators
from unpad.proof.foreign.targets import logits_noted, target_taken
from unpad.proof.foreign.update import ForeignBatch, Update, read_batch, read_update, refuse_missing

Collate = Callable[..., Collated]


def prove_callable(
    model: nn.Module,
    collate: Collate,
    sequences: Sequence[Sequence[int]],
    *,
    loss_masks: Sequence[Sequence[bool]] | None = None,
    precision: Precision = "auto",
    seed: int = 0,
) -> ForeignCertificate:
    """Prove that a causal model computes the same from a collator's batches as from the sequences one at a time.

    The batches together are one update. The reference is `model(input_ids=ids)` of each sequence alone, without mask,
    positions or cache, and the mean of the cross-entropy over all targets. The model is left unchanged.

    Args:
        model: any torch module; `model(**batch)` returns logits of every token, (rows, width, vocabulary), as a tensor,
            in a tuple, or as `logits` of an object or mapping, and a `loss` if its `forward` has a parameter `labels`.
        collate: `collate(sequences)`, or `collate(sequences, loss_masks)` where those are given, returns a batch or a
            list of them: `input_ids`, `labels` (the token itself at each target, -100 elsewhere) or `shift_labels`,
            and whatever else the model reads.
        sequences: token ids of at least two sequences; different ones, best of different lengths.
        loss_masks: True where a token is a target; without them the targets are those that `collate([sequence])`
            labels, so that a collator may mask prompts.
        precision: "fp64", "fp32" (weights of less are widened), or "auto": the first where the model computes in it
            and has at most 100 million weights. Bounds are 1e-10 in fp64; in fp32 they are 32 times what one rounding
            of all weights changes in the sequences alone.
        seed: of random numbers that the collator draws.

    Raises:
        ProofError: fewer than two sequences, none with a target, batches that cannot be read, or precision="fp64" with
            a model that computes parts in less.
    """
    with untouched_generators(seed), no_router_loss(model) as router, untouched(model):
        notes = [NO_ROUTER_LOSS] if router else []
        known = known_of_masks(sequences, loss_masks)
        if len(known) < 2:
            raise ProofError("prove needs at least two sequences", fix="pass more sequences")
        given = [list(one.ids) for one in known]
        try:
            collated = collate(given) if loss_masks is None else collate(given, [list(mask) for mask in loss_masks])
        except Exception as error:
            return ForeignCertificate((), "fp32", str(refused(error)), tuple(notes))
        batches = [read_batch(one) for one in listed(collated)]
        if loss_masks is None:
            alone = [labels_alone(partial(collate, [list(one.ids)]), one.ids) for one in known]
            known = [replace(one, labels=labels) for one, labels in zip(known, alone, strict=True)]
            known = with_padding_token(known, batches)
        update = read_update(batches, known)
        refuse_missing(update)
        model.eval()
        return judge(model, precision, partial(_measure, model, update), notes)


def _measure(model: nn.Module, update: Update, exact: bool) -> Outcome:
    """Both ways to compute the update."""
    update = moved_to(update, next(model.parameters()).device, torch.float64 if exact else None)
    objective = objective_of(model, update)
    truth = one_at_a_time(model, update, objective)

    def again() -> UpdateResults:
        return in_batches(model, update, objective)

    def rounding() -> Errors:
        return by_rounding(model, EPS, lambda: one_at_a_time(model, update, objective)).errors(truth)

    try:
        found = in_batches(model, update, objective)
        moved = moves(partial(called, model), update)
    except ProofError:
        raise
    except Exception as error:
        raise refused(error) from error
    if not objective.own:
        return Outcome(update, truth, found, moved, rounding, again)
    taken = target_taken(update, partial(_pull, model))
    return Outcome(update, truth, found, moved, rounding, again, (OWN_LOSS,), taken)


def _pull(model: nn.Module, ids: list[int], _: list[int], given: list[int]) -> Tensor | None:
    """Gradient of the model's loss of a sequence alone with respect to its logits; see `targets.Pull`."""
    labels = torch.tensor([given], device=next(model.parameters()).device)
    with logits_noted(model) as noted:
        loss = loss_of(model(**alone_inputs(model, ids), labels=labels))
    if loss is None or not loss.requires_grad or not noted:
        return None
    loss.backward()
    take_gradient(model)
    return None if noted[0].grad is None else noted[0].grad[0]


def moved_to(update: Update, device: torch.device, floats: torch.dtype | None) -> Update:
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
            batch.shown.to(device),
        )
        for batch in update.batches
    ]
    owners, filler = [one.to(device) for one in update.owners], [one.to(device) for one in update.filler]
    return replace(update, batches=batches, owners=owners, filler=filler)
