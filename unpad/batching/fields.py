"""Kinds of fields: the level that a field of a batch is counted by, and how to move, select, pad and join it.

Every field of `RaggedBatch`, and of a `BatchPart` that a family of models adds to it, declares its kind:

    labels: Tensor = field(metadata=per_token(pad=0))

The loops at the end of this file read the kinds, so a new field needs no other edit.

Levels are tokens, sequences, and levels that a part counts itself: `runs(SEQUENCE, "set")` declares the boundaries of
the sets of every sequence, and `per("set")` a field with one entry for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from unpad.batching.layout import Layout, PaddedLayout, build_layout

TOKEN, SEQUENCE = "token", "sequence"
KIND = "kind"  # in the metadata of a field


class Selection(NamedTuple):
    """Entries of a level to take.

    Args:
        entries: (num,) int64, in their new order.
        total: entries of the level before the choice.
    """

    entries: Tensor
    total: int


class Rectangle(NamedTuple):
    """Cells of the tokens of a flat run in a padded rectangle.

    Args:
        cells: (total_tokens,) int64.
        num_cells: cells of the rectangle.
        pad_id: content of padding cells for fields without one of their own.
    """

    cells: Tensor
    num_cells: int
    pad_id: float


Choices = dict[str, Selection]  # by level; levels without a choice stay whole
Firsts = Mapping[str, Sequence[int]]  # by level: the number of entries in the batches before each one
V = TypeVar("V")
H = TypeVar("H", bound="FieldHolder")


class Kind(ABC, Generic[V]):
    """The four operations on the values of a field; a `sparse` field may be missing in some of the batches to join."""

    sparse = False

    @abstractmethod
    def to(self, value: V, device: torch.device) -> V: ...

    @abstractmethod
    def take(self, value: V, choices: Choices) -> V:
        """Take the chosen entries; a kind that ties two levels adds the choice of the second to `choices`."""

    def pad(self, value: V, rectangle: Rectangle) -> V:
        return value

    @abstractmethod
    def join(self, values: Sequence[V], firsts: Firsts) -> V: ...


class TensorKind(Kind[Tensor]):
    """A tensor."""

    def to(self, value: Tensor, device: torch.device) -> Tensor:
        return value.to(device, non_blocking=True)


@dataclass(frozen=True)
class PerEntry(TensorKind):
    """One row for every entry of a level, (num_entries, ...).

    Args:
        pad_with: content of padding cells, for a field per token; None: the caller's `pad_id`.
    """

    level: str
    pad_with: float | None = None

    def take(self, value: Tensor, choices: Choices) -> Tensor:
        return value.index_select(0, choices[self.level].entries) if self.level in choices else value

    def pad(self, value: Tensor, rectangle: Rectangle) -> Tensor:
        if self.level != TOKEN:
            return value
        fill = rectangle.pad_id if self.pad_with is None else self.pad_with
        padded = value.new_full((rectangle.num_cells, *value.shape[1:]), fill)
        return padded.index_copy_(0, rectangle.cells, value)

    def join(self, values: Sequence[Tensor], firsts: Firsts) -> Tensor:
        return torch.cat(list(values))


class TokenPlaces(TensorKind):
    """Places of tokens in the run, (num,) int64, ascending within every sequence."""

    sparse = True

    def take(self, value: Tensor, choices: Choices) -> Tensor:
        if TOKEN not in choices:
            return value
        tokens, total = choices[TOKEN]
        marked = torch.zeros(total, dtype=torch.bool, device=value.device).index_fill_(0, value, True)
        return marked.index_select(0, tokens).nonzero().flatten()

    def pad(self, value: Tensor, rectangle: Rectangle) -> Tensor:
        return rectangle.cells.index_select(0, value)

    def join(self, values: Sequence[Tensor], firsts: Firsts) -> Tensor:
        return torch.cat([value + first for value, first in zip(values, firsts[TOKEN], strict=True)])


@dataclass(frozen=True)
class SequenceOf(TensorKind):
    """The sequence that every entry of a level belongs to, (num_entries,) int64."""

    level: str
    sparse = True

    def take(self, value: Tensor, choices: Choices) -> Tensor:
        if SEQUENCE not in choices:
            return value
        sequences, entries = (choices[SEQUENCE].entries[:, None] == value).nonzero().unbind(1)
        choices[self.level] = Selection(entries, len(value))
        return sequences

    def join(self, values: Sequence[Tensor], firsts: Firsts) -> Tensor:
        return torch.cat([value + first for value, first in zip(values, firsts[SEQUENCE], strict=True)])


@dataclass(frozen=True)
class Runs(Kind[Layout | PaddedLayout]):
    """Boundaries of runs: every entry of `level` has a run of entries of `counted`."""

    level: str
    counted: str

    def to(self, value: Layout | PaddedLayout, device: torch.device) -> Layout | PaddedLayout:
        return value.to(device)

    def take(self, value: Layout | PaddedLayout, choices: Choices) -> Layout | PaddedLayout:
        if self.level not in choices:
            return value
        rows = choices[self.level].entries
        if isinstance(value, PaddedLayout):  # rows keep their width
            mask = value.attention_mask
            cells = torch.arange(mask.numel(), device=mask.device).view(mask.shape)
            choices[self.counted] = Selection(cells.index_select(0, rows).flatten(), mask.numel())
            keys = None if value.keys is None else value.keys.index_select(0, rows)
            return PaddedLayout(mask.index_select(0, rows), keys=keys)
        chosen, entries = value.select(rows)
        choices[self.counted] = Selection(entries, int(value.cu_seqlens[-1]))
        return chosen

    def join(self, values: Sequence[Layout | PaddedLayout], firsts: Firsts) -> Layout:
        assert all(isinstance(value, Layout) for value in values), "rectangles of different widths have no common one"
        lengths = torch.cat([value.lengths() for value in values])
        return build_layout(lengths.cpu().numpy()).to(lengths.device)


class Parts(Kind["tuple[BatchPart, ...]"]):
    """Parts that families of models add; batches to join have the same ones."""

    def to(self, value: tuple[BatchPart, ...], device: torch.device) -> tuple[BatchPart, ...]:
        return tuple(move(part, device) for part in value)

    def take(self, value: tuple[BatchPart, ...], choices: Choices) -> tuple[BatchPart, ...]:
        return tuple(take(part, choices) for part in value)

    def pad(self, value: tuple[BatchPart, ...], rectangle: Rectangle) -> tuple[BatchPart, ...]:
        return tuple(pad(part, rectangle) for part in value)

    def join(self, values: Sequence[tuple[BatchPart, ...]], firsts: Firsts) -> tuple[BatchPart, ...]:
        return tuple(join(parts, firsts) for parts in zip(*values, strict=True))


# --------------------------------------------------------------------------- what a field declares


def per_token(pad: float | None = None) -> dict[str, Kind[Tensor]]:
    """One row per token; `pad` is the content of padding cells, by default the caller's `pad_id`."""
    return {KIND: PerEntry(TOKEN, pad)}


def per_sequence() -> dict[str, Kind[Tensor]]:
    """One row per sequence."""
    return per(SEQUENCE)


def per(level: str) -> dict[str, Kind[Tensor]]:
    """One row per entry of a level."""
    return {KIND: PerEntry(level)}


def token_places() -> dict[str, Kind[Tensor]]:
    """Places of tokens in the run, ascending within every sequence."""
    return {KIND: TokenPlaces()}


def sequence_of(level: str) -> dict[str, Kind[Tensor]]:
    """The sequence of every entry of a level; precedes the fields of that level."""
    return {KIND: SequenceOf(level)}


def runs(level: str, counted: str) -> dict[str, Kind[Layout | PaddedLayout]]:
    """A layout with a run of entries of `counted` for every entry of `level`; precedes the fields of `counted`."""
    return {KIND: Runs(level, counted)}


# --------------------------------------------------------------------------- holders of fields


@dataclass(frozen=True)
class FieldHolder:
    """A frozen dataclass with a kind for every field; None marks a field that this batch lacks."""


@dataclass(frozen=True)
class BatchPart(FieldHolder):
    """Fields that a family of models adds to a batch; a subclass is a frozen dataclass in that family's files."""

    @property
    def attended(self) -> Layout | None:
        """The layout that attention runs over; None: that of the tokens."""
        return None

    @property
    def bundle(self) -> Tensor | None:
        """Number of each sequence's bundle, (num_seqs,) int64; sequences of one number must stay in one batch, as the
        loss needs them together. None: every sequence is a bundle."""
        return None


def kinds(holder: type[FieldHolder]) -> dict[str, Kind[object]]:
    """The kind of every field.

    Raises:
        KeyError: a field has none.
    """
    return {field.name: field.metadata[KIND] for field in fields(holder)}


def _present(holder: FieldHolder) -> Iterator[tuple[str, Kind[object], object]]:
    values = vars(holder)
    return ((name, kind, values[name]) for name, kind in kinds(type(holder)).items() if values[name] is not None)


def move(holder: H, device: torch.device) -> H:
    return replace(holder, **{name: kind.to(value, device) for name, kind, value in _present(holder)})


def take(holder: H, choices: Choices) -> H:
    """Take the chosen entries of every level, and of the levels that these count."""
    choices = dict(choices)
    return replace(holder, **{name: kind.take(value, choices) for name, kind, value in _present(holder)})


def pad(holder: H, rectangle: Rectangle) -> H:
    return replace(holder, **{name: kind.pad(value, rectangle) for name, kind, value in _present(holder)})


def join(holders: Sequence[H], firsts: Firsts) -> H:
    """Join one or more holders of one type, in order.

    Args:
        firsts: number of entries in the batches before each holder, by level.
    """
    assert len({type(holder) for holder in holders}) == 1, "batches with different parts have no common one"
    joined = {}
    for name, kind in kinds(type(holders[0])).items():
        present = [index for index, holder in enumerate(holders) if vars(holder)[name] is not None]
        assert kind.sparse or len(present) in (0, len(holders)), f"some of these batches have `{name}`, others have not"
        if present:
            before = {level: [numbers[index] for index in present] for level, numbers in firsts.items()}
            joined[name] = kind.join([vars(holders[index])[name] for index in present], before)
    return replace(holders[0], **joined)
