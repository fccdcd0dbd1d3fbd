"""Meaning of a script's rows: the batch that its own collator makes from each row alone.

Tokens that the collator drops, adds, moves or masks are intended by the script. If it draws random numbers, joins rows
or splits one, rows have no meaning of their own, and the rows of the batches replace those of the data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from unpad.errors import ProofError
from unpad.proof.foreign.certificate import Kind
from unpad.proof.foreign.judge import raise_memory
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
from unpad.proof.members import HasMembers

Collate = Callable[[list[object]], Collated]
OF_DATA: tuple[Kind, ...] = ("cut", "unknown", "targets")  # claims about the tokens of the data
OF_NUMBERS: tuple[Kind, ...] = ("logits", "loss", "gradient")  # claims that need the batch of a row alone


@runtime_checkable
class Rows(HasMembers, Protocol):
    """A dataset with rows that can be read in any order."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> object: ...


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
    made, reason = _collated(examples, collate)
    if reason:
        known = [one for batch in read for one, _ in _rows(batch)]
        alone = [_sliced(batch, row, cells) for batch in read for _, (row, cells) in _rows(batch)]
        return Script(known, alone, dict.fromkeys(OF_DATA, reason))
    if reason := next((found for found in map(_own_places, made) if found), ""):
        known = [one for batch in read for one, _ in _rows(batch)]
        return Script(known, None, dict.fromkeys((*OF_DATA, *OF_NUMBERS), reason))
    filled = [(example, one) for example, one in zip(examples, made, strict=True) if bool(read_batch(one).real.any())]
    return _of_rows([example for example, _ in filled], [one for _, one in filled], collate, read, packed, padding)


CHANGES = (
    "it changes the rows that it is given, and the data hold them, so that each epoch has others, as where an end is "
    "appended once more; let it change a copy"
)


def copied(row: object) -> object:
    """A row with lists, arrays and tensors that a collator may change."""
    if isinstance(row, Mapping):
        return {name: copied(value) for name, value in row.items()}
    if isinstance(row, list):
        return [copied(one) for one in row] if row and isinstance(row[0], list | dict) else list(row)
    if isinstance(row, Tensor):
        return row.clone()
    return row.copy() if isinstance(row, np.ndarray) else copy.copy(row)


def holds_row(data: Rows, number: int) -> bool:
    """True if a row that is read is an object of the data, or has one: a change of it is a change of the data."""

    def shares(one: object, other: object) -> bool:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return one.numel() > 0 and one.data_ptr() == other.data_ptr()
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
            return bool(np.may_share_memory(one, other))
        return one is other and isinstance(one, list | dict)

    with untouched_generators():
        one, other = data[number], data[number]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one is other or any(shares(value, other.get(name)) for name, value in one.items())
    return shares(one, other)


def changes_rows(row: object, collate: Collate) -> bool:
    """True if a collator makes another batch of a row, or none, once it was given it."""
    with untouched_generators():
        given = copied(row)
        once, fresh = (listed(collate([one]))[0] for one in (given, copied(row)))
        if not _alike(once, fresh):  # drawn
            return False
        try:
            again = listed(collate([given]))[0]
        except Exception as error:
            raise_memory(error)
            return True
    return not _alike(once, again)


def without_holes(batch: ForeignBatch) -> ForeignBatch:
    """The batch with every cell between the first and the last real one of a row as real."""
    after = batch.real.flip(1).cumsum(1).flip(1) > 0
    return replace(batch, real=(batch.real.cumsum(1) > 0) & after)


def _collated(examples: Sequence[object], collate: Collate) -> tuple[list[Batch], str]:
    """The batch of each example alone, or the reason why there is none."""
    made: list[Batch] = []
    with untouched_generators():
        for example in examples:
            try:
                twice = [listed(collate([copy.deepcopy(example)])) for _ in range(3)]
                shapes = {len(one) for one in twice} | {len(read_batch(batch).ids) for one in twice for batch in one}
            except ProofError:
                raise
            except MemoryError:
                raise
            except Exception as error:
                text = f"{type(error).__name__}: {error}".splitlines()[0][:100]
                return [], f"the collator takes no row alone ({text}), so no row has tokens of its own to compare with"
            if shapes != {1}:
                return [], "the collator makes several rows of one, so the data do not say what each of them is"
            if any(not _alike(twice[0][0], one[0]) for one in twice[1:]):
                return [], "the collator draws random numbers: tokens and labels are others each time"
            made.append(twice[0][0])
    return made, ""


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


def _rows(batch: ForeignBatch) -> list[tuple[Known, tuple[int, slice]]]:
    """The sequences in a batch, each of the cells between the first and the last real one of a row, with its place."""
    found = []
    for row in range(len(batch.ids)):
        real = batch.real[row].nonzero().flatten().tolist()
        if not real:
            continue
        cells = slice(real[0], real[-1] + 1)
        ids = batch.ids[row, cells].tolist()
        labels = [IGNORE, *batch.targets[row, cells].tolist()[:-1]]
        found.append((Known(ids, labels), (row, cells)))
    return found


def _sliced(batch: ForeignBatch, row: int, cells: slice) -> Batch:
    """One row of a batch without its padding, as a batch; what is not of the shape of its tokens is left out."""
    whole = {**batch.inputs, **batch.labels}
    kept = {
        name: value for name, value in whole.items() if isinstance(value, Tensor) and value.shape == batch.ids.shape
    }
    return without_first_label({name: value[row : row + 1, cells] for name, value in kept.items()})


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
    rows = [_rows(one) for one in alone]
    known = [one for row in rows for one, _ in row]
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
