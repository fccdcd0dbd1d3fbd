"""Meaning of a script's rows: the batch that its own collator makes from each row alone.

Tokens that the collator drops, adds or masks are intended by the script. One that draws random numbers, joins rows or
splits one, hides tokens inside a row or makes positions of its own gives rows no meaning, and is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unpad.errors import ProofError
from unpad.proof.foreign.certificate import Kind
from unpad.proof.foreign.judge import describe, raise_memory
from unpad.proof.foreign.known import (
    LENGTHS,
    Batch,
    Collated,
    Padding,
    known_of_examples,
    listed,
    sequences_alone,
    with_padding_token,
    without_first_label,
)
from unpad.proof.foreign.model import untouched_generators
from unpad.proof.foreign.update import (
    IGNORE,
    TURNED,
    TURNED_FIX,
    ForeignBatch,
    Known,
    read_batch,
    read_labels,
    read_update,
)

Collate = Callable[[list[object]], Collated]
SEQUENCES = "pass the token ids as sequences=, or prove the model by unpad.prove_callable"


@dataclass(frozen=True, eq=False)
class Script:
    """Sequences of an update as intended by the script.

    Args:
        alone: batch of each of `known`; None where the collator of an example like others makes it.
        unjudged: kinds of findings that cannot be judged, with the reason.
        doubts: behaviour that may or may not be intended, one sentence each.
    """

    known: list[Known]
    alone: list[Batch] | None = None
    unjudged: Mapping[Kind, str] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()


def read_script(
    examples: Sequence[object], collate: Collate, batches: Sequence[Batch], *, packed: bool, padding: Padding
) -> Script:
    """Sequences of the examples given to a collator, from its batch of each example alone.

    Args:
        batches: those of the update.
        packed, padding: as of `known_of_examples`.

    Raises:
        ProofError: batches without input_ids or labels, or packed examples without boundaries of their sequences.
    """
    read = [read_batch(batch) for batch in batches]
    if packed and not all(isinstance(one, Mapping) and LENGTHS in one for one in examples):
        known, by_collator = known_of_examples(examples, collate, packed=True, padding=padding)
        return Script(with_padding_token(known, read) if by_collator else known)
    made = _collated(examples, collate)
    if reason := next((found for found in map(_own_places, made) if found), ""):
        raise ProofError(reason, fix=SEQUENCES)
    filled = [(example, one) for example, one in zip(examples, made, strict=True) if bool(read_batch(one).real.any())]
    return _of_rows([example for example, _ in filled], [one for _, one in filled], collate, read, packed, padding)


def _collated(examples: Sequence[object], collate: Collate) -> list[Batch]:
    """The batch of each example alone.

    Raises:
        ProofError: the collator takes no row alone, makes several of it, or draws random numbers.
    """
    made: list[Batch] = []
    with untouched_generators():
        for example in examples:
            try:
                tries = [listed(collate([copy.deepcopy(example)])) for _ in range(3)]
                shapes = {len(one) for one in tries} | {len(read_batch(batch).ids) for one in tries for batch in one}
            except ProofError:
                raise
            except Exception as error:
                raise_memory(error)
                raise ProofError(f"the collator takes no row alone: {describe(error)}", fix=SEQUENCES) from error
            if shapes != {1}:
                raise ProofError("the collator makes several rows of one", fix=SEQUENCES)
            if any(not _alike(tries[0][0], one[0]) for one in tries[1:]):
                raise ProofError("the collator draws random numbers", fix="draw them once, when the dataset is made")
            made.append(tries[0][0])
    return made


def _alike(one: Batch, other: Batch) -> bool:
    def same(a: object, b: object) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)

    return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)


def _own_places(made: Batch) -> str:
    """The reason why a row is not its tokens alone: a mask with holes, or positions of its own; empty for none."""
    batch = read_batch(made)
    real = batch.real[0].nonzero().flatten()
    if len(real) and int(real[-1] - real[0]) + 1 != len(real):
        return "attention_mask hides tokens in the middle of a row, which is then not its tokens alone"
    positions = batch.rectangle("position_ids")
    if positions is not None and len(real):
        own = positions[0][real]
        starts = [at for at, start in enumerate(batch.starts()[0][real].tolist()) if start or at == 0]
        if any(int(own[at]) != 0 for at in starts):
            return "position_ids are of the script's own making, so a row is not its tokens alone"
    return ""


def _rows(batch: ForeignBatch) -> list[Known]:
    """The sequences in a batch, each of the cells between the first and the last real one of a row."""
    found = []
    for row in range(len(batch.ids)):
        real = batch.real[row].nonzero().flatten().tolist()
        if real:
            cells = slice(real[0], real[-1] + 1)
            labels = [IGNORE, *batch.targets[row, cells].tolist()[:-1]]
            found.append(Known(batch.ids[row, cells].tolist(), labels))
    return found


def _of_rows(
    examples: Sequence[object],
    made: list[Batch],
    collate: Collate,
    batches: list[ForeignBatch],
    packed: bool,
    padding: Padding,
) -> Script:
    """Rows that the collator takes alone: their tokens are the data's, or those that it makes of them."""
    alone = [read_batch(one) for one in made]
    has_lengths = any(isinstance(one, Mapping) and LENGTHS in one for one in examples)
    # Rows that were packed by hand; where the data say what was packed, positions are judged by that.
    if not has_lengths and any(int(one.starts()[0][one.real[0]][1:].sum()) for one in alone):
        return Script([sequence for one in made for sequence in sequences_alone(one)])
    if all(map(_keeps_data, examples, alone)) and not _hides_ends(alone):
        known, by_collator = known_of_examples(examples, collate, packed=packed, padding=padding)
        doubts: tuple[str, ...] = ()
        if by_collator and (whole := with_padding_token(known, batches)) is not known:
            token = next(b for a, b in _pairs(known, whole) if a == IGNORE)
            doubts = (
                f"the collator leaves out the label of each token {token}; is it also the padding? Nothing is learnt "
                "of it unless padding has a token of its own",
            )
        hidden = _hidden_targets(known, alone) if len(known) == len(alone) else 0
        if hidden:
            reason = f"{hidden} targets are padding of the data, which attention_mask hides; set their labels to -100"
            reason += ", unless padding is to be learnt"
            return Script(known, None, dict.fromkeys(("padding", "loss", "gradient"), reason))
        one_each = len(known) == len(made)
        return Script(known, [without_first_label(one) for one in made] if one_each else None, {}, doubts)
    known = [one for batch in alone for one in _rows(batch)]
    given = [_listed(one.get("input_ids")) if isinstance(one, Mapping) else [] for one in examples]
    if all(len(set(ids)) > 1 and one.ids == ids[::-1] for one, ids in zip(known, given, strict=False)):
        raise ProofError(TURNED, fix=TURNED_FIX)
    wrong = sum(a not in (IGNORE, b) for one in known for a, b in zip(one.labels, one.ids, strict=True))
    doubt = f"{wrong} labels that the collator makes are not the tokens at their places; are they shifted twice?"
    return Script(known, [without_first_label(one) for one in made], {}, (doubt,) if wrong else ())


def _keeps_data(example: object, batch: ForeignBatch) -> bool:
    """True if the collator gives an example its own tokens, and its own labels if it has any."""
    if not isinstance(example, Mapping) or "input_ids" not in example:
        return False
    ids, mask = _listed(example["input_ids"]), _listed(example.get("attention_mask"))
    shown = [bool(flag) for flag in mask] if len(mask) == len(ids) else [True] * len(ids)
    given, real = batch.ids[0].tolist(), batch.real[0].tolist()
    tokens = [token for token, flag in zip(given, real, strict=True) if flag]
    if given[: len(ids)] != ids and tokens != [token for token, flag in zip(ids, shown, strict=True) if flag]:
        return False
    if LENGTHS in example:
        return True
    if "labels" not in example:
        labels = [label for label in batch.targets[0].tolist() if label != IGNORE]
        return all(label in ids for label in labels) and _are_next(batch)
    wanted = _listed(example["labels"])
    targets = [label for label in wanted[1:] if label != IGNORE]
    found = [label for label in batch.targets[0].tolist() if label != IGNORE]
    return found in (
        targets,
        [label for label, flag in zip(wanted, shown, strict=True) if flag and label != IGNORE][1:],
    )


def _hides_ends(alone: Sequence[ForeignBatch]) -> bool:
    """True if all targets that a mask hides are the ends of their rows, as where the end token is also the padding."""
    hidden = [~batch.shown[:, 1:] & (batch.targets[:, :-1] != IGNORE) for batch in alone]
    ends = [bool(batch.real[:, 1:][cells].all()) for batch, cells in zip(alone, hidden, strict=True)]
    return all(ends) and any(bool(cells.any()) for cells in hidden)


def _are_next(batch: ForeignBatch) -> bool:
    """True if every target is the token after its place."""
    targets, following = batch.targets[0, :-1], batch.ids[0, 1:]
    return bool(((targets == IGNORE) | (targets == following)).all())


def _listed(value: object) -> list[int]:
    if value is None:
        return []
    return [int(one) for one in (value.flatten().tolist() if isinstance(value, Tensor) else list(value))]  # type: ignore[call-overload]


def _pairs(known: Sequence[Known], whole: Sequence[Known]) -> list[tuple[int, int]]:
    return [
        pair for one, two in zip(known, whole, strict=True) for pair in zip(one.labels[1:], two.labels[1:], strict=True)
    ]


def _hidden_targets(known: list[Known], alone: list[ForeignBatch]) -> int:
    """Number of targets that are padding which a mask hides, in rows alone as well as in batches."""
    num = 0
    for one, batch in zip(known, alone, strict=True):
        labels = read_labels(read_update([batch], [one]))
        cells = (batch.targets[0, :-1] != IGNORE) & ~batch.shown[0, 1:]
        if labels.padding_predicts or labels.padding_predicted != int(cells.sum()):
            return 0
        num += labels.padding_predicted
    return num
