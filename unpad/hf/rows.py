"""Rows of a dataset as a trainer's own collator gives them alone: tokens and targets, without padding."""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer

from unpad.errors import ProofError, RecipeError, SourceError
from unpad.hf.loader import IGNORED, PACKED, refuse_streams
from unpad.proof.foreign.judge import describe, raise_memory
from unpad.proof.foreign.model import untouched_generators
from unpad.proof.foreign.update import (
    ForeignBatch,
    LabelledSequence,
    beside_tokens,
    count_cut,
    has_media,
    listed,
    read_batch,
    read_labels,
    read_update,
)

CHECKED = 24  # rows that a collator is tried on again and in batches
Collator = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class CollatedRow:
    """The real tokens of a row in the collator's batch of it alone.

    Args:
        ids, labels: of each token.
        lengths: of the sequences in it.
        beside: what the batch has besides, such as pixels; of a row with one sequence.
    """

    ids: list[int]
    labels: list[int]
    lengths: list[int]
    beside: Mapping[str, object] = field(default_factory=dict, compare=False)

    def sequences(self) -> list[LabelledSequence]:
        """The sequences in the row. The first token of each has no label, as no position predicts it."""
        spans = [slice(start, stop) for start, stop in pairwise(accumulate(self.lengths, initial=0)) if start < stop]
        return [LabelledSequence(self.ids[span], [IGNORED, *self.labels[span][1:]], self.beside) for span in spans]


class CollatedRows:
    """Rows of a dataset, each as the trainer's collator gives it alone.

    A row has `input_ids` and `labels`, each (length,), without padding; and `seq_lengths`, the lengths of the sequences
    in it. What the trainer would remove of a row before its collator sees it is removed here too.

    Args:
        data: rows that the collator is given.
        collator: what the user knows it by; `collate` is it, with the trainer's removal of columns.
    """

    def __init__(self, data: Sequence[Any], collate: Collator, collator: object) -> None:
        self.data, self.collate, self.collator = data, collate, collator

    @classmethod
    def of(cls, trainer: Trainer, data: Any) -> "CollatedRows":
        """The rows of a trainer's dataset.

        Raises:
            SourceError: it is streamed, or the trainer removes the column that takes rows apart.
            ValueError: the trainer removes all of its columns; the message is that of transformers.
        """
        refuse_streams(data)
        collate: Collator = trainer.data_collator
        package = sys.modules.get("datasets")
        if package is None or not isinstance(data, package.Dataset):
            return cls(data, trainer._get_collator_with_removed_columns(collate), collate)
        kept = trainer._remove_unused_columns(data)
        if PACKED in data.column_names and PACKED not in kept.column_names and data.format["type"] != "custom":
            what = f"rows are packed, and the trainer removes their column {PACKED}"
            raise SourceError(what, fix="set remove_unused_columns=False with a collator that reads it, or do not pack")
        return cls(kept, collate, collate)

    def like(self, data: Sequence[Any]) -> "CollatedRows":
        """Other rows by the same collator."""
        return CollatedRows(data, self.collate, self.collator)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def name(self) -> str:
        """The collator as its user knows it."""
        return str(getattr(self.collator, "__qualname__", type(self.collator).__name__))

    def error(self, what: str, fix: str) -> RecipeError:
        """An error that begins with the collator's name."""
        return RecipeError(f"the collator {self.name} {what}", fix=fix)

    @property
    def is_stock(self) -> bool:
        """True for a collator of transformers or TRL, exactly."""
        return str(getattr(self.collator, "__module__", "")).partition(".")[0] in ("transformers", "trl")

    def batch(self, rows: Sequence[Any]) -> Mapping[str, Any]:
        """The collator's batch of copies of some rows, which it may change.

        Raises:
            SourceError: it raises, and a row has no `input_ids`.
            RecipeError: it raises, or makes no single batch.
        """
        try:
            made = listed(self.collate([_copied(row) for row in rows]))
        except Exception as error:
            raise_memory(error)
            missing = [row for row in rows if isinstance(row, Mapping) and "input_ids" not in row]
            if missing:
                raise SourceError(
                    f"a row has {', '.join(missing[0]) or 'no columns'} and no input_ids, and {self.name} fails on it: "
                    f"{describe(error)}",
                    fix="tokenize the dataset first",
                ) from error
            what = "a row alone" if len(rows) == 1 else f"a batch of {len(rows)} rows"
            what = f"fails on {what}: {describe(error)}"
            raise self.error(what, "use a collator that takes one row and several") from error
        if len(made) != 1 or not isinstance(made[0], Mapping):
            raise self.error("makes no mapping", "let it return one mapping")
        return made[0]

    def row(self, number: int) -> CollatedRow:
        """A row, read anew.

        Raises:
            SourceError, RecipeError: the collator gives it no meaning; the message says why.
        """
        row = self.data[number]
        try:
            return self._read(self.batch([row]), _lengths(row))
        except (RecipeError, SourceError) as error:
            error.where = f"row {number}"
            raise

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        row = self.row(number)
        for name, value in row.beside.items():
            what = f"gives `{name}` of shape {_shape(value)}; flat batches have tokens, labels and boundaries alone"
            raise self.error(what, f"leave `{name}` out, or train with the trainer's own batches")
        return {"input_ids": row.ids, "labels": row.labels, PACKED: row.lengths}

    def sequences(self) -> list[LabelledSequence]:
        """The sequences of all rows."""
        return [one for number in range(len(self)) for one in self.row(number).sequences()]

    def _tensors(self, made: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Tokens and labels in the collator's batch of one row, each (tokens,) int64."""
        batch = self._batch_of(made)
        if len(batch.ids) != 1:
            what = f"makes {_shape(batch.ids)} input_ids of a single row"
            raise self.error(what, "let it make a tensor of (1, tokens)")
        return batch.ids[0], F.pad(batch.targets[0, :-1], (1, 0), value=IGNORED)

    def _batch_of(self, made: Mapping[str, Any]) -> ForeignBatch:
        try:
            return read_batch(made)
        except ProofError as error:
            raise self.error(f"makes a batch: {error.what}", error.fix) from error

    def _read(self, made: Mapping[str, Any], lengths: list[int] | None) -> CollatedRow:
        """The collator's batch of one row, without what pads it.

        Args:
            lengths: of the sequences that were packed in the row; None for one sequence.
        """
        ids, labels = self._tensors(made)
        real = self._real(made.get("attention_mask"), labels)
        if num := int((labels[~real] != IGNORED).sum()):
            raise self.error(f"labels {num} tokens that attention_mask hides", "set their labels to -100, or show them")
        if num := int(((labels != IGNORED) & (labels != ids)).sum()):
            what = f"gives {num} labels that are not the next token; are they shifted twice?"
            raise self.error(what, "give each token its own id as label, or -100; the model shifts them")
        ids, labels = ids[real], labels[real]
        if lengths is None:
            lengths = [self._size(made.get("position_ids"), real)]
        if (size := sum(lengths)) > len(ids) or bool((labels[size:] != IGNORED).any()):
            what = f"makes {len(ids)} tokens of a row whose sequences have {size}"
            raise self.error(what, "use a collator that keeps the tokens of packed rows")
        return CollatedRow(ids[:size].tolist(), labels[:size].tolist(), lengths, self._beside(made, real, lengths))

    def _beside(self, made: Mapping[str, Any], real: Tensor, lengths: Sequence[int]) -> dict[str, object]:
        """Pixels in the batch of a row, with what else it has then."""
        beside = beside_tokens(made, real)
        if beside and (not has_media(made) or len(lengths) > 1):
            name = next(iter(beside))
            what = f"gives `{name}` of shape {_shape(made[name])}"
            raise self.error(f"{what}; only tokens, labels and boundaries are read", f"leave `{name}` out")
        return beside

    def _real(self, mask: object, labels: Tensor) -> Tensor:
        """True where a token is no padding, (tokens,) bool, of the labels of a row."""
        if mask is None:
            return torch.ones_like(labels, dtype=torch.bool)
        if not isinstance(mask, Tensor) or mask.numel() != labels.numel() or bool((mask.long() != mask.bool()).any()):
            what = f"gives an attention_mask of shape {_shape(mask)} or with other values than 0 and 1"
            raise self.error(f"{what}, whose meaning flat batches would lose", "give one 0 or 1 per token")
        real = mask.reshape(-1).bool()
        if int(real[:1].sum() + (real[1:] & ~real[:-1]).sum()) > 1:
            what = "gives an attention_mask that hides tokens in the middle of a sequence"
            raise self.error(what, "mask padding at the ends alone")
        return real

    def _size(self, positions: object, real: Tensor) -> int:
        """Number of tokens of the sequence of a row; those behind it, all of position 0, fill the row up."""
        if positions is None:
            return int(real.sum())
        places = positions.reshape(-1) if isinstance(positions, Tensor) else real[:0]
        if len(places) == len(real):
            places = places[real]
            size = int((places == torch.arange(len(places), device=places.device)).long().cumprod(0).sum())
            if not bool(places[size:].any()):
                return size
        what = f"gives position_ids of shape {_shape(positions)} that do not count the tokens of a sequence from 0"
        raise self.error(what, "leave position_ids out; packed rows are taken apart by seq_lengths, as TRL writes them")

    # ----------------------------------------------------------------------- checks of the collator

    def spread(self) -> list[int]:
        """Numbers of the rows that are tried, spread over all."""
        return sorted({int(at) for at in np.linspace(0, len(self) - 1, CHECKED).round()})

    def check(self, batch_size: int = 1) -> None:
        """Read some rows three times, and try the collator on them in batches.

        Raises:
            RecipeError: it or the data draw random numbers, or it gives a row other targets in a batch than alone.
        """
        tried, numbers = CollatedRows(self.data, _independent(self.collate), self.collator), self.spread()
        with untouched_generators():
            for number in numbers:
                if any(tried.row(number) != tried.row(number) for _ in range(2)):
                    raise RecipeError(
                        f"a row is drawn anew each time that it is read, by the data or by the collator {self.name}, "
                        "and lengths are read once",
                        where=f"row {number}",
                        fix="draw random numbers once, when the dataset is made",
                    )
            for start in range(0, len(numbers), batch_size) if batch_size > 1 and not self.is_stock else ():
                tried._check_batch(numbers[start : start + batch_size])

    def _check_batch(self, numbers: Sequence[int]) -> None:
        rows = [self.data[number] for number in numbers]
        update = read_update([self._batch_of(self.batch(rows))], self.like(rows).sequences())
        labels, cut = read_labels(update), count_cut(update)[0]
        num = labels.missing + labels.added + labels.wrong
        if num or cut or labels.unknown_tokens:
            raise self.error(
                f"gives rows others in a batch of {len(numbers)} than alone: {num} of {update.num_wanted} targets, "
                f"{cut} tokens missing, {labels.unknown_tokens} tokens added",
                "let it treat each row by itself",
            )

    def doubts(self) -> list[str]:
        """What may or may not be meant, a sentence each: ends of rows that may be padding."""
        with untouched_generators():
            tried = CollatedRows(self.data, _independent(self.collate), self.collator)
            rows = [(self.data[number], tried.row(number)) for number in self.spread()]
        rows = [(given, row) for given, row in rows if len(row.ids) > 2]
        ends = [end for given, row in rows if (end := _lost_end(given, row)) is not None]
        doubts = list[str]()
        if len(ends) > 1 and len(set(ends)) == 1:
            doubts.append(
                f"the collator {self.name} takes the last token, {ends[0]}, of {len(ends)} of {len(rows)} rows for "
                "padding: it is no target, and the model does not learn where to end. Pad with another token"
            )
        runs = [run for _, row in rows if (run := _shown_padding(row)) is not None]
        if len({len(row.ids) for _, row in rows}) == len(set(runs)) == 1 and 2 * len(runs) > len(rows) > 1:
            doubts.append(
                f"{len(runs)} of {len(rows)} rows, all of one length, have a run of token {runs[0]} at an end that "
                "attention_mask does not hide: is it padding?"
            )
        return doubts


def _lost_end(given: Any, row: CollatedRow) -> int | None:
    """The last token of a row of the data if it alone is no target, and the data do not say so; else None."""
    if not isinstance(given, Mapping):
        return None
    ids, mask, labels = (_numbers(given.get(name)) for name in ("input_ids", "attention_mask", "labels"))
    last = max((at for at, shown in enumerate(mask) if shown), default=0) if len(mask) == len(ids) else len(ids) - 1
    hidden = ids[: last + 1] == [*row.ids, *ids[last : last + 1]]
    if labels[last : last + 1] == [IGNORED] or not (hidden or ids[: last + 1] == row.ids):
        return None
    before, end = (row.labels[-1], IGNORED) if hidden else row.labels[-2:]
    return int(ids[last]) if end == IGNORED != before else None


def _shown_padding(row: CollatedRow) -> int | None:
    """A token that stands twice where a row begins, or twice where it ends and is a target."""
    if row.ids[0] == row.ids[1]:
        return row.ids[0]
    return row.ids[-1] if row.ids[-1] == row.ids[-2] and row.labels[-1] != IGNORED else None


def _copied(row: object) -> object:
    """A row that a collator may change."""
    if not isinstance(row, Mapping):
        return copy.deepcopy(row)
    plain = {name: list(value) for name, value in row.items() if isinstance(value, list)}
    return {**plain, **{name: copy.deepcopy(value) for name, value in row.items() if name not in plain}}


def _independent(collate: Collator) -> Collator:
    """A copy of a collator with a state that the original does not see; itself where it cannot be copied."""
    try:
        return copy.deepcopy(collate)
    except Exception:
        return collate


def _numbers(column: Any) -> list[Any]:
    """A column of a row as a list; empty if the row has no such sequence."""
    listed = column.tolist() if hasattr(column, "tolist") else column
    return listed if isinstance(listed, list) else []


def _lengths(row: Any) -> list[int] | None:
    """Lengths of the sequences that TRL packed in a row."""
    if not isinstance(row, Mapping) or PACKED not in row:
        return None
    return [int(length) for length in row[PACKED] if length]


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
