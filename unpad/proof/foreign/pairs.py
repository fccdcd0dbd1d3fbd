"""The certificate for an external model and collator."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from unpad.errors import ProofError
from unpad.proof.foreign.certificate import ForeignCertificate
from unpad.proof.foreign.judge import NO_ROUTER_LOSS, ComparedUpdate, Precision, judge, raise_memory, refused
from unpad.proof.foreign.measure import OTHER_LOSS, error_of_loss, in_batches, one_at_a_time
from unpad.proof.foreign.model import no_router_loss, untouched, untouched_generators
from unpad.proof.foreign.update import (
    IGNORE,
    Batch,
    Collated,
    ForeignBatch,
    LabelledSequence,
    Update,
    beside_tokens,
    converted,
    has_media,
    labelled,
    listed,
    read_batch,
    read_update,
)

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
        ProofError: fewer than two sequences, none with a target, batches that cannot be read, a model with another loss
            than the mean cross-entropy of its logits, or precision="fp64" with a model that computes parts in less.
    """
    with untouched_generators(seed), no_router_loss(model) as router, untouched(model):
        notes = [NO_ROUTER_LOSS] if router else []
        given = labelled(sequences, loss_masks)
        if len(given) < 2:
            raise ProofError("prove needs at least two sequences", fix="pass more sequences")
        ids = [list(one.ids) for one in given]
        try:
            collated = collate(ids) if loss_masks is None else collate(ids, [list(mask) for mask in loss_masks])
        except Exception as error:
            return ForeignCertificate((), "fp32", str(refused(error)), tuple(notes))
        batches = [read_batch(one) for one in listed(collated)]
        if any(map(has_media, listed(collated))):
            masks = [None] * len(given) if loss_masks is None else loss_masks
            given = [_with_beside(collate, one, mask) for one, mask in zip(given, masks, strict=True)]
        if loss_masks is None:
            given = _with_padding_token([_alone(collate, one) for one in given], batches)
        update = read_update(batches, given)
        model.eval()
        return judge(model, precision, partial(_compare, model, update), notes)


def _made_alone(
    collate: Collate, one: LabelledSequence, mask: Sequence[bool] | None = None
) -> list[tuple[Batch, ForeignBatch]]:
    """The batches that a collator makes of a sequence alone, each also as read; none if it cannot."""
    try:
        made = listed(collate([list(one.ids)]) if mask is None else collate([list(one.ids)], [list(mask)]))
        return [(batch, read_batch(batch)) for batch in made]
    except Exception as error:
        raise_memory(error)
        return []


def _with_beside(collate: Collate, one: LabelledSequence, mask: Sequence[bool] | None) -> LabelledSequence:
    """A sequence with what a collator gives besides its tokens, such as pixels, in a batch of it alone.

    Raises:
        ProofError: it makes no batch of it alone.
    """
    made = _made_alone(collate, one, mask)
    if len(made) != 1 or len(made[0][1].real) != 1 or int(made[0][1].real.sum()) != len(one.ids):
        what = "the collator gives no batch of one sequence alone with its pixels or other features"
        raise ProofError(what, fix="let it take a list of one sequence")
    return replace(one, beside=beside_tokens(made[0][0], made[0][1].real[0]))


def _alone(collate: Collate, whole: LabelledSequence) -> LabelledSequence:
    """A sequence with the labels that a collator gives to it alone; all its tokens if it cannot collate one."""
    batches = [read for _, read in _made_alone(collate, whole)]
    update = read_update(batches, [whole])
    if len(update.pieces) != 1 or update.pieces[0].length != len(whole.ids):
        return whole
    targets = next(
        batch.targets[row, cells].tolist()
        for number, batch in enumerate(batches)
        for _, row, cells in update.places(number)
    )
    pairs = zip(whole.ids[1:], targets, strict=False)
    return replace(whole, labels=[IGNORE, *(token if target != IGNORE else IGNORE for token, target in pairs)])


def _with_padding_token(sequences: list[LabelledSequence], batches: Sequence[ForeignBatch]) -> list[LabelledSequence]:
    """Restore real tokens as targets if a collator left out exactly those that equal its padding."""
    padding = {token for batch in batches for token in batch.ids[~batch.real].tolist()}
    pairs = [pair for one in sequences for pair in zip(one.ids[1:], one.labels[1:], strict=True)]
    if padding and {token for token, label in pairs if label == IGNORE} == padding:
        return labelled([one.ids for one in sequences], None)
    return sequences


def _compare(model: nn.Module, update: Update, exact: bool) -> ComparedUpdate:
    """The update in a precision."""
    update = converted(update, device=next(model.parameters()).device, floats=torch.float64 if exact else None)
    sequences = update.one_at_a_time()
    error = error_of_loss(model, sequences)
    if error is not None and error > OTHER_LOSS:
        raise ProofError(
            f"the loss of {type(model).__name__} for a sequence alone is not the mean cross-entropy of its logits over "
            "the next tokens, and only that one is judged",
            fix="let it shift the labels once, or pass a module whose forward takes no labels: its logits are judged",
        )
    return ComparedUpdate(
        update,
        lambda: one_at_a_time(model, sequences),
        lambda: in_batches(model, update, returned=error is not None),
        lambda inputs: model(**inputs),
    )
