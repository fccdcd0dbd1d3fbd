"""RaggedBatch: the one type every stage after the loader receives.

A batch is a flat run of real tokens and the boundaries of its sequences. Labels are shifted within a sequence when the
batch is built, so a label never crosses a boundary. Fields and their kinds: `fields.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.batching import fields
from unpad.batching.fields import KIND, SEQUENCE, TOKEN, BatchPart, Choices, FieldHolder, Kind
from unpad.batching.layout import Layout, PaddedLayout, build_layout
from unpad.terminal.table import number_of

Side = Literal["left", "right"]
P = TypeVar("P", bound=BatchPart)
T = TypeVar("T")


def required(value: T | None) -> T:
    """A value that is None for other kinds alone, such as the pixels of a batch of images; asserts that it is there."""
    assert value is not None, "a value is missing that things of this kind have"
    return value


class _Batch(Kind["RaggedBatch"]):
    """A batch with sequences as the entries of a level."""

    sparse = True

    def __init__(self, level: str) -> None:
        self.level = level

    def to(self, value: RaggedBatch, device: torch.device) -> RaggedBatch:
        return value.to(device)

    def take(self, value: RaggedBatch, choices: Choices) -> RaggedBatch:
        return fields.take(value, {SEQUENCE: choices[self.level]}) if self.level in choices else value

    def join(self, values: Sequence[RaggedBatch], firsts: fields.Firsts) -> RaggedBatch:
        return concatenate(values)


@dataclass(frozen=True)
class RaggedBatch(FieldHolder):
    """Sequences of any lengths, end to end.

    Args:
        layout: boundaries. A PaddedLayout makes this a flattened (batch, seq) rectangle, for comparison and exchange.
        position_ids: (total_tokens,) int64, counted from 0 in every sequence unless the data says otherwise.
        input_ids: (total_tokens,) int64; None without tokens of a vocabulary. Next to `inputs_embeds` they only mark
            the batch as text.
        labels: (total_tokens,) int64, token to predict at each position; 0 where `loss_mask` is False.
        loss_mask: (total_tokens,) bool, True where a label counts.
        target_index: (num_targets,) int64, the positions where `loss_mask` is True.
        inputs_embeds: (total_tokens, dim), inputs other than tokens of a vocabulary, such as patches.
        seq_ids: (num_seqs,) int64, ids of the sequences in the corpus, for errors.
        seq_labels: (num_seqs,) int64, classes of the sequences, if sequences and not tokens are the targets.
        grid: (num_seqs, 2) int64, rows and columns of patches of every image; position_ids then count row by row, also
            after some patches are dropped.
        image_sizes: (num_seqs, 2) int64, height and width in pixels of every image before it was cut into patches.
        media_seqs: (media.num_seqs,) int64, the sequence that each image of `media` belongs to.
        media_index: (media.total_tokens,) int64, the place of each token of `media` in this run.
        media: images inside the sequences, as a batch of patches, in the order of their places.
        parts: fields that only one family of models reads.
    """

    layout: Layout | PaddedLayout = field(metadata=fields.runs(SEQUENCE, TOKEN))
    position_ids: Tensor = field(metadata=fields.per_token(pad=0))
    input_ids: Tensor | None = field(metadata=fields.per_token())
    labels: Tensor = field(metadata=fields.per_token(pad=0))
    loss_mask: Tensor = field(metadata=fields.per_token(pad=False))
    target_index: Tensor = field(metadata=fields.token_places())
    inputs_embeds: Tensor | None = field(default=None, metadata=fields.per_token())
    seq_ids: Tensor | None = field(default=None, metadata=fields.per_sequence())
    seq_labels: Tensor | None = field(default=None, metadata=fields.per_sequence())
    grid: Tensor | None = field(default=None, metadata=fields.per_sequence())
    image_sizes: Tensor | None = field(default=None, metadata=fields.per_sequence())
    media_seqs: Tensor | None = field(default=None, metadata=fields.sequence_of("media"))
    media_index: Tensor | None = field(default=None, metadata=fields.token_places())
    media: RaggedBatch | None = field(default=None, metadata={KIND: _Batch("media")})
    parts: tuple[BatchPart, ...] = field(default=(), metadata={KIND: fields.Parts()})

    @property
    def total_tokens(self) -> int:
        """Computed tokens, in a rectangle with padding."""
        return self.position_ids.numel()

    @property
    def num_seqs(self) -> int:
        return self.layout.num_seqs

    @property
    def flat_layout(self) -> Layout:
        """The layout of a flat run."""
        assert isinstance(self.layout, Layout), "this batch is a rectangle"
        return self.layout

    @property
    def attended(self) -> Layout | PaddedLayout:
        """Layout that attention runs over: that of the tokens, unless a part has its own."""
        return next((layout for part in self.parts if (layout := part.attended) is not None), self.layout)

    @property
    def bundles(self) -> list[list[int]]:
        """Sequences that must stay in one batch, bundle by bundle in the order of their first sequences."""
        numbers = next((bundle for part in self.parts if (bundle := part.bundle) is not None), None)
        members: dict[int, list[int]] = {}
        for seq, number in enumerate(range(self.num_seqs) if numbers is None else numbers.tolist()):
            members.setdefault(number, []).append(seq)
        return list(members.values())

    @property
    def num_targets(self) -> int:
        """Labels that count, of tokens or of whole sequences."""
        return self.target_index.numel() if self.seq_labels is None else self.seq_labels.numel()

    def part(self, kind: type[P]) -> P | None:
        """The part of this type, if the batch has it."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def require(self, kind: type[P]) -> P:
        """The part of this type; asserts that the batch has it."""
        part = self.part(kind)
        assert part is not None, f"this batch has no {kind.__name__}"
        return part

    def with_part(self, part: BatchPart) -> RaggedBatch:
        """Return the batch with this part, in place of one of the same type."""
        return replace(self, parts=(*(other for other in self.parts if type(other) is not type(part)), part))

    @cached_property
    def num_real(self) -> tuple[int, int]:
        """Sequences of the corpus and their tokens, without the filler that completes a row."""
        lengths = self.layout.lengths()
        real = torch.ones_like(lengths, dtype=torch.bool) if self.seq_ids is None else self.seq_ids >= 0
        return int(real.sum()), int(lengths[real].sum())

    def to(self, device: torch.device) -> RaggedBatch:
        if self.position_ids.device == device:
            return self
        moved = fields.move(self, device)
        vars(moved)["num_real"] = self.num_real  # counting later would make an accelerator wait
        return moved

    def numbered(self, first: int) -> RaggedBatch:
        """Return the same batch with sequences, and their images, that random draws know by their numbers from `first`
        on; any cut of a numbered batch draws the same."""
        layout = self.layout.with_keys(torch.arange(first, first + self.num_seqs, device=self.position_ids.device))
        media = self.media
        if media is not None and self.media_seqs is not None:
            seqs = self.media_seqs
            nth = torch.arange(len(seqs), device=seqs.device) - torch.searchsorted(seqs, seqs)
            media = replace(media, layout=media.layout.with_keys(layout.keys_of(nth, seqs)))
        return replace(self, layout=layout, media=media)

    def select(self, seqs: Sequence[int]) -> RaggedBatch:
        """Return a batch of only these sequences, in this order; any split of a batch gives the same gradients."""
        index = torch.tensor(seqs, dtype=torch.int64, device=self.position_ids.device)
        return fields.take(self, {SEQUENCE: fields.Selection(index, self.num_seqs)})

    def pad(self, side: Side = "right", pad_to: int = 0, pad_id: int = 0) -> RaggedBatch:
        """Return the same sequences as a flattened (batch, seq) rectangle; padding has no label and no effect.

        Args:
            pad_to: smallest number of columns; the longest sequence may need more.
            pad_id: content of padding cells; every value gives the same results.
        """
        mask = _real_cells(self.flat_layout, side, pad_to)
        rectangle = fields.Rectangle(mask.flatten().nonzero().flatten(), mask.numel(), pad_id)
        return replace(fields.pad(self, rectangle), layout=PaddedLayout(mask, keys=self.layout.keys))

    def flat(self) -> RaggedBatch:
        """Return the sequences of a rectangle as a flat run, which undoes `pad`; a flat run as it is."""
        if isinstance(self.layout, Layout):
            return self
        real = self.layout.attention_mask.flatten()
        bounds = F.pad(self.layout.lengths().cumsum(0, dtype=torch.int32), (1, 0))
        longest = int(bounds.diff().max()) if self.num_seqs else 0
        return self._with_tokens(real, Layout(bounds, longest, keys=self.layout.keys))

    def keep(self, kept: Tensor) -> RaggedBatch:
        """Return a flat run without the tokens where `kept`, (total_tokens,) bool, is False."""
        return self._with_tokens(kept, self.flat_layout.keep(kept))

    def _with_tokens(self, kept: Tensor, layout: Layout) -> RaggedBatch:
        return replace(fields.take(self, {TOKEN: fields.Selection(kept.nonzero().flatten(), len(kept))}), layout=layout)


def make_batch(
    input_ids: np.ndarray,
    labels: np.ndarray,
    loss_mask: np.ndarray,
    lengths: np.ndarray,
    seq_ids: np.ndarray | None = None,
) -> RaggedBatch:
    """Build a batch from flat arrays.

    Args:
        input_ids, labels: (total_tokens,) integers; labels already shifted within each sequence.
        loss_mask: (total_tokens,) bool.
        lengths: (num_seqs,) tokens per sequence.
        seq_ids: (num_seqs,) corpus ids.
    """
    layout = build_layout(lengths)
    first = np.repeat(layout.cu_seqlens[:-1].numpy().astype(np.int64), lengths)
    positions = np.arange(input_ids.size) - first
    mask = torch.from_numpy(np.ascontiguousarray(loss_mask, dtype=np.bool_))
    return RaggedBatch(
        layout=layout,
        position_ids=torch.from_numpy(positions),
        input_ids=torch.from_numpy(input_ids.astype(np.int64)),
        labels=torch.from_numpy(np.where(loss_mask, labels, 0).astype(np.int64)),
        loss_mask=mask,
        target_index=mask.nonzero().flatten(),
        seq_ids=None if seq_ids is None else torch.from_numpy(np.asarray(seq_ids, np.int64)),
    )


def from_sequences(
    sequences: Sequence[Sequence[int] | np.ndarray],
    loss_masks: Sequence[Sequence[bool] | np.ndarray] | None = None,
    seq_ids: np.ndarray | None = None,
) -> RaggedBatch:
    """Build a batch for next-token prediction: inputs are tokens[:-1], labels tokens[1:], within each sequence.

    Args:
        sequences: token ids; a sequence of n tokens gives n - 1 positions, an empty one none.
        loss_masks: per sequence and token, True where its prediction counts; default all.
        seq_ids: (num_seqs,) corpus ids.
    """
    masks = loss_masks if loss_masks is not None else [np.ones(len(s), np.bool_) for s in sequences]
    assert all(len(m) == len(s) for m, s in zip(masks, sequences, strict=True)), (
        "a mask differs from its sequence in length"
    )
    inputs = _flat([s[:-1] for s in sequences], np.int64)
    labels = _flat([s[1:] for s in sequences], np.int64)
    counted = _flat([m[1:] for m in masks], np.bool_)
    return make_batch(inputs, labels, counted, np.array([max(len(s) - 1, 0) for s in sequences], np.int64), seq_ids)


def from_prompts(sequences: Sequence[Sequence[int] | np.ndarray], seq_ids: np.ndarray | None = None) -> RaggedBatch:
    """Build a batch of whole sequences without targets.

    Arguments as in `from_sequences`.
    """
    ids = _flat(sequences, np.int64)
    nothing = np.zeros_like(ids)
    return make_batch(ids, nothing, nothing.astype(np.bool_), np.array([len(s) for s in sequences], np.int64), seq_ids)


def from_vectors(
    vectors: Sequence[np.ndarray], dim: int, seq_labels: np.ndarray | None = None, seq_ids: np.ndarray | None = None
) -> RaggedBatch:
    """Build a batch of sequences of vectors, with a class for each sequence.

    Args:
        vectors: per sequence (length, dim) float32.
        seq_labels: (num_seqs,) class of every sequence; None where none is known.
        seq_ids: (num_seqs,) corpus ids.
    """
    flat = np.concatenate([np.zeros((0, dim), np.float32), *vectors])
    lengths, nothing = np.array([len(v) for v in vectors], np.int64), np.zeros(len(flat), np.int64)
    batch = make_batch(nothing, nothing, nothing.astype(np.bool_), lengths, seq_ids)
    labels = None if seq_labels is None else torch.from_numpy(np.asarray(seq_labels, np.int64))
    return replace(batch, input_ids=None, inputs_embeds=torch.from_numpy(flat), seq_labels=labels)


def _flat(parts: Sequence[Sequence[int] | np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """Runs end to end, (total,); the list, or a run, may be empty."""
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def concatenate(batches: Sequence[RaggedBatch]) -> RaggedBatch:
    """Join flat batches into one, in order; `select` undoes it."""
    if not batches:
        return from_prompts([])
    first_token = list(accumulate((batch.total_tokens for batch in batches), initial=0))[:-1]
    first_sequence = list(accumulate((batch.num_seqs for batch in batches), initial=0))[:-1]
    return fields.join(batches, {TOKEN: first_token, SEQUENCE: first_sequence})


def to_padded(
    values: Tensor, layout: Layout | PaddedLayout, side: Side = "right", pad_to: int = 0, fill: float = 0
) -> tuple[Tensor, Tensor]:
    """Scatter flat values into a padded rectangle.

    Args:
        values: (total_tokens, ...).
        pad_to: smallest number of columns.

    Returns:
        padded (batch, seq, ...) and attention_mask (batch, seq) bool, True = real. `from_padded` undoes it exactly.
    """
    mask = _real_cells(layout, side, pad_to)
    padded = values.new_full((*mask.shape, *values.shape[1:]), fill)
    padded[mask] = values
    return padded, mask


def _real_cells(layout: Layout | PaddedLayout, side: Side, pad_to: int) -> Tensor:
    """Cells of a rectangle that hold a token, (batch, seq) bool."""
    lengths = layout.lengths()
    columns = max(int(lengths.max()) if lengths.numel() else 0, pad_to)
    column = torch.arange(columns, device=lengths.device)
    return column[None] < lengths[:, None] if side == "right" else column[None] >= columns - lengths[:, None]


def from_padded(values: Tensor, attention_mask: Tensor) -> Tensor:
    """Real cells of a (batch, seq, ...) rectangle as one flat run, (total_tokens, ...)."""
    return values[attention_mask]


# --------------------------------------------------------------------------- parts


def in_parts(batch: RaggedBatch, most: int) -> list[RaggedBatch]:
    """Cut a batch between its sequences, in order; bundles stay whole, and rows of a rectangle keep their width.

    Args:
        most: computed tokens of a part, as far as sequences and bundles allow.

    Returns:
        The parts; the batch itself if it is one of them.
    """
    bounds = _bounds(batch)  # (num_units + 1,) first sequences of what stays together
    tokens = np.append(0, np.cumsum(_computed(batch)))[bounds]
    cuts = [0]
    for unit in range(1, len(bounds) - 1):
        if tokens[unit + 1] - tokens[cuts[-1]] > most:
            cuts.append(unit)
    cuts.append(len(bounds) - 1)
    if len(cuts) <= 2:
        return [batch]
    return [batch.select(range(bounds[a], bounds[b])) for a, b in pairwise(cuts)]


def _computed(batch: RaggedBatch) -> np.ndarray:
    """Tokens of every sequence, or its cells in a rectangle, (num_seqs,) int64."""
    if isinstance(batch.layout, PaddedLayout):
        return np.full(batch.num_seqs, batch.layout.attention_mask.shape[1], np.int64)
    return batch.layout.lengths().cpu().numpy()


def _bounds(batch: RaggedBatch) -> np.ndarray:
    """Places of sequences between which a batch may be cut, its ends included, (num_units + 1,) int64."""
    last = np.zeros(batch.num_seqs + 1, np.int64)  # end of the bundles that have begun so far
    for members in batch.bundles:
        last[min(members) + 1] = max(members) + 1
    reach = np.maximum.accumulate(last)
    return np.flatnonzero(reach <= np.arange(batch.num_seqs + 1))


# --------------------------------------------------------------------------- in words, for `--verbose`


def describe_batch(batch: RaggedBatch) -> list[str]:
    """One line with the lengths, then one per tensor: shape, dtype and, for masks, the number of True entries."""
    lengths = batch.layout.lengths()
    longest = int(lengths.max()) if batch.num_seqs else 0
    head = f"{number_of(batch.num_seqs, 'sequences')}, {number_of(batch.total_tokens, 'tokens')}, the longest {longest}"
    return [head, *(f"{name} {_tensor(value)}" for name, value in _tensors(batch))]


def _tensors(holder: Any, prefix: str = "") -> list[tuple[str, Tensor]]:
    """Tensors of a batch and of its parts, by dotted name."""
    found: list[tuple[str, Tensor]] = []
    for kept in dataclasses.fields(holder):
        value = vars(holder)[kept.name]
        for part in value if isinstance(value, tuple) else (value,):
            name = f"{prefix}{kept.name}" if part is value else f"{prefix}{type(part).__name__}"
            if isinstance(part, Tensor):
                found.append((name, part))
            elif isinstance(part, Layout):
                found.append((f"{name}.cu_seqlens", part.cu_seqlens))
            elif isinstance(part, PaddedLayout):
                found.append((f"{name}.attention_mask", part.attention_mask))
            elif part is not None:
                found += _tensors(part, f"{name}.")
    return found


def _tensor(value: Tensor) -> str:
    shown = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return shown + (f", {int(value.sum()):,} True" if value.dtype == torch.bool else "")
