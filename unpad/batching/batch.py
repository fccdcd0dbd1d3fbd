"""RaggedBatch: the one type every stage after the loader receives.

A batch is a flat run of real tokens and a layout that says where each sequence begins. Labels are shifted within a
sequence when the batch is made, so no label crosses a boundary whatever happens later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from unpad.batching.event_sets import EventSets, _join_events
from unpad.batching.layout import Layout, PaddedLayout, build_layout

Side = Literal["left", "right"]


@dataclass(frozen=True)
class RaggedBatch:
    """Sequences of any lengths, end to end.

    Args:
        layout: boundaries. A PaddedLayout makes this a flattened (batch, seq) rectangle, for comparison and exchange.
        position_ids: (total_tokens,) int64, counted from 0 in every sequence unless the data says otherwise.
        input_ids: (total_tokens,) int64; None where there are no tokens of a vocabulary. Beside `inputs_embeds` they
            only tell that this is text.
        labels: (total_tokens,) int64, the token to predict at each position; 0 where `loss_mask` is False.
        loss_mask: (total_tokens,) bool, True where a label counts.
        target_index: (num_targets,) int64, the positions where `loss_mask` is True.
        inputs_embeds: (total_tokens, dim), inputs that are no tokens of the vocabulary, such as patches.
        seq_ids: (num_seqs,) int64, which sequences of the corpus these are; names them in errors.
        seq_labels: (num_seqs,) int64, a class for every sequence, where sequences and not tokens are the targets.
        grid: (num_seqs, 2) int64, rows and columns of patches of every image; position_ids then count row by row, and
            keep doing so for the patches that are left when some are dropped.
        image_sizes: (num_seqs, 2) int64, height and width in pixels of every image, before it became patches.
        media: the images that stand in these sequences, as a batch of their patches, in the order of their places.
        media_index: (media.total_tokens,) int64, the place in this run of each token of `media`.
        media_seqs: (media.num_seqs,) int64, the sequence of this run that each image stands in.
        events: the sets that the tokens form, where sequences are patients.
    """

    layout: Layout | PaddedLayout
    position_ids: Tensor
    input_ids: Tensor | None
    labels: Tensor
    loss_mask: Tensor
    target_index: Tensor
    inputs_embeds: Tensor | None = None
    seq_ids: Tensor | None = None
    seq_labels: Tensor | None = None
    grid: Tensor | None = None
    image_sizes: Tensor | None = None
    media: RaggedBatch | None = None
    media_index: Tensor | None = None
    media_seqs: Tensor | None = None
    events: EventSets | None = None

    @property
    def total_tokens(self) -> int:
        """Tokens the model computes; in a rectangle this counts padding too."""
        return self.position_ids.numel()

    @property
    def num_seqs(self) -> int:
        return self.layout.num_seqs

    @property
    def attended(self) -> Layout | PaddedLayout:
        """What attention runs over: the tokens, or the sets of every patient and one readout."""
        return self.layout if self.events is None else build_layout((self.events.history.lengths() + 1).cpu().numpy())

    @property
    def num_targets(self) -> int:
        """Labels that count: of tokens, or of whole sequences."""
        return self.target_index.numel() if self.seq_labels is None else self.seq_labels.numel()

    def to(self, device: torch.device) -> RaggedBatch:
        if self.position_ids.device == device:
            return self
        moved = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)}
        media = None if self.media is None else self.media.to(device)
        events = None if self.events is None else self.events.to(device)
        return replace(self, layout=self.layout.to(device), media=media, events=events, **moved)

    def select(self, seqs: Sequence[int]) -> RaggedBatch:
        """Return a batch of only these sequences, in this order; any split of a batch gives the same gradients."""
        assert isinstance(self.layout, Layout), "only a flat run can be split by sequence"
        tokens = self.layout.tokens_of(seqs)
        loss_mask = self.loss_mask[tokens]
        chosen = RaggedBatch(
            layout=build_layout(self.layout.lengths()[list(seqs)].cpu().numpy()),
            position_ids=self.position_ids[tokens],
            input_ids=None if self.input_ids is None else self.input_ids[tokens],
            labels=self.labels[tokens],
            loss_mask=loss_mask,
            target_index=loss_mask.nonzero().flatten(),
            inputs_embeds=None if self.inputs_embeds is None else self.inputs_embeds[tokens],
            seq_ids=None if self.seq_ids is None else self.seq_ids[list(seqs)],
            seq_labels=None if self.seq_labels is None else self.seq_labels[list(seqs)],
            grid=None if self.grid is None else self.grid[list(seqs)],
            image_sizes=None if self.image_sizes is None else self.image_sizes[list(seqs)],
            events=None if self.events is None else self.events.select(seqs),
        )
        return self._with_media(chosen, seqs, tokens).to(self.position_ids.device)

    def _with_media(self, chosen: RaggedBatch, seqs: Sequence[int], tokens: Tensor) -> RaggedBatch:
        """Give a selection the images of its sequences."""
        if self.media is None or self.media_index is None or self.media_seqs is None:
            return chosen
        owners = self.media_seqs.tolist()
        images = [(new, image) for new, seq in enumerate(seqs) for image, owner in enumerate(owners) if owner == seq]
        is_media = torch.zeros(self.total_tokens, dtype=torch.bool)
        is_media[self.media_index] = True
        return replace(
            chosen,
            media=self.media.select([image for _, image in images]),
            media_index=is_media[tokens].nonzero().flatten(),
            media_seqs=torch.tensor([new for new, _ in images], dtype=torch.int64),
        )

    def pad(self, side: Side = "right", pad_to: int = 0, pad_id: int = 0) -> RaggedBatch:
        """Return the same sequences as a flattened (batch, seq) rectangle; padding has no label and no effect.

        Args:
            pad_to: smallest number of columns; the longest sequence may need more.
            pad_id: what padding cells hold. Any value gives the same results.
        """
        assert isinstance(self.layout, Layout), "this batch is a rectangle already"

        def rectangle(values: Tensor | None, fill: float) -> Tensor | None:
            return None if values is None else to_padded(values, self.layout, side, pad_to, fill)[0].flatten(0, 1)

        _, mask = to_padded(torch.ones_like(self.loss_mask), self.layout, side, pad_to, 0)
        cells = mask.flatten().nonzero().flatten()  # (total_tokens,) the cell of every token
        loss_mask = rectangle(self.loss_mask, 0)
        position_ids, labels = rectangle(self.position_ids, 0), rectangle(self.labels, 0)
        assert loss_mask is not None
        assert position_ids is not None
        assert labels is not None
        return RaggedBatch(
            layout=PaddedLayout(mask),
            position_ids=position_ids,
            input_ids=rectangle(self.input_ids, pad_id),
            labels=labels,
            loss_mask=loss_mask,
            target_index=loss_mask.nonzero().flatten(),
            inputs_embeds=rectangle(self.inputs_embeds, pad_id),
            seq_ids=self.seq_ids,
            seq_labels=self.seq_labels,
            grid=self.grid,
            image_sizes=self.image_sizes,
            media=self.media,
            media_index=None if self.media_index is None else cells[self.media_index],
            media_seqs=self.media_seqs,
            events=self.events,
        )


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
        sequences: token ids; a sequence of n tokens gives n - 1 positions, and an empty one gives none.
        loss_masks: per sequence and token, whether predicting that token counts; all tokens by default.
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
    """Build a batch of sequences that are read to their last token, and of which nothing is predicted.

    Arguments as in `from_sequences`.
    """
    ids = _flat(sequences, np.int64)
    nothing = np.zeros_like(ids)
    return make_batch(ids, nothing, nothing.astype(np.bool_), np.array([len(s) for s in sequences], np.int64), seq_ids)


def _flat(parts: Sequence[Sequence[int] | np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """Runs end to end, (total,); there may be none, or empty ones."""
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def concatenate(batches: Sequence[RaggedBatch]) -> RaggedBatch:
    """One batch of all sequences of several flat ones, in order; `select` takes it apart again."""
    layouts = [batch.layout for batch in batches]
    assert all(isinstance(layout, Layout) for layout in layouts), "rectangles of different widths have no common one"
    lengths = [layout.lengths() for layout in layouts]
    first_token = np.cumsum([0, *(batch.total_tokens for batch in batches)]).tolist()
    first_seq = np.cumsum([0, *(batch.num_seqs for batch in batches)]).tolist()

    def joined(name: str, shifts: Sequence[int] | None = None) -> Tensor | None:
        parts = [getattr(batch, name) for batch in batches]
        if all(part is None for part in parts):
            return None
        known = [
            (part, shift) for part, shift in zip(parts, shifts or [0] * len(parts), strict=False) if part is not None
        ]
        return torch.cat([part + shift if shift else part for part, shift in known])

    def required(name: str, shifts: Sequence[int] | None = None) -> Tensor:
        found = joined(name, shifts)
        return torch.zeros(0, dtype=torch.int64) if found is None else found

    media = [batch.media for batch in batches if batch.media is not None]
    events = [batch.events for batch in batches if batch.events is not None]
    return RaggedBatch(
        layout=build_layout(torch.cat([torch.zeros(0, dtype=torch.int64), *lengths]).cpu().numpy()),
        position_ids=required("position_ids"),
        input_ids=joined("input_ids"),
        labels=required("labels"),
        loss_mask=required("loss_mask").bool(),
        target_index=required("target_index", first_token),
        inputs_embeds=joined("inputs_embeds"),
        seq_ids=joined("seq_ids"),
        seq_labels=joined("seq_labels"),
        grid=joined("grid"),
        image_sizes=joined("image_sizes"),
        media=concatenate(media) if media else None,
        media_index=joined("media_index", first_token),
        media_seqs=joined("media_seqs", first_seq),
        events=_join_events(events) if events else None,
    )


def to_padded(
    values: Tensor, layout: Layout | PaddedLayout, side: Side = "right", pad_to: int = 0, fill: float = 0
) -> tuple[Tensor, Tensor]:
    """Spread flat values over a rectangle.

    Args:
        values: (total_tokens, ...).
        pad_to: smallest number of columns.

    Returns:
        padded (batch, seq, ...) and attention_mask (batch, seq) bool, True = real. `from_padded` undoes it exactly.
    """
    lengths = layout.lengths()
    columns = max(int(lengths.max()) if lengths.numel() else 0, pad_to)
    column = torch.arange(columns, device=values.device)
    if side == "right":
        mask = column[None] < lengths[:, None]
    else:
        mask = column[None] >= columns - lengths[:, None]
    padded = values.new_full((lengths.numel(), columns, *values.shape[1:]), fill)
    padded[mask] = values
    return padded, mask


def from_padded(values: Tensor, attention_mask: Tensor) -> Tensor:
    """Take the real cells of a (batch, seq, ...) rectangle as one flat run, (total_tokens, ...)."""
    return values[attention_mask]
