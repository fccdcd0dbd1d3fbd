"""Text with images in it: a vision tower, a projector, and a decoder that reads one visual token per patch.

The composition of LLaVA 1.5 (Liu et al. 2023, arXiv 2310.03744). A sequence is text with placeholders, as many as its
images have patches; it may have no image, one or several, at any place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from unpad.batch import RaggedBatch
from unpad.errors import SourceError
from unpad.layout import Layout, PaddedLayout
from unpad.losses import Terms
from unpad.models import decoder
from unpad.nn.activation import activate
from unpad.nn.block import Cache, init_weights
from unpad.nn.linear import Linear
from unpad.nn.tower import Tower, TowerConfig
from unpad.recipe import Section

DATA = "vqa"


class Config(Section):
    """The `model` section of a recipe."""

    kind: Literal["vision_language"] = "vision_language"
    vision: TowerConfig = Field(default_factory=TowerConfig)
    language: decoder.Config = Field(default_factory=decoder.Config)
    projector_activation: Literal["relu", "gelu", "quick_gelu"] = "gelu"
    projector_bias: bool = True
    image_id: int | None = Field(None, description="Id of the placeholders; None: only their number is checked.")

    @property
    def longest(self) -> int:
        """Most positions of a sequence, its visual tokens included."""
        return self.language.longest

    @property
    def patch(self) -> int:
        """Side of a patch, in pixels."""
        return self.vision.patch

    @property
    def causal(self) -> bool:
        return self.language.causal

    @property
    def head_dim(self) -> int:
        return self.language.head_dim


class Projector(nn.Module):
    """second(act(first x)): features of patches to embeddings of the language model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.activation, width = config.projector_activation, config.language.width
        self.first = Linear(config.vision.width, width, bias=config.projector_bias)
        self.second = Linear(width, width, bias=config.projector_bias)
        init_weights(self, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(activate(self.activation, self.first(x)))


class VisionLanguage(nn.Module):
    """Next-token model over a flat run of sequences with images in them.

    `forward` is `encode`, `splice` and the decoder in turn; what goes between them, such as a layer that merges visual
    tokens, calls them itself.

    Args:
        config: sizes and choices.
        vocab_size: rows of the embedding and of the head.
    """

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.tower = Tower(config.vision)
        self.projector = Projector(config)
        self.decoder = decoder.Decoder(config.language, vocab_size)

    def forward(self, batch: RaggedBatch, cache: Cache | None = None) -> Tensor:
        """Hidden states after the last norm, (total_tokens, width), in the computing dtype.

        Args:
            batch: `input_ids` with placeholders, and `media`, `media_index` and `media_seqs` unless it is all text.
            cache: filled by the first pass; later passes read one text token per sequence.

        Raises:
            SourceError: a sequence has not as many placeholders as visual tokens, or an image does not fit the tower.
            RecipeError: a position lies outside the model's context.
        """
        # A step of decoding may bring the id of a placeholder that the model itself wrote.
        alone = isinstance(batch.layout, Layout) and batch.layout.max_seqlen <= 1
        is_step = cache is not None and batch.media is None and alone
        hidden: Tensor = self.decoder(batch if is_step else self._read_images(batch), cache)
        return hidden

    def encode(self, media: RaggedBatch) -> Tensor:
        """Visual tokens of images, (media.total_tokens, language width)."""
        pixels = media.inputs_embeds
        # A frozen tower keeps nothing for a backward pass that will not come.
        trains = any(p.requires_grad for p in self.tower.parameters()) or (pixels is not None and pixels.requires_grad)
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
            features = self.tower(media)  # (total_patches, vision width)
        visual: Tensor = self.projector(features)
        return visual

    def splice(self, batch: RaggedBatch, visual: Tensor) -> RaggedBatch:
        """The batch as the decoder reads it, with `inputs_embeds` (total_tokens, language width) instead of images.

        `input_ids` stay beside them: they tell the decoder that this is text, whose positions it scales.

        Args:
            visual: (media_index.numel(), language width), put at `media_index`.
        """
        index = batch.media_index
        assert index is not None, "a batch with images says where they stand"
        x = batch.inputs_embeds
        if x is None:
            assert batch.input_ids is not None, "a batch holds input_ids or inputs_embeds"
            # A placeholder's id may lie outside the vocabulary; its embedding is not read.
            x = self.embed(batch.input_ids.index_fill(0, index, 0))
        x = x.index_copy(0, index, visual.to(x.dtype))
        return replace(batch, inputs_embeds=x, media=None, media_index=None, media_seqs=None)

    def losses(self, batch: RaggedBatch) -> Terms:
        """Terms over the batch's targets, as of the decoder. Raises as `forward`."""
        return self.decoder.losses(self._read_images(batch))

    @torch.no_grad()
    def token_nll(self, batch: RaggedBatch) -> Tensor:
        """Negative log-likelihood of every target of the batch, (num_targets,) in nats."""
        return self.decoder.token_nll(self._read_images(batch))

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        """The counts that `losses` will return, from the batch alone."""
        return self.decoder.count_targets(batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, (num, width) -> (num, vocab_size), fp32 or wider."""
        return self.decoder.logits(hidden)

    @property
    def embed(self) -> nn.Embedding:
        """Embedding of text tokens."""
        return self.decoder.embed

    @property
    def label_smoothing(self) -> float:
        return self.decoder.label_smoothing

    @label_smoothing.setter
    def label_smoothing(self, value: float) -> None:
        self.decoder.label_smoothing = value

    def _check_places(self, batch: RaggedBatch) -> None:
        """Refuse a batch whose visual tokens are not exactly where its placeholders are.

        Raises:
            SourceError: names the sequence.
        """
        index, device = batch.media_index, batch.position_ids.device
        if index is None:
            index = torch.zeros(0, dtype=torch.int64, device=device)
        num_visual = 0 if batch.media is None else batch.media.total_tokens
        placeholders = _placeholders(batch, self.config.image_id)
        expected = index if placeholders is None else placeholders
        if index.numel() == num_visual and (placeholders is None or torch.equal(placeholders, index)):
            return
        sequence = _sequence_of_cell(batch)
        visual = torch.zeros(batch.num_seqs, dtype=torch.int64, device=device)
        if batch.media is not None and batch.media_seqs is not None:
            visual = visual.index_add(0, batch.media_seqs, batch.media.layout.lengths())
        marked, placed = (torch.bincount(sequence[at], minlength=batch.num_seqs) for at in (expected, index))
        wrong = ((marked != visual) | (placed != visual)).nonzero().flatten().tolist()
        if wrong:
            short = int(placed[wrong[0]]) if marked[wrong[0]] == visual[wrong[0]] else int(marked[wrong[0]])
            counts = f"{short} placeholders for {int(visual[wrong[0]])} visual tokens"
        else:
            wrong = sequence[expected[expected != index][:1]].tolist()
            counts = "visual tokens at other places than its placeholders"
        name = wrong[0] if batch.seq_ids is None else int(batch.seq_ids[wrong[0]])
        raise SourceError(
            f"a sequence has {counts}",
            where=f"sequence {name}" + (" of the batch" if batch.seq_ids is None else ""),
            fix="put one placeholder into the text for every patch of its images, in their order",
        )

    def _read_images(self, batch: RaggedBatch) -> RaggedBatch:
        """The batch as the decoder reads it; the tower does not run for text alone."""
        self._check_places(batch)
        if batch.media is None or batch.media.total_tokens == 0:
            return batch
        return self.splice(batch, self.encode(batch.media))


def _placeholders(batch: RaggedBatch, image_id: int | None) -> Tensor | None:
    """The places of placeholders, ascending, (num,) int64; None where they cannot be told.

    On an accelerator finding them would make it wait; there whoever made the batch sees to it.
    """
    if image_id is None or batch.input_ids is None or batch.input_ids.device.type != "cpu":
        return None
    is_placeholder = batch.input_ids == image_id
    if isinstance(batch.layout, PaddedLayout):  # padding may hold any id
        is_placeholder &= batch.layout.attention_mask.flatten()
    return is_placeholder.nonzero().flatten()


def _sequence_of_cell(batch: RaggedBatch) -> Tensor:
    """The sequence of every token, (total_tokens,) int64; of padding cells too."""
    if isinstance(batch.layout, PaddedLayout):
        mask = batch.layout.attention_mask
        return torch.arange(mask.shape[0], device=mask.device).repeat_interleave(mask.shape[1])
    return batch.layout.seq_of_token()
