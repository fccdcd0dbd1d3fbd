"""A vision transformer over images of any size: patches, pre-norm blocks, one vector per image, classes.

Every image keeps its own size and aspect ratio, as in NaViT (Dehghani et al. 2023, arXiv 2307.06304): a sequence is the
patches of one image. Convolutions of its stem run over the flat run of patches without padding: before one, each patch
copies a line of cells from every neighbour in its own image, which equals the convolution of the whole image with zeros
around it.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from unpad.batching.batch import RaggedBatch, required
from unpad.batching.layout import Layout, PaddedLayout
from unpad.models.contract import Classifier, ModelConfig
from unpad.nn.activation import Kind, activate
from unpad.nn.block import Block, BlockConfig, Stream, init_weights
from unpad.nn.draws import uniform
from unpad.nn.linear import Linear, compute_dtype, product
from unpad.nn.norm import Norm
from unpad.nn.positions import GridPositions, SizeEmbedding, seq_of_cell
from unpad.nn.precision import widened
from unpad.nn.segments import AttentionPool, segment_mean

SIDES = ((0, -1), (0, 1), (-1, 0), (1, 0))  # steps in rows and columns to the left, right, upper and lower neighbour


def neighbours(position_ids: Tensor, grid: Tensor, layout: Layout | PaddedLayout) -> Tensor:
    """Find the patches that share a side with each patch.

    Args:
        position_ids: (total_tokens,) int64, row * columns + column in the patch's own image.
        grid: (num_seqs, 2) int64, rows and columns of each image.

    Returns:
        (4, total_tokens) int64, the token of the patch to the left, right, above and below; `total_tokens` where the
        image ends or the patch was dropped, and for padding cells.
    """
    sequence, total = seq_of_cell(layout), position_ids.numel()
    sizes = grid.prod(1)
    first = (sizes.cumsum(0) - sizes).index_select(0, sequence)  # the image's first place among those of all images
    rows, columns = (grid.clamp_min(1)[:, side].index_select(0, sequence) for side in (0, 1))
    row, column, place = position_ids // columns, position_ids % columns, first + position_ids
    tokens = torch.arange(total, device=grid.device)
    real = layout.attention_mask.flatten() if isinstance(layout, PaddedLayout) else torch.ones_like(tokens).bool()
    # Token at each place of each image; an additional place absorbs the writes of padding cells.
    num_places = int(sizes.sum())
    token_at = torch.full((num_places + 1,), total, device=grid.device)
    token_at[torch.where(real, place, num_places)] = tokens
    token_at[num_places] = total
    found = []
    for down, right in SIDES:
        inside = (row + down >= 0) & (row + down < rows) & (column + right >= 0) & (column + right < columns) & real
        found.append(token_at[torch.where(inside, place + down * columns + right, num_places)])
    return torch.stack(found)


def with_borders(x: Tensor, beside: Tensor) -> Tensor:
    """Surround the cells of every patch by the nearest cells of its neighbours, by zeros without a neighbour.

    Corners come through the patch above or below: if that patch was dropped, the corner is zero too.

    Args:
        x: (total_tokens, side, side, channels).
        beside: as `neighbours` returned it.

    Returns:
        (total_tokens, side + 2, side + 2, channels).
    """
    left, right, above, below = beside
    x = torch.cat([_take(x[:, :, -1:], left), x, _take(x[:, :, :1], right)], 2)
    return torch.cat([_take(x[:, -1:], above), x, _take(x[:, :1], below)], 1)


def _take(cells: Tensor, tokens: Tensor) -> Tensor:
    """Cells of these tokens; zero for a token past the last."""
    return torch.cat([cells, cells.new_zeros(1, *cells.shape[1:])]).index_select(0, tokens)


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve patches with their borders, (total_tokens, side + 2, side + 2, channels), by a weight of 3 x 3:
    (total_tokens, outputs, side, side)."""
    if x.shape[1] > 3:
        return F.conv2d(x.permute(0, 3, 1, 2), weight)
    # One cell a patch: a matrix product, which takes processors a third of the time.
    dtype = compute_dtype(x)
    return product(x.flatten(1).to(dtype), weight.permute(0, 2, 3, 1).flatten(1).to(dtype))[:, :, None, None]


class ConvolutionalStem(nn.Module):
    """Patches of pixels to vectors by convolutions of 3 x 3, each followed by a max-pool of 2 x 2
    (Xiao et al. 2021, arXiv 2106.14881, use convolutions with stride 2 instead), and then by residual ones of the same
    size (He et al. 2016, arXiv 1512.03385).

    Norms run over the channels of a cell, so that an image's result does not depend on the rest of the batch. A linear
    map turns the remaining cells of a patch into its vector.

    Args:
        patch: side in pixels, divisible by 2 once per max-pool.
        colours: channels of a pixel.
        channels: of the cells after each max-pool.
        width: of a patch's vector.
        eps: of the norms.
        residual: number of residual convolutions after each max-pool.
    """

    def __init__(
        self, patch: int, colours: int, channels: tuple[int, ...], width: int, eps: float, residual: int = 0
    ) -> None:
        super().__init__()
        self.patch, self.colours, self.residual = patch, colours, residual
        sizes = [pair for a, b in pairwise((colours, *channels)) for pair in ((a, b), *[(b, b)] * residual)]
        self.convolutions = nn.ModuleList(nn.Conv2d(*pair, 3, bias=False) for pair in sizes)
        self.norms = nn.ModuleList(Norm("layernorm", count, eps) for _, count in sizes)
        left = patch >> len(channels)
        self.project = Linear(channels[-1] * left**2, width)

    def init_weights(self) -> None:
        """Keep the size of the signal (He et al. 2015, arXiv 1502.01852)."""
        for weight in self.convolutions.parameters():
            nn.init.kaiming_normal_(weight, nonlinearity="relu")
        nn.init.kaiming_normal_(self.project.weight, nonlinearity="relu")

    def forward(self, pixels: Tensor, beside: Tensor) -> Tensor:
        """Embed patches.

        Args:
            pixels: (total_tokens, colours * patch * patch), in a patch ordered (channel, y, x).
            beside: (4, total_tokens) int64, as `neighbours` returned it.

        Returns:
            (total_tokens, width) in the computing dtype.
        """
        cells = pixels.unflatten(1, (self.colours, self.patch, self.patch))
        x = cells.permute(0, 2, 3, 1)  # (total_tokens, side, side, channels)
        for place, (weight, norm) in enumerate(zip(self.convolutions.parameters(), self.norms, strict=True)):
            cells, halves = _convolve(with_borders(x, beside), weight), not place % (1 + self.residual)
            cells = (F.max_pool2d(cells, 2) if halves else cells).permute(0, 2, 3, 1)
            flat = cells.reshape(-1, cells.shape[-1])
            changed = activate("gelu", norm(widened(flat))[1]).view(cells.shape)
            x = changed if halves else x + changed
        return self.project(x.flatten(1))


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
    stem_residual: int = Field(0, ge=0)
    """Residual convolutions of the stem after each of these."""
    pool: Literal["mean", "attention"] = "mean"
    """How the patches of an image become one vector."""
    token_drop: float = Field(0.0, ge=0, lt=1)
    """Share of patches that training leaves out of every image; one stays at least."""
    context: int = Field(4096, ge=1)
    """Most patches of one image."""

    @model_validator(mode="after")
    def _stem_fits(self) -> "Config":
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
        read = config.patch, config.channels
        self.patch_embed = (
            ConvolutionalStem(*read, config.stem, config.width, config.eps, config.stem_residual)
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
        pixels, grid = required(batch.inputs_embeds), required(batch.grid)
        # The weights' dtype: fp32 pixels must not limit an fp64 model, and the residual stream stays fp32 while
        # products run in bf16.
        dtype = self.head.weight.dtype
        beside = [neighbours(batch.position_ids, grid, batch.layout)] if self.config.stem else []
        x = self.patch_embed(pixels.to(dtype), *beside).to(dtype)  # (total_tokens, width)
        x = x + self.positions(batch.position_ids, grid, batch.layout).to(dtype)
        if self.size_embed is not None:
            sizes = self.size_embed(required(batch.image_sizes))
            x = x + sizes.index_select(0, seq_of_cell(batch.layout)).to(dtype)
        stream = Stream(x, None, batch.layout)
        for block in self.blocks:
            stream = block(stream)
        return self.norm(stream.x, stream.delta, stream.layout)[1]

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
