"""Rows of a dataset as a trainer's own collator gives them alone: its targets, tokens and columns, without padding."""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer

from unpad.errors import ProofError, RecipeError, SourceError
from unpad.hf.attention import BOUNDARIES
from unpad.hf.loader import IGNORED, PACKED, collate, refuse_streams
from unpad.proof.foreign.judge import describe, raise_memory
from unpad.proof.foreign.model import untouched_generators
from unpad.proof.foreign.update import (
    LabelledSequence,
    count_cut,
    listed,
    read_batch,
    read_labels,
    read_update,
    with_hidden_ends,
)

READ = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "use_cache", *BOUNDARIES)
CHECKED = 24  # rows that a collator is tried on again and in batches
Collator = Callable[[list[Any]], Any]


class Alone(NamedTuple):
    """A sequence with its targets, and the batch of it alone, without padding."""

    sequence: LabelledSequence
    batch: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class CollatedRow:
    """A row as it is in the collator's batch of it alone.

    Args:
        made: that batch; `cells`: those of the real tokens in it.
        ids, labels: (tokens,).
        lengths: of the sequences in it.
    """

    made: Mapping[str, Any]
    cells: slice
    ids: Tensor
    labels: Tensor
    lengths: list[int]

    def of_tokens(self, value: object) -> bool:
        """True for what has an entry for every token of the batch."""
        size = self.made["input_ids"].shape[1]
        return isinstance(value, Tensor) and value.shape[:2] == (1, size)

    def columns(self) -> dict[str, Tensor]:
        """Further columns with an entry for every token, each (tokens, ...)."""
        named = {name: value for name, value in self.made.items() if name not in READ and self.of_tokens(value)}
        return {name: value[0, self.cells] for name, value in named.items()}

    def sequences(self) -> list[Alone]:
        """The sequences in the row. The first token of each has no label, as no position predicts it."""
        spans = [slice(start, stop) for start, stop in pairwise(np.cumsum([0, *self.lengths]).tolist()) if start < stop]
        found = [
            LabelledSequence(self.ids[span].tolist(), [IGNORED, *self.labels[span][1:].tolist()]) for span in spans
        ]
        if len(found) == 1:
            batch = {
                name: value[:, self.cells] if self.of_tokens(value) else value for name, value in self.made.items()
            }
            if "labels" in batch:
                batch["labels"] = torch.tensor([found[0].labels])
            return [Alone(found[0], batch)]
        columns = self.columns()

        def part(one: LabelledSequence, span: slice) -> dict[str, Any]:
            named = {name: value[span] for name, value in columns.items()}
            return {**named, "input_ids": one.ids, "labels": one.labels}

        pairs = zip(found, spans, strict=True)
        return [Alone(one, collate([part(one, span)], tuple(columns))) for one, span in pairs]


class CollatedRows:
    """Rows of a dataset, each as the trainer's collator gives it alone.

    A row has `input_ids`, `labels` and the columns with an entry for every token, each (length,), without padding; and
    `seq_lengths`, the lengths of the sequences in it. What the trainer would remove of a row before its collator sees
    it is removed here too.

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
            SourceError: it is streamed, or the trainer removes all of its columns or those that take rows apart.
        """
        refuse_streams(data)
        collate: Collator = trainer.data_collator
        package = sys.modules.get("datasets")
        if package is None or not isinstance(data, package.Dataset):
            return cls(data, trainer._get_collator_with_removed_columns(collate), collate)
        try:
            kept = trainer._remove_unused_columns(data)
        except ValueError as error:
            names = ", ".join(data.column_names)
            if "input_ids" in data.column_names:
                raise SourceError(f"the trainer removes all columns of {names}", fix=describe(error)) from error
            raise SourceError(
                f"a row has {names} and no input_ids, and the trainer removes all that its model does not take",
                fix="tokenize the dataset first, or set remove_unused_columns=False for a transform or a collator",
            ) from error
        if PACKED in data.column_names and PACKED not in kept.column_names and not data.format["type"] == "custom":
            raise SourceError(
                f"rows are packed, and the trainer removes their column {PACKED}",
                fix="set remove_unused_columns=False with a collator that reads it, or do not pack",
            )
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

    def error(self, what: str, fix: str, where: str = "") -> RecipeError:
        """An error that begins with the collator's name."""
        return RecipeError(f"the collator {self.name} {what}", where=where, fix=fix)

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

    def sequences(self, number: int) -> list[Alone]:
        """The sequences of a row with their targets, as the collator's batch of it has them."""
        return self.row(number).sequences()

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self.row(number)
        columns, where = row.columns(), f"row {number}"
        for name, value in row.made.items():
            if name not in READ and value is not None and name not in columns:
                raise self.error(
                    f"gives `{name}` of shape {_shape(value)} to a row of {len(row.ids)} tokens, and a flat batch has "
                    "no place for what is not one entry per token",
                    f"give `{name}` an entry for every token, or leave it out",
                    where,
                )
        if number and (unlike := set(columns).symmetric_difference(self.columns)):
            what = f"gives `{min(unlike)}` to some rows and not to others"
            raise self.error(what, "give all rows the same columns", where)
        return {**columns, "input_ids": row.ids, "labels": row.labels, PACKED: row.lengths}

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Columns with an entry for every token that the collator gives besides tokens and labels."""
        return tuple(sorted(self.row(0).columns())) if len(self) else ()

    def _read(self, made: Mapping[str, Any], lengths: list[int] | None) -> CollatedRow:
        """The collator's batch of one row, without what pads it."""
        ids, labels = made.get("input_ids"), _labels(made)
        if ids is None:
            what = f"makes no input_ids, but {', '.join(made) or 'nothing'}; flat batches are of token ids"
            raise self.error(what, "let it give the tokens as input_ids, or train with the trainer's own batches")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != 1:
            what = f"makes {_shape(ids)} input_ids of a single row"
            raise self.error(what, "let it make a tensor of shape (1, tokens)")
        if labels is None:
            fix = "give the data labels, or use DataCollatorForLanguageModeling(tokenizer, mlm=False)"
            raise self.error("gives no labels, so the trainer has no loss", fix)
        if labels.numel() != ids.numel():
            raise SourceError(
                f"a row has {ids.numel()} input_ids and {labels.numel()} labels",
                fix="give one label per token, -100 where there is no loss",
            )
        ids, labels = ids[0], labels.reshape(-1)
        real = self._real(made.get("attention_mask"), labels)
        if num := int((labels[~real] != IGNORED).sum()):
            what = f"labels {num} tokens of padding, which attention_mask hides"
            raise self.error(what, "set their labels to -100")
        if num := int(((labels != IGNORED) & (labels != ids)).sum()):
            what = f"gives {num} labels that are not the next token; are they shifted twice?"
            raise self.error(what, "give each token its own id as label, or -100; the model shifts them")
        start = int(real.nonzero()[0]) if bool(real.any()) else 0
        stop = start + int(real.sum())
        parts = self._parts(made, slice(start, stop)) if lengths is None else lengths
        size = sum(parts)
        if size < stop - start and bool((labels[start + size : stop] == IGNORED).all()):
            stop = start + size  # what a packed row is filled up with
        if size != stop - start:
            what = f"makes {stop - start} tokens of a packed row of {size}"
            raise self.error(what, "use a collator that keeps the tokens of packed rows")
        return CollatedRow(made, slice(start, stop), ids[start:stop], labels[start:stop], parts)

    def _real(self, mask: object, labels: Tensor) -> Tensor:
        """True where a token is no padding, (size,) bool, of the labels of a row."""
        if mask is None:
            return torch.ones_like(labels, dtype=torch.bool)
        if not isinstance(mask, Tensor) or mask.numel() != labels.numel() or bool((mask.long() != mask.bool()).any()):
            what = f"gives an attention_mask of shape {_shape(mask)} or with other values than 0 and 1"
            raise self.error(f"{what}, whose meaning flat batches would lose", "give one 0 or 1 per token")
        real = with_hidden_ends(mask.reshape(1, -1).bool(), F.pad(labels[None, 1:], (0, 1), value=IGNORED))[0]
        places = real.nonzero().flatten()
        if len(places) and int(places[-1] - places[0]) + 1 != len(places):
            what = "gives an attention_mask that hides tokens in the middle of a sequence"
            raise self.error(what, "mask padding at the ends alone")
        return real

    def _parts(self, made: Mapping[str, Any], cells: slice) -> list[int]:
        """Lengths of the sequences between which positions restart."""
        positions, bounds, num = made.get("position_ids"), made.get("cu_seq_lens_q"), cells.stop - cells.start
        if positions is None:
            return [num] if bounds is None else torch.as_tensor(bounds).diff().tolist()
        if not isinstance(positions, Tensor) or positions.shape != made["input_ids"].shape:
            what = f"gives position_ids of shape {_shape(positions)}"
            raise self.error(what, "give one position per token, or none")
        places = positions[0, cells]
        starts = [0, *((places.diff() != 1).nonzero().flatten() + 1).tolist(), num]
        lengths = np.diff(starts).tolist() if num else []
        while len(lengths) > 1 and lengths[-1] == 1:  # fill, each token at position 0
            lengths.pop()
        expected = torch.cat([torch.arange(length) for length in lengths]) if lengths else places
        if not torch.equal(places[: len(expected)].cpu(), expected):
            what = "gives position_ids that do not begin a sequence at 0 and count on by 1"
            raise self.error(what, "leave position_ids out, or let each sequence begin at 0")
        return lengths

    # ----------------------------------------------------------------------- checks of the collator

    def spread(self) -> list[int]:
        """Numbers of the rows that are tried, spread over all."""
        return sorted({int(at) for at in np.linspace(0, len(self) - 1, CHECKED).round()})

    def check(self, batch_size: int = 1) -> None:
        """Read some rows three times, and try the collator on them in batches.

        Raises:
            RecipeError: it or the data draw random numbers, or it gives a row other targets in a batch than alone.
        """
        tried = CollatedRows(self.data, _independent(self.collate), self.collator)
        numbers = self.spread()
        with untouched_generators():
            for number in numbers:
                first, *again = (tried.row(number).made for _ in range(3))
                if not all(_alike(first, one) for one in again):
                    raise RecipeError(
                        f"a row is drawn anew each time that it is read, by the data or by the collator {self.name}, "
                        "and a plan is of rows that stay",
                        where=f"row {number}",
                        fix="draw random numbers once, when the dataset is made",
                    )
            for start in range(0, len(numbers), batch_size) if batch_size > 1 and not self.is_stock else ():
                tried._check_batch(numbers[start : start + batch_size])

    def _check_batch(self, numbers: Sequence[int]) -> None:
        alone = [one.sequence for number in numbers for one in self.sequences(number)]
        try:
            update = read_update([read_batch(self.batch([self.data[number] for number in numbers]))], alone)
        except ProofError as error:
            raise self.error(f"makes a batch: {error.what}", error.fix) from error
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
        found = list[str]()
        if len(ends) > 1 and len(set(ends)) == 1:
            found.append(
                f"the collator {self.name} takes the last token, {ends[0]}, of {len(ends)} of {len(rows)} rows for "
                "padding: it is no target, and the model does not learn where to end. Pad with another token"
            )
        runs = [run for _, row in rows if (run := _shown_padding(row)) is not None]
        if len({len(row.ids) for _, row in rows}) == len(set(runs)) == 1 and 2 * len(runs) > len(rows) > 1:
            found.append(
                f"{len(runs)} of {len(rows)} rows, all of one length, have a run of token {runs[0]} at an end that "
                "attention_mask does not hide: is it padding?"
            )
        return found


def _lost_end(given: Any, row: CollatedRow) -> int | None:
    """The last token of a row if it alone is no target, and the data do not say so; else None."""
    if not isinstance(given, Mapping):
        return None
    ids, mask, labels = (_numbers(given.get(name)) for name in ("input_ids", "attention_mask", "labels"))
    last = max((at for at, shown in enumerate(mask) if shown), default=0) if len(mask) == len(ids) else len(ids) - 1
    if row.made["input_ids"][0, : last + 1].tolist() != ids[: last + 1] or labels[last : last + 1] == [IGNORED]:
        return None
    taken = _labels(row.made)
    assert taken is not None
    before, end = taken.flatten()[last - 1 : last + 1].tolist() if last else (IGNORED, IGNORED)
    return int(ids[last]) if end == IGNORED != before else None


def _shown_padding(row: CollatedRow) -> int | None:
    """A token that stands twice where a row begins, or twice where it ends and is a target."""
    ids = row.ids.tolist()
    if ids[0] == ids[1]:
        return int(ids[0])
    return int(ids[-1]) if ids[-1] == ids[-2] and int(row.labels[-1]) != IGNORED else None


def _copied(row: object) -> object:
    """A row with lists, arrays and tensors that a collator may change."""
    if isinstance(row, Mapping):
        return {name: _copied(value) for name, value in row.items()}
    if isinstance(row, list):
        return [_copied(one) for one in row] if row and isinstance(row[0], list | dict) else list(row)
    return row.clone() if isinstance(row, Tensor) else copy.copy(row)


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


def _labels(made: Mapping[str, Any]) -> Tensor | None:
    """Labels of a batch, each of the token at its place."""
    shifted = made.get("shift_labels")
    if isinstance(shifted, Tensor):
        return torch.cat([shifted.new_full((1,), IGNORED), shifted.reshape(-1)[:-1]])
    labels = made.get("labels")
    return labels if isinstance(labels, Tensor) else None


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def same(name: str) -> bool:
        a, b = one[name], other[name]
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)

    return one.keys() == other.keys() and all(map(same, one))


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
