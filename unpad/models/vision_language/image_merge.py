"""Merging of the visual tokens of every image before a language model reads them.

The batch gets shorter: text keeps its order and its positions, and the merged tokens of an image replace its patches.
Each merged token takes the place and position of one patch (`Merged.places`), so the following tokens of a sequence
have the same positions as without merging. The last token of an image predicts the target of its last patch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import Layout
from unpad.models.vision_language.merge import (
    Merged,
    PoolMerger,
    QuestionMerger,
    SimilarityMerger,
    TopMerger,
    keep_best,
    num_merged,
)
from unpad.models.vision_language.visual import Visual, is_question
from unpad.nn.segments import segment_place
from unpad.recipes.section import Section


class MergeConfig(Section):
    """Settings of merging: fewer visual tokens per image before the language model."""

    variant: Literal["simple", "question", "slots", "similarity", "class_token"] = Field(
        description="simple: the best by a learned score become means of what is like them; question: the same, having "
        "seen the question; slots: learned queries; similarity: the most alike are merged (ToMe); class_token: those "
        "stay that receive most attention in the tower (VisionZip)."
    )
    ratio: float | None = Field(None, gt=0, le=1, description="Tokens left of each image per token; not for slots.")
    slots: int | None = Field(None, ge=1, description="Tokens that slots makes of each image.")
    inner: int = Field(512, ge=1, description="Channels inside simple, question and slots.")
    heads: int = Field(4, ge=1, description="Attention heads of question and slots.")
    temperature: float = Field(1.0, gt=0, description="Of the shares of simple and question; small: one each.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Inside simple, question and slots.")

    @model_validator(mode="after")
    def _fit(self) -> MergeConfig:
        if self.variant == "slots":
            if self.slots is None or self.ratio is not None:
                raise ValueError("variant=slots needs slots, how many tokens an image becomes, and no ratio")
        elif self.ratio is None or self.slots is not None:
            raise ValueError(f"variant={self.variant} needs ratio, the tokens left per token, and no slots")
        if self.variant in ("question", "slots") and self.inner % self.heads:
            raise ValueError(f"inner {self.inner} is not a multiple of heads {self.heads}")
        return self


def make_merger(config: MergeConfig, width: int, question_width: int) -> nn.Module | None:
    """Create the layer of a variant; None for class_token, which has no layer.

    Args:
        width: channels of the tower's features.
        question_width: channels of embeddings of text.
    """
    ratio, slots = config.ratio or 1.0, config.slots or 1  # a variant has one of the two
    if config.variant == "simple":
        return TopMerger(width, config.inner, ratio, config.temperature, config.dropout)
    if config.variant == "question":
        return QuestionMerger(
            width, question_width, config.inner, config.heads, ratio, config.temperature, config.dropout
        )
    if config.variant == "slots":
        return PoolMerger(width, question_width, slots, config.inner, config.heads, config.dropout)
    return SimilarityMerger(ratio) if config.variant == "similarity" else None


def merge_images(
    config: MergeConfig,
    merger: nn.Module | None,
    batch: RaggedBatch,
    text: Tensor,
    features: Tensor,
    tower_attention: Tensor | None,
) -> Merged:
    """Merge the visual tokens of each image, given the question of its row.

    Args:
        merger: from `make_merger`.
        batch: a flat run with images.
        text: (total_tokens, question_width), embeddings; placeholders' are not read.
        features: (media.total_tokens, width), of the tower.
        tower_attention: (media.total_tokens,); for class_token.
    """
    assert batch.media is not None, "there is nothing to merge"
    images = batch.media.layout
    assert isinstance(images, Layout), "images come as a flat run"
    if merger is None:
        assert tower_attention is not None, "class_token ranks by the attention that patches received in the tower"
        assert config.ratio is not None, "checked by the config"
        return keep_best(features, images, tower_attention, num_merged(images, config.ratio))
    assert batch.media_index is not None, "a batch with images holds their places"
    assert batch.media_seqs is not None, "and their rows"
    assert isinstance(batch.layout, Layout), "a flat run"
    asks = is_question(batch, batch.media_index)
    tokens, layout = _runs_of(batch.layout.keep(asks), batch.media_seqs)
    questions = text.index_select(0, asks.nonzero().flatten()).index_select(0, tokens)
    merged: Merged = merger(features, images, questions, layout)
    return merged


def _runs_of(layout: Layout, seqs: Tensor) -> tuple[Tensor, Layout]:
    """Tokens of these sequences (num,) int64, which may repeat, and their own layout."""
    lengths = layout.lengths().index_select(0, seqs)
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    shift = layout.cu_seqlens.long().index_select(0, seqs) - bounds[:-1]
    out = Layout(bounds.to(torch.int32), int(lengths.max()) if len(lengths) else 0)
    tokens = shift.repeat_interleave(lengths)
    return tokens + torch.arange(len(tokens), device=tokens.device), out


def shorten(batch: RaggedBatch, text: Tensor, merged: Merged, embeds: Tensor) -> tuple[RaggedBatch, Visual]:
    """Return the batch as the language model reads it, with merged images.

    Args:
        batch: a flat run with images.
        text: (total_tokens, width), embeddings; placeholders' are not read.
        merged: one sequence per image.
        embeds: (total_out, width), of the merged tokens.

    Returns:
        A batch with `inputs_embeds` (new total_tokens, width), without `media`, and the places of its visual tokens.
    """
    assert batch.media is not None, "there is nothing to merge"
    assert batch.media_index is not None, "a batch with images holds their places"
    patches, index = batch.media.layout, batch.media_index
    assert isinstance(patches, Layout), "images come as a flat run"
    present = patches.lengths() > 0
    bounds = patches.cu_seqlens.long()
    first, last = index[bounds[:-1][present]], index[bounds[1:][present] - 1]  # of every image
    becomes = torch.ones_like(batch.position_ids).index_fill(0, index, 0)  # (total_tokens,) new tokens per old token
    becomes = becomes.index_copy(0, first, merged.layout.lengths()[present])
    begins = becomes.cumsum(0) - becomes  # their first place in the new run
    made_of = torch.repeat_interleave(becomes)  # (new total_tokens,) the old token that gives the fields

    start = torch.zeros_like(patches.lengths())
    start[present] = begins[first]
    visual = start.index_select(0, merged.layout.seq_of_token()) + segment_place(merged.layout)  # (total_out,)
    positions = batch.position_ids[made_of].index_copy(0, visual, batch.position_ids[index[merged.places]])
    loss_mask = batch.loss_mask[made_of].index_fill(0, visual, False)
    final = (start + merged.layout.lengths() - 1)[present]
    loss_mask = loss_mask.index_copy(0, final, batch.loss_mask[last])
    labels = batch.labels[made_of].index_fill(0, visual, 0).index_copy(0, final, batch.labels[last])
    target_index = loss_mask.nonzero().flatten()
    assert len(target_index) == len(batch.target_index), "only the last patch of an image has a target"
    short = replace(
        batch,
        layout=_grown(batch, becomes),
        position_ids=positions,
        input_ids=None if batch.input_ids is None else batch.input_ids[made_of],
        labels=labels,
        loss_mask=loss_mask,
        target_index=target_index,
        inputs_embeds=text[made_of].index_copy(0, visual, embeds.to(text.dtype)),
        media=None,
        media_index=None,
        media_seqs=None,
    )
    order = visual.argsort()
    return short, Visual(visual[order], merged.places[order], batch.media)


def _grown(batch: RaggedBatch, becomes: Tensor) -> Layout:
    """Layout of the run in which token i of the batch became `becomes[i]` tokens, (total_tokens,) int64."""
    assert isinstance(batch.layout, Layout), "a flat run"
    before = torch.cat([becomes.new_zeros(1), becomes.cumsum(0)])
    bounds = before[batch.layout.cu_seqlens.long()].to(torch.int32)
    return Layout(bounds, int(bounds.diff().max()) if batch.num_seqs else 0)
