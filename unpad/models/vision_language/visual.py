"""Places of visual tokens in a run of text, and the text that asks about them."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.batching.batch import RaggedBatch, required
from unpad.batching.layout import Layout, PaddedLayout
from unpad.errors import SourceError


@dataclass(frozen=True)
class VisionTokens:
    """Vision tokens of samples or images, and the question about each, as mergers and heads read them.

    Args:
        vision: (num_vision, width).
        question: (num_question, question_width).
        vision_layout, question_layout: one sequence per sample; either may be empty.
        received: (num_vision,), attention that each token received, where it is asked for.
    """

    vision: Tensor
    vision_layout: Layout
    question: Tensor
    question_layout: Layout
    received: Tensor | None = None


@dataclass(frozen=True)
class Visual:
    """The visual tokens of a batch.

    Args:
        index: (num_visual,) int64, places in the run, ascending.
        source: (num_visual,) int64, the patch of `media` that each represents.
        media: the images.
        tower_attention: (media.total_tokens,), attention that each patch received in the tower, if a ranking uses it.
    """

    index: Tensor
    source: Tensor
    media: RaggedBatch
    tower_attention: Tensor | None = None


def placed(batch: RaggedBatch, tower_attention: Tensor | None = None) -> Visual:
    """The visual tokens of a batch with one per patch of its images."""
    index, source = required(batch.media_index).sort()
    return Visual(index, source, required(batch.media), tower_attention)


def mark(places: Tensor, total: int) -> Tensor:
    """True on these places, (total,) bool."""
    return torch.zeros(total, dtype=torch.bool, device=places.device).index_fill_(0, places, True)


def cells(layout: Layout | PaddedLayout) -> Layout:
    """Layout of the rows of a rectangle as sequences, padding included; a flat run's layout unchanged."""
    if isinstance(layout, Layout):
        return layout
    rows, columns = layout.attention_mask.shape
    bounds = torch.arange(rows + 1, dtype=torch.int32, device=layout.attention_mask.device) * columns
    return Layout(bounds, columns if rows else 0, keys=layout.keys)


def is_real(layout: Layout | PaddedLayout, total: int, device: torch.device) -> Tensor:
    """True on tokens, False on the padding of a rectangle, (total,) bool."""
    if isinstance(layout, PaddedLayout):
        return layout.attention_mask.flatten()
    return torch.ones(total, dtype=torch.bool, device=device)


def last_tokens(layout: Layout) -> Tensor:
    """True on the last token of each sequence, (total_tokens,) bool."""
    bounds = layout.cu_seqlens.long()
    found = torch.zeros(int(bounds[-1]), dtype=torch.bool, device=bounds.device)
    # Before an empty sequence another one ends; for an empty first one -1 is the end of the run, an end too.
    return found.index_fill_(0, bounds[1:] - 1, True) if len(found) else found


def is_last(layout: Layout | PaddedLayout) -> Tensor:
    """True on the last token of each sequence, (total_tokens,) bool."""
    if isinstance(layout, Layout):
        return last_tokens(layout)
    real = layout.attention_mask.flatten()
    return real.masked_scatter(real, last_tokens(cells(layout).keep(real)))


def is_question(batch: RaggedBatch, index: Tensor) -> Tensor:
    """True on the text of each sequence up to the token that predicts its first target, or on all text without targets;
    (total_tokens,) bool.

    Args:
        index: (num_visual,) int64, the places that hold no text.
    """
    if not batch.num_targets:
        return is_text(batch, index)
    rows = cells(batch.layout)
    counted = F.pad(batch.loss_mask.cumsum(0), (1, 0))  # (total_tokens + 1,) targets before each token
    first = rows.cu_seqlens[:-1].long().index_select(0, rows.seq_of_token())
    return (counted[:-1] == counted[first]) & is_text(batch, index)


def is_text(batch: RaggedBatch, index: Tensor) -> Tensor:
    """True on tokens that are neither visual, those at `index` (num_visual,), nor padding; (total_tokens,) bool."""
    return is_real(batch.layout, batch.total_tokens, index.device).index_fill(0, index, False)


def check_places(batch: RaggedBatch, image_id: int | None) -> None:
    """Reject a batch unless its patches are exactly at its placeholders.

    Args:
        image_id: token id of the placeholders; None checks only that as many places as patches are in each sequence, in
            rising order.

    Raises:
        SourceError: names the sequence.
    """
    index, device = batch.media_index, batch.position_ids.device
    index = torch.zeros(0, dtype=torch.int64, device=device) if index is None else index
    num_visual = 0 if batch.media is None else batch.media.total_tokens
    placeholders = _placeholders(batch, image_id)
    are_there = device.type != "cpu" if placeholders is None else torch.equal(placeholders, index)
    if index.numel() == num_visual and are_there:
        return
    expected = index.unique() if placeholders is None else placeholders
    sequence = cells(batch.layout).seq_of_token()
    visual = torch.zeros(batch.num_seqs, dtype=torch.int64, device=device)
    if batch.media is not None and batch.media_seqs is not None:
        visual = visual.index_add(0, batch.media_seqs, batch.media.layout.lengths())
    marked, placed = (torch.bincount(sequence[at], minlength=batch.num_seqs) for at in (expected, index))
    if torch.equal(placed, visual) and torch.equal(expected, index):
        return
    wrong = ((marked != visual) | (placed != visual)).nonzero().flatten().tolist()
    if wrong:
        short = int(placed[wrong[0]]) if marked[wrong[0]] == visual[wrong[0]] else int(marked[wrong[0]])
        counts = f"{short} placeholders for {int(visual[wrong[0]])} visual tokens"
    else:
        wrong = sequence[index if len(expected) != len(index) else expected[expected != index]][:1].tolist()
        counts = "visual tokens at other places than its placeholders"
    name = wrong[0] if batch.seq_ids is None else int(batch.seq_ids[wrong[0]])
    what = f"a sequence has {counts}"
    fix = "put one placeholder into the text for every patch of its images, in their order"
    raise SourceError(what, where=f"sequence {name}" + (" of the batch" if batch.seq_ids is None else ""), fix=fix)


def _placeholders(batch: RaggedBatch, image_id: int | None) -> Tensor | None:
    """Places of placeholders, ascending, (num,) int64; None if unknown.

    Finding them would make an accelerator wait; there the code that made the batch ensures them.
    """
    if image_id is None or batch.input_ids is None or batch.input_ids.device.type != "cpu":
        return None
    is_placeholder = batch.input_ids == image_id
    if isinstance(batch.layout, PaddedLayout):  # padding may hold any id
        is_placeholder &= batch.layout.attention_mask.flatten()
    return is_placeholder.nonzero().flatten()
