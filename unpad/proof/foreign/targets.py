"""The target that a loss uses at each position, determined from its gradient.

The gradient of a loss with respect to the logits at a position is most negative at the token that the loss raises. Each
label is replaced by another token, and the change of the gradient shows where the label counts: parts of a loss that do
not read labels, such as a teacher's logits, cancel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Literal

import torch
from torch import Tensor, nn

from unpad.errors import ProofError
from unpad.proof.foreign.locate import Span
from unpad.proof.foreign.model import logits_of
from unpad.proof.foreign.update import IGNORE, Update

# Gradient of a loss with respect to the logits of a sequence alone, (length, vocabulary), from its token ids, its
# labels, and the labels that the loss is given; None if there are no logits.
Pull = Callable[[list[int], list[int], list[int]], Tensor | None]
Taken = Literal["hidden", "unclear"] | int  # distance from a position to its target: 1 is the next token

TRIED = 2  # sequences
ENOUGH = 6  # positions
AROUND = range(-1, 3)  # distances that are told apart
FAINT = 1e-6  # of the largest gradient: below this is noise from rounding and normalisation
LEAST_POOL = 8  # tokens to exchange labels for


def target_taken(update: Update, pull: Pull) -> Taken:
    """Distance from a position to the token that the loss takes for its target, for most positions of a few sequences.

    Returns:
        The distance; "hidden" if the loss computes no logits, "unclear" if positions do not agree.
    """
    counts: Counter[int | None] = Counter()
    for piece in _tried(update):
        if counts.total() >= ENOUGH:
            break
        ids, labels = update.ids_of(piece), update.labels_of(piece)
        plain = pull(ids, labels, labels)
        if plain is None:
            return "hidden"
        others = _exchanged(ids, labels, _pool(update, plain.shape[-1]))
        changed = pull(ids, labels, others)
        counts += _distances(plain, changed, ids, others) if changed is not None else Counter()
    best = max(AROUND, key=lambda distance: counts[distance])
    second = max(counts[distance] for distance in AROUND if distance != best)
    return best if 2 * counts[best] > counts.total() and counts[best] >= max(2, 3 * second) else "unclear"


def _tried(update: Update) -> list[Span]:
    """Short pieces with enough targets, else those with the most."""
    counts = [(sum(label != IGNORE for label in update.labels_of(piece)), piece) for piece in update.pieces]
    counts.sort(key=lambda pair: (-min(pair[0], ENOUGH), pair[1].length))
    return [piece for count, piece in counts[:TRIED] if count]


def _pool(update: Update, vocabulary: int) -> list[int]:
    tokens = sorted({token for one in update.known for token in one.ids})
    return tokens if len(tokens) >= LEAST_POOL else list(range(vocabulary))


def _exchanged(ids: Sequence[int], labels: Sequence[int], pool: Sequence[int]) -> list[int]:
    """Another token for each label, unlike all tokens and labels near it."""
    others: list[int] = []
    tokens = cycle(pool)
    for at, label in enumerate(labels):
        near = {*ids[max(at - 2, 0) : at + 3], *others[-3:]} if len(pool) >= LEAST_POOL else {label}
        chosen = next((one for one, _ in zip(tokens, pool, strict=False) if one not in near), label)
        others.append(IGNORE if label == IGNORE else chosen)
    return others


def _distances(plain: Tensor, changed: Tensor, ids: Sequence[int], others: Sequence[int]) -> Counter[int | None]:
    """Number of positions by the distance of their target; None for what points at no token nearby."""
    moved = changed - plain
    if float(moved.abs().max()) > FAINT * float(plain.abs().max()):
        return _pointed(moved, others)
    soft = (plain < -FAINT * plain.abs().amax(1, keepdim=True)).sum(1) > 1  # several tokens are raised, as by a teacher
    counts = _pointed(torch.where(soft[:, None], 0, plain), ids)
    counts[None] += int(soft.sum())
    return counts


def _pointed(gradient: Tensor, tokens: Sequence[int]) -> Counter[int | None]:
    sizes = gradient.abs().amax(1)
    counts: Counter[int | None] = Counter()
    for at in (sizes > FAINT * sizes.max()).nonzero().flatten().tolist():
        raised = int(gradient[at].argmin())
        fits = [one for one in AROUND if 0 <= at + one < len(tokens) and tokens[at + one] == raised]
        if len(fits) < 2:  # repeated tokens are ambiguous
            counts[fits[0] if fits else None] += 1
    return counts


def are_shifted_before(update: Update) -> bool:
    """True if most labels in the batches are the next token, not the token itself."""
    following = itself = 0
    for batch in update.batches:
        if "labels" in batch.labels:
            labels = batch.labels["labels"].reshape(batch.ids.shape)[:, :-1]
            target = (labels != IGNORE) & batch.real[:, 1:]
            following += int((target & (labels == batch.ids[:, 1:])).sum())
            itself += int((target & (labels == batch.ids[:, :-1])).sum())
    return following > 2 * itself


@contextmanager
def logits_noted(model: nn.Module) -> Iterator[list[Tensor]]:
    """Note the logits that a model returns inside, with their gradients."""
    noted: list[Tensor] = []

    def note(_: nn.Module, __: object, output: object) -> None:
        try:
            logits = logits_of(output)
        except ProofError:
            return
        if logits.requires_grad:
            logits.retain_grad()
            noted.append(logits)

    hook = model.register_forward_hook(note, prepend=True)  # those that the loss inside the model reads too
    try:
        yield noted
    finally:
        hook.remove()
