"""Rows of a dataset as a trainer's own collator gives them alone: its targets, tokens and columns, without padding."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer

from unpad.errors import ProofError, RecipeError, SourceError
from unpad.hf.attention import BOUNDARIES
from unpad.hf.loader import IGNORED, PACKED, collate, refuse_streams
from unpad.proof.foreign.judge import describe, raise_memory
from unpad.proof.foreign.known import listed, sequences_alone, without_first_label
from unpad.proof.foreign.model import untouched_generators
from unpad.proof.foreign.update import (
    Known,
    count_cut,
    read_batch,
    read_labels,
    read_update,
    with_hidden_ends,
)

READ = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "use_cache", *BOUNDARIES)
CHECKED = 24  # rows that a collator is tried on twice and in batches
TRIED = 6  # of these rows, to see whether it changes them
Collator = Callable[[list[Any]], Any]


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
    def of(cls, trainer: Trainer, data: Any) -> CollatedRows:
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

    def like(self, data: Sequence[Any]) -> CollatedRows:
        """Other rows by the same collator."""
        return CollatedRows(data, self.collate, self.collator)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def name(self) -> str:
        """The collator as its user knows it."""
        return str(getattr(self.collator, "__qualname__", type(self.collator).__name__))

    def batch(self, rows: Sequence[Any], collate: Collator | None = None) -> Mapping[str, Any]:
        """The collator's batch of copies of some rows, which it may change.

        Raises:
            SourceError: it raises, and a row has no `input_ids`.
            RecipeError: it raises, or makes no single batch.
        """
        try:
            made = listed((collate or self.collate)([copied(row) for row in rows]))
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
            raise RecipeError(
                f"the collator {self.name} fails on {what}: {describe(error)}",
                fix="use a collator that takes one row and several",
            ) from error
        if len(made) != 1 or not isinstance(made[0], Mapping):
            raise RecipeError(f"the collator {self.name} makes no mapping", fix="let it return one mapping")
        return made[0]

    def sequences(self, number: int) -> list[Known]:
        """The sequences of a row with their targets, as the collator's batch of it has them."""
        row = self.data[number]
        return sequences_alone(self.batch([row]), _lengths(row))

    def alone(self, number: int, part: int) -> Mapping[str, Any]:
        """The collator's batch of the row of one sequence; the sequences of a packed row get a flat batch each.

        The first token has no label, as in a flat batch.
        """
        sequences = self.sequences(number)
        if len(sequences) == 1:
            return without_first_label(self.batch([self.data[number]]))
        return collate([{"input_ids": sequences[part].ids, "labels": sequences[part].labels}])

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self.data[number]
        try:
            read = self._read(self.batch([row]), _lengths(row))
            if number and (unlike := set(_columns(read)).symmetric_difference(self.columns)):
                raise RecipeError(
                    f"the collator {self.name} gives `{min(unlike)}` to some rows and not to others",
                    fix="give all rows the same columns",
                )
        except (RecipeError, SourceError) as error:
            error.where = f"row {number}"
            raise
        return read

    def _read(self, made: Mapping[str, Any], lengths: list[int] | None) -> dict[str, Any]:
        """The collator's batch of one row, without what pads it."""
        ids = self._ids(made)
        size = ids.numel()
        labels = _labels(made)
        if labels is None:
            raise RecipeError(
                f"the collator {self.name} gives no labels, so the trainer has no loss",
                fix="give the data labels, or use DataCollatorForLanguageModeling(tokenizer, mlm=False)",
            )
        if labels.numel() != size:
            raise SourceError(
                f"a row has {size} input_ids and {labels.numel()} labels",
                fix="give one label per token, -100 where there is no loss",
            )
        row: dict[str, Any] = {"input_ids": ids.reshape(-1), "labels": labels.reshape(-1)}
        for name, value in made.items():
            if name in READ or value is None:
                continue
            if not isinstance(value, Tensor) or value.shape[:2] != (1, size):
                raise RecipeError(
                    f"the collator {self.name} gives `{name}` of shape {_shape(value)} to a row of {size} tokens, and "
                    "a flat batch has no place for what is not one entry per token",
                    fix=f"give `{name}` an entry for every token, or leave it out",
                )
            row[name] = value[0]
        real = self._real(made.get("attention_mask"), row["labels"])
        row = {name: value[real] for name, value in row.items()}
        row[PACKED] = lengths if lengths is not None else self._parts(made, real)
        end = sum(row[PACKED])
        if bool((row["labels"][end:] == IGNORED).all()):  # what a packed row is filled up with
            row = {name: value if name == PACKED else value[:end] for name, value in row.items()}
        if sum(row[PACKED]) != len(row["input_ids"]):
            raise RecipeError(
                f"the collator {self.name} makes {len(row['input_ids'])} tokens of a packed row of {sum(row[PACKED])}",
                fix="use a collator that keeps the tokens of packed rows",
            )
        return row

    def _ids(self, made: Mapping[str, Any]) -> Tensor:
        """Tokens of the batch of one row, (tokens,) or (1, tokens)."""
        ids = made.get("input_ids")
        if ids is None:
            raise RecipeError(
                f"the collator {self.name} makes no input_ids, but {', '.join(made) or 'nothing'}; flat batches are of "
                "token ids",
                fix="let it give the tokens as input_ids, or train with the trainer's own batches",
            )
        if not isinstance(ids, Tensor) or ids.dim() > 2 or (ids.dim() == 2 and len(ids) != 1):
            raise RecipeError(
                f"the collator {self.name} makes {_shape(ids)} input_ids of a single row",
                fix="let it make a tensor of shape (1, tokens)",
            )
        return ids

    def _real(self, mask: object, labels: Tensor) -> Tensor:
        """True where a token is no padding, (size,) bool, of the labels of a row."""
        if mask is None:
            return torch.ones_like(labels, dtype=torch.bool)
        if not isinstance(mask, Tensor) or mask.numel() != labels.numel() or bool((mask.long() != mask.bool()).any()):
            raise RecipeError(
                f"the collator {self.name} gives an attention_mask of shape {_shape(mask)} or with other values than 0 "
                "and 1, whose meaning flat batches would lose",
                fix="give one 0 or 1 per token",
            )
        real = with_hidden_ends(mask.reshape(1, -1).bool(), F.pad(labels[None, 1:], (0, 1), value=IGNORED))[0]
        places = real.nonzero().flatten()
        if len(places) and int(places[-1] - places[0]) + 1 != len(places):
            raise RecipeError(
                f"the collator {self.name} gives an attention_mask that hides tokens in the middle of a sequence",
                fix="mask padding at the ends alone",
            )
        return real

    def _parts(self, made: Mapping[str, Any], real: Tensor) -> list[int]:
        """Lengths of the sequences between which positions restart."""
        positions, bounds = made.get("position_ids"), made.get("cu_seq_lens_q")
        num = int(real.sum())
        if positions is None:
            return [num] if bounds is None else torch.as_tensor(bounds).diff().tolist()
        if not isinstance(positions, Tensor) or positions.numel() != len(real):
            raise RecipeError(
                f"the collator {self.name} gives position_ids of shape {_shape(positions)}",
                fix="give one position per token, or none",
            )
        own = positions.reshape(-1)[real]
        starts = [0, *((own.diff() != 1).nonzero().flatten() + 1).tolist(), num]
        lengths = np.diff(starts).tolist() if num else []
        while len(lengths) > 1 and lengths[-1] == 1:  # fill, each token at position 0
            own = own[: -lengths.pop()]
        expected = torch.cat([torch.arange(length) for length in lengths]) if lengths else own
        if not torch.equal(own.cpu(), expected):
            raise RecipeError(
                f"the collator {self.name} gives position_ids that do not begin a sequence at 0 and count on by 1",
                fix="leave position_ids out, or let each sequence begin at 0",
            )
        return lengths

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Columns with an entry for every token that the collator gives besides tokens and labels."""
        return tuple(_columns(self[0] if len(self) else {}))

    @cached_property
    def _checked(self) -> list[int]:
        """Numbers of the rows that are tried, spread over all."""
        return sorted({int(at) for at in np.linspace(0, len(self) - 1, CHECKED).round()})

    def warn_of_ends(self) -> None:
        """Warn of a collator that takes the end of a row for padding, so that no model learns to stop."""
        collate = _independent(self.collate)
        with untouched_generators():
            ends = [self._lost_end(self.data[number], collate) for number in self._checked]
        found = [end for end in ends if end is not None]
        if len(found) > 1 and len(set(found)) == 1:
            warnings.warn(
                f"the collator {self.name} takes the last token, {found[0]}, of {len(found)} of {len(ends)} rows for "
                "padding: it is no target, and the model does not learn where to end. Pad with another token",
                stacklevel=4,
            )

    def _lost_end(self, row: Any, collate: Collator) -> int | None:
        """The last token of a row if it alone is no target, and the data do not say so; else None."""
        if not isinstance(row, Mapping):
            return None
        ids, mask, own = (_numbers(row.get(name)) for name in ("input_ids", "attention_mask", "labels"))
        if len(ids) < 2 or mask[-1:] == [0] or own[-1:] == [IGNORED]:
            return None
        made = self.batch([row], collate)
        labels = _labels(made)
        if labels is None or made["input_ids"].flatten()[: len(ids)].tolist() != ids:
            return None
        before, last = labels.flatten()[len(ids) - 2 : len(ids)].tolist()
        return int(ids[-1]) if last == IGNORED != before else None

    def check(self, batch_size: int) -> None:
        """Read some rows twice, and try the collator on them twice, and in batches.

        Raises:
            RecipeError: it draws random numbers, changes rows of the data, or gives a row other targets in a batch
                than alone; or the data draw rows anew.
        """
        numbers = self._checked
        rows = [self.data[number] for number in numbers]
        collate = _independent(self.collate)
        with untouched_generators():
            for number, row in zip(numbers, rows, strict=True):
                if not all(_alike(self.batch([row], collate), self.batch([row], collate)) for _ in range(2)):
                    raise RecipeError(
                        f"the collator {self.name} draws random numbers: it makes another batch of the same row the "
                        "next time",
                        where=f"row {number}",
                        fix="draw them once, when the dataset is made",
                    )
                if self._holds(number) and self._changes(row, collate):
                    raise RecipeError(
                        f"the collator {self.name} changes the rows that it is given, and the data hold them, so that "
                        "each epoch has others",
                        where=f"row {number}",
                        fix="let it change a copy",
                    )
                if any(self.sequences(number) != self.sequences(number) for _ in range(2)):
                    raise RecipeError(
                        "the data draw a row anew each time that it is read, and a plan is of rows that stay",
                        where=f"row {number}",
                        fix="draw them once, when the dataset is made",
                    )
            if is_stock(self.collator) or batch_size < 2:
                return
            for start in range(0, len(rows), batch_size):
                self._check_batch(rows[start : start + batch_size], collate)

    def _holds(self, number: int) -> bool:
        """True if a row that is read is an object of the data, or has one: a change of it is a change of the data."""
        row, again = self.data[number], self.data[number]
        if not isinstance(row, Mapping):
            return row is again
        return row is again or any(isinstance(one, list | dict) and one is again[name] for name, one in row.items())

    def _changes(self, row: Any, collate: Collator) -> bool:
        """True if a collator makes another batch of a row, or none, once it was given it."""
        given = copied(row)
        try:
            return not _alike(*(listed(collate([given]))[0] for _ in range(2)))
        except Exception as error:
            raise_memory(error)
            return True

    def _check_batch(self, rows: list[Any], collate: Collator) -> None:
        known = [one for row in rows for one in sequences_alone(self.batch([row], collate), _lengths(row)) if one.ids]
        try:
            update = read_update([read_batch(self.batch(rows, collate))], known)
        except ProofError as error:
            raise RecipeError(f"the collator {self.name} makes a batch: {error.what}", fix=error.fix) from error
        labels, cut = read_labels(update), count_cut(update)[0]
        if labels.wrong:
            raise RecipeError(
                f"the collator {self.name} gives {labels.wrong} labels that are not the next token; are they "
                "shifted twice?",
                fix="give each token its own id as label, or -100; the model shifts them",
            )
        num = labels.missing + labels.added
        if num or cut or labels.unknown_tokens:
            raise RecipeError(
                f"the collator {self.name} gives rows others in a batch of {len(rows)} than alone: {num} of "
                f"{update.num_wanted} targets, {cut} tokens missing, {labels.unknown_tokens} tokens added",
                fix="let it treat each row by itself",
            )


def copied(row: object) -> object:
    """A row with lists, arrays and tensors that a collator may change."""
    if isinstance(row, Mapping):
        return {name: copied(value) for name, value in row.items()}
    if isinstance(row, list):
        return [copied(one) for one in row] if row and isinstance(row[0], list | dict) else list(row)
    return row.clone() if isinstance(row, Tensor) else copy.copy(row)


def is_stock(collator: object) -> bool:
    """True for a collator of transformers or TRL, exactly."""
    return str(getattr(collator, "__module__", "")).partition(".")[0] in ("transformers", "trl")


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


def _columns(row: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in row if name not in ("input_ids", "labels", PACKED))


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
