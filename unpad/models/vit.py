"""A vision transformer over images of any size: patches, pre-norm blocks, one vector per image, classes.

Every image keeps its own size and aspect ratio, as in NaViT (Dehghani et al. 2023, arXiv 2307.06304): a sequence is the
patches of one image.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import PaddedLayout
from unpad.models.contract import Classifier, ModelConfig
from unpad.nn.activation import Kind
from unpad.nn.block import Block, BlockConfig, Stream, init_weights
from unpad.nn.convolution import ConvolutionalStem, neighbours
from unpad.nn.draws import uniform
from unpad.nn.linear import Linear
from unpad.nn.norm import Norm
from unpad.nn.pool import AttentionPool
from unpad.nn.positions import GridPositions, SizeEmbedding, seq_of_cell
from unpad.nn.segments import segment_mean

DATA = "images"


class Config(ModelConfig, BlockConfig):
    """The `model` section of a recipe."""

    kind: Literal["vit"] = "vit"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    activation: Kind = "gelu"
    bias: bool = True
    causal: bool = False
    patch: int = Field(8, ge=1)
    """Side of a patch, in pixels."""
    channels: Literal[3, 4] = 3
    """Of a pixel: red, green and blue on white; 4 with opacity."""
    size_embed: bool = False
    """Let the model know how many pixels an image has, however it is shown."""
    stem: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Channels of the convolutions over an image's pixels that make the vectors of its patches, each halving the sides;
    none: one linear map of a patch."""
    pool: Literal["mean", "attention"] = "mean"
    """How the patches of an image become one vector."""
    token_drop: float = Field(0.0, ge=0, lt=1)
    """Share of patches that training leaves out of every image; one stays at least."""
    context: int = Field(4096, ge=1)
    """Most patches of one image."""

    @model_validator(mode="after")
    def _stem_fits(self) -> Config:
        if self.patch % 2 ** len(self.stem):
            raise ValueError(f"patch {self.patch} cannot be halved {len(self.stem)} times, once after each of stem")
        return self

    @property
    def longest(self) -> int:
        """Largest number of tokens of one image."""
        return self.context


class Vit(Classifier):
    """Classifier of images of any size.

    Args:
        config: sizes and choices.
        num_classes: rows of the head.
    """

    config: Config

    def __init__(self, config: Config, num_classes: int) -> None:
        super().__init__()
        self.config, self.num_classes = config, num_classes
        self.causal, self.head_dim = config.causal, config.head_dim
        self.patch_embed = (
            ConvolutionalStem(config.patch, config.channels, config.stem, config.width, config.eps)
            if config.stem
            else Linear(config.channels * config.patch**2, config.width)
        )
        self.positions = GridPositions(config.width)
        self.size_embed = SizeEmbedding(config.width) if config.size_embed else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = Norm(config.norm, config.width, config.eps, config.dropout)
        self.pool = AttentionPool(config.width, config.heads) if config.pool == "attention" else None
        self.head = Linear(config.width, num_classes, bias=False)
        init_weights(self, config.blocks)
        if isinstance(self.patch_embed, ConvolutionalStem):
            self.patch_embed.init_weights()

    def forward(self, batch: RaggedBatch) -> Tensor:
        """Hidden states of patches after the last norm, (total_tokens, width), in the computing dtype.

        Training with `token_drop` returns the states of the remaining patches.
        """
        return self._hidden(self._thinned(batch))

    def _thinned(self, batch: RaggedBatch) -> RaggedBatch:
        return drop_tokens(batch, self.config.token_drop) if self.training and self.config.token_drop else batch

    def _hidden(self, batch: RaggedBatch) -> Tensor:
        assert batch.inputs_embeds is not None, "a batch of images holds their patches"
        assert batch.grid is not None, "and the size of each image"
        # The weights' dtype: fp32 pixels must not limit an fp64 model, and the residual stream stays fp32 while
        # products run in bf16.
        dtype = self.head.weight.dtype
        x = self._embed(batch.inputs_embeds.to(dtype), batch).to(dtype)  # (total_tokens, width)
        x = x + self.positions(batch.position_ids, batch.grid, batch.layout).to(dtype)
        if self.size_embed is not None:
            assert batch.image_sizes is not None, "size_embed needs the sizes of images"
            x = x + self.size_embed(batch.image_sizes).index_select(0, seq_of_cell(batch.layout)).to(dtype)
        stream = Stream(x, None, batch.layout)
        for block in self.blocks:
            stream = block(stream)
        hidden: Tensor = self.norm(stream.x, stream.delta, stream.layout)[1]
        return hidden

    def _embed(self, pixels: Tensor, batch: RaggedBatch) -> Tensor:
        """Vectors of patches, (total_tokens, width), in the computing dtype."""
        touching: tuple[Tensor, ...] = ()
        if isinstance(self.patch_embed, ConvolutionalStem):
            assert batch.grid is not None, "convolutions need the grid of patches"
            touching = (neighbours(batch.position_ids, batch.grid, batch.layout),)
        embedded: Tensor = self.patch_embed(pixels, *touching)
        return embedded

    def _features(self, batch: RaggedBatch) -> Tensor:
        """One vector per image, (num_seqs, width), in the computing dtype."""
        batch = self._thinned(batch)
        hidden = self._hidden(batch)
        pooled = segment_mean(hidden, batch.layout) if self.pool is None else self.pool(hidden, batch.layout)
        return pooled.to(hidden.dtype)


def drop_tokens(batch: RaggedBatch, share: float) -> RaggedBatch:
    """Drop a share of the patches of every image, chosen at random; the others keep their positions.

    An image of n patches keeps round(n * (1 - share)), and at least one. The choice depends on the seed and the
    lengths alone, so a rectangle keeps the same patches as the flat run; its dropped cells become padding.
    """
    places = batch.layout.places
    if places is not None and isinstance(batch.layout, PaddedLayout):
        places = places[batch.layout.attention_mask.flatten()]
    kept = _choose_tokens(batch.layout.lengths(), share, places)
    if isinstance(batch.layout, PaddedLayout):
        mask = batch.layout.attention_mask
        return replace(batch, layout=replace(batch.layout, attention_mask=mask.masked_scatter(mask, kept)))
    return batch.keep(kept)


def _choose_tokens(lengths: Tensor, share: float, places: Tensor | None) -> Tensor:
    """Mask of the tokens to keep, (lengths.sum(),) bool: those with the smallest random keys of each sequence."""
    num_kept = (lengths.double() * (1 - share)).round().long().clamp_min(1).minimum(lengths)  # (num_seqs,)
    sequence = torch.repeat_interleave(lengths)  # (num_tokens,)
    by_key = uniform(sequence, places).argsort(stable=True)
    order = by_key[sequence[by_key].argsort(stable=True)]  # by sequence, and within a sequence by key
    # This order keeps sequences in place, so a token's rank is its distance from the start of its sequence.
    starts = lengths.cumsum(0) - lengths
    rank = torch.arange(sequence.numel(), device=lengths.device) - starts[sequence]
    kept = torch.empty_like(sequence, dtype=torch.bool)
    kept[order] = rank < num_kept[sequence]
    return kept
