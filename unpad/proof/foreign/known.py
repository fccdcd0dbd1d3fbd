"""The sequences of an update with their targets, and those of a data row, by a collator's input and output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.errors import OutOfMemoryError, ProofError, is_memory_error
from unpad.proof.foreign.update import IGNORE, ForeignBatch, Known, read_batch, read_update

Batch = Mapping[str, object]
Collated = Batch | Sequence[Batch]
Example = Mapping[str, object]
LENGTHS = "seq_lengths"  # of the sequences packed in an example of TRL


def known_of_masks(sequences: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]] | None) -> list[Known]:
    """The sequences with the targets of masks, by default all tokens but the first.

    Raises:
        ProofError: a sequence is empty, or masks have other lengths.
    """
    ids = [[int(token) for token in one] for one in sequences]
    if not ids or not all(ids):
        raise ProofError("there is no sequence, or an empty one", fix="pass sequences of at least one token")
    if masks is None:
        return [Known(one, labels_of_all(one)) for one in ids]
    if [len(mask) for mask in masks] != [len(one) for one in ids]:
        raise ProofError("loss_masks have other lengths than the sequences", fix="pass one flag for every token")
    pairs = [zip(one, mask, strict=True) for one, mask in zip(ids, masks, strict=True)]
    labels = [[token if flag and at else IGNORE for at, (token, flag) in enumerate(pair)] for pair in pairs]
    return [Known(one, label) for one, label in zip(ids, labels, strict=True)]


def labels_of_all(ids: list[int]) -> list[int]:
    return [IGNORE, *ids[1:]]


def labels_alone(collate: Callable[[], Collated], ids: list[int]) -> list[int]:
    """Labels that a collator gives to a sequence alone; all its tokens if it cannot collate one.

    Args:
        collate: makes the batch of the sequence alone.
    """
    try:
        batches = [read_batch(one) for one in listed(collate())]
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or is_memory_error(error):
            raise
        return labels_of_all(ids)
    update = read_update(batches, [Known(ids, labels_of_all(ids))])
    if len(update.pieces) != 1 or update.pieces[0].length != len(ids):
        return labels_of_all(ids)
    row, cells, batch = next(
        (row, cells, batch) for number, batch in enumerate(batches) for _, row, cells in update.places(number)
    )
    targets = batch.targets[row, cells.start : cells.stop - 1].tolist()
    return [IGNORE, *(token if target != IGNORE else IGNORE for token, target in zip(ids[1:], targets, strict=True))]


def with_padding_token(known: list[Known], batches: Sequence[ForeignBatch]) -> list[Known]:
    """Restore real tokens as targets if a collator left out exactly those that equal its padding."""
    padding = {token for batch in batches for token in batch.ids[~batch.real].tolist()}
    pairs = [pair for one in known for pair in zip(one.ids[1:], one.labels[1:], strict=True)]
    if padding and {token for token, label in pairs if label == IGNORE} == padding:
        return [replace(one, labels=labels_of_all(one.ids)) for one in known]
    return known


@dataclass(frozen=True)
class Padding:
    """Tokens with which a tokenizer pads and ends sequences; None if not defined."""

    token: int | None = None
    end: int | None = None


def known_of_examples(
    examples: Iterable[object],
    collate: Callable[[list[object]], Collated],
    *,
    packed: bool,
    padding: Padding = Padding(),
) -> tuple[list[Known], bool]:
    """Sequences of the examples given to a collator, and True if their labels come from the collator only.

    Tokens hidden by `attention_mask` at the ends of an example are padding, not part of the sequence.

    Args:
        collate: the collator.
        packed: an example holds several sequences, possibly without their boundaries.
        padding: the tokenizer's tokens, for examples without a mask, and for packed ones.

    Raises:
        ProofError: examples without input_ids, or packed ones without lengths and ends.
    """
    rows = _shifted_back([_row(example) for example in examples])
    spans = [row.span for row in rows]
    if not packed and all(row.is_whole for row in rows):
        spans = _unmarked([row.ids for row in rows], padding)
    known: list[Known] = []
    by_collator = False
    for row, span in zip(rows, spans, strict=True):
        ids = row.ids[span]
        if row.labels is None:
            by_collator = True
            labels = labels_alone(partial(collate, [row.example]), ids)
        else:
            labels = row.labels[span]
        if LENGTHS in row.example:
            lengths = _integers(row.example[LENGTHS])
        else:
            lengths = _lengths_by_end(ids, padding.end) if packed else [len(ids)]
        at = 0
        for length in lengths:
            known.append(Known(ids[at : at + length], [IGNORE, *labels[at + 1 : at + length]]))
            at += length
    return [one for one in known if one.ids], by_collator


@dataclass(frozen=True)
class TrainerRow:
    """An example: its tokens and labels, and the place of the tokens that its mask shows."""

    example: Example
    ids: list[int]
    labels: list[int] | None
    span: slice

    @property
    def is_whole(self) -> bool:
        return LENGTHS not in self.example and self.span == slice(0, len(self.ids))


def _row(example: object) -> TrainerRow:
    if not isinstance(example, Mapping) or "input_ids" not in example:
        raise ProofError("the data have no input_ids", fix="pass the token ids as sequences=")
    ids = _integers(example["input_ids"])
    labels = _integers(example["labels"]) if "labels" in example else None
    mask = _integers(example["attention_mask"]) if "attention_mask" in example else []
    shown = [at for at, flag in enumerate(mask) if flag] if len(mask) == len(ids) else range(len(ids))
    return TrainerRow(example, ids, labels, slice(shown[0], shown[-1] + 1) if shown else slice(0, 0))


def _shifted_back(rows: list[TrainerRow]) -> list[TrainerRow]:
    """Rows with the tokens themselves for labels, also where the data have the next token in their place."""
    trios = [
        (label, token, following)
        for row in rows
        if row.labels is not None
        for label, token, following in zip(row.labels[row.span], row.ids[row.span], row.ids[row.span][1:], strict=False)
        if label != IGNORE
    ]
    itself = sum(label == token for label, token, _ in trios)
    if sum(label == following for label, _, following in trios) <= 2 * itself:
        return rows
    return [row if row.labels is None else replace(row, labels=[IGNORE, *row.labels[:-1]]) for row in rows]


def _unmarked(rows: Sequence[list[int]], padding: Padding) -> list[slice]:
    """Places of the sequences in rows without a mask, or with masks of ones, that may be padded to one length.

    Padding is a run of two or more padding tokens at an end. If that token may also end sequences, most rows must have
    such a run, and the first token of a run on the right is the sequence's own end.
    """
    whole = [slice(0, len(row)) for row in rows]
    token = _repeated_at_ends(rows) if padding.token is None else padding.token
    if token is None or len({len(row) for row in rows}) > 1:
        return whole
    may_end = padding.token is None or token == padding.end
    spans = []
    for row in rows:
        real = [at for at, one in enumerate(row) if one != token]
        start, stop = (real[0], real[-1] + 1) if real else (0, len(row))
        start, stop = start if start > 1 else 0, stop + may_end if len(row) - stop > 1 else len(row)
        spans.append(slice(start, stop))
    num_padded = sum(span != everything for span, everything in zip(spans, whole, strict=True))
    return whole if may_end and 2 * num_padded <= len(rows) else spans


def _repeated_at_ends(rows: Sequence[list[int]]) -> int | None:
    """The token that stands twice at an end of most rows."""
    ends = Counter(pair[0] for row in rows for pair in (row[:2], row[-2:]) if len(row) > 2 and pair[0] == pair[1])
    return ends.most_common(1)[0][0] if ends else None


def _lengths_by_end(ids: list[int], end: int | None) -> list[int]:
    """Lengths of the sequences in a row, where each ends with a token `end`; what follows the last is one more."""
    if end is None or end not in ids:
        raise ProofError(
            "the data are packed, and do not say where sequences begin",
            fix='use packing_strategy="bfd", or pass the token ids as sequences=',
        )
    edges = [0, *(at + 1 for at, token in enumerate(ids) if token == end), len(ids)]
    return [high - low for low, high in pairwise(edges) if high > low]


def _integers(values: object) -> list[int]:
    if isinstance(values, Tensor):
        return [int(value) for value in values.flatten().tolist()]
    if not isinstance(values, Iterable):
        raise ProofError("the data have a row that is no list of token ids", fix="pass the token ids as sequences=")
    return [int(value) for value in values]


def example_of(known: Known, like: object) -> Example:
    """A sequence alone as an example for a trainer's collator, with the columns of another example."""
    columns = set(like) if isinstance(like, Mapping) else set()
    made: dict[str, object] = {"input_ids": list(known.ids), "labels": list(known.labels)}  # collators may change them
    made["attention_mask"] = [1] * len(known.ids)
    made[LENGTHS] = [len(known.ids)]
    kept = {name: value for name, value in made.items() if name in columns or name == "input_ids"}
    tensors = isinstance(like, Mapping) and isinstance(like.get("input_ids"), Tensor)
    return {name: torch.tensor(value) for name, value in kept.items()} if tensors else kept


def listed(collated: Collated) -> list[Batch]:
    return [collated] if isinstance(collated, Mapping) else list(collated)


def sequences_alone(collated: Collated, lengths: Sequence[int] | None = None) -> list[Known]:
    """Read the batch of one row: its real tokens, and their labels.

    Args:
        lengths: of the sequences packed in the row; by default the row is split where positions restart. Trailing
            tokens without a label are fill.

    Raises:
        ProofError: the batch has several rows, or lengths are not those of its tokens.
    """
    batches = [read_batch(one) for one in listed(collated)]
    if len(batches) != 1 or len(batches[0].ids) != 1:
        raise ProofError("the collator makes no single row of a single example", fix="collate each example to one row")
    batch = batches[0]
    if not batch.ids.numel():
        return []
    labels = F.pad(batch.targets[:, :-1], (1, 0), value=IGNORE)  # of the token itself, and not of the one after it
    real = batch.real[0]
    ids, kept = batch.ids[0][real].tolist(), (labels[0][real] != IGNORE).tolist()
    if lengths is None:
        ends = [*batch.starts()[0][real].nonzero().flatten().tolist(), len(ids)]
        ends = ends if ends[0] == 0 else [0, *ends]
        while len(ends) > 2 and ends[-1] - ends[-2] == 1:  # fill, each token at position 0
            ends.pop()
    else:
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + int(length))
    if ends[-1] != len(ids) and (ends[-1] > len(ids) or any(kept[ends[-1] :])):
        raise ProofError(f"a row has {len(ids)} tokens and lengths of {ends[-1]}", fix="pack the rows again")
    return [
        Known(
            ids[start:stop],
            [ids[at] if kept[at] and at > start else IGNORE for at in range(start, stop)],
        )
        for start, stop in pairwise(ends)
    ]


def without_first_label(batch: Mapping[str, object]) -> dict[str, object]:
    """The batch of one row without the label of its first token, which no position predicts.

    Some trainers count it as a target of an update. Labels that differ from the tokens at their places stay.
    """
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if not isinstance(ids, Tensor) or not isinstance(labels, Tensor) or ids.shape != labels.shape:
        return dict(batch)
    mask = batch.get("attention_mask")
    hides = isinstance(mask, Tensor) and mask.shape == ids.shape
    real = mask > 0 if isinstance(mask, Tensor) and hides else torch.ones_like(ids, dtype=torch.bool)
    learnt = real & (labels != IGNORE)
    if not bool(real.any()) or not torch.equal(labels[learnt], ids[learnt]):
        return dict(batch)
    made = labels.clone()
    made.view(-1)[int(real.flatten().nonzero()[0])] = IGNORE
    return {**batch, "labels": made}
