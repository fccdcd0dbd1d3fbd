"""The vision tower, which maps a flat run of images' patches to one feature vector per patch.

A vision transformer (Dosovitskiy et al. 2021, arXiv 2010.11929). With learned positions and a norm before the first
block it equals CLIP's (Radford et al. 2021, arXiv 2103.00020).
"""

from itertools import islice
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch, required
from unpad.batching.layout import Layout
from unpad.errors import SourceError
from unpad.models.vision_language.prune import text_to_vision_attention
from unpad.nn.activation import Kind
from unpad.nn.block import Block, BlockConfig, Stream, init_weights
from unpad.nn.draws import draw, dropout
from unpad.nn.linear import Linear
from unpad.nn.norm import Norm
from unpad.nn.positions import GridPositions


class TowerConfig(BlockConfig):
    """Sizes and choices of a vision tower."""

    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    eps: float = Field(1e-5, gt=0)
    activation: Kind = "gelu"
    bias: bool = True
    causal: bool = False
    patch: int = Field(14, ge=1)
    """Side of a patch, in pixels."""
    positions: Literal["grid", "learned"] = "grid"
    """grid: images of any size; learned: a table for one size, and a class token per image."""
    side: int = Field(24, ge=1)
    """Rows and columns of patches in the one size that learned positions know."""
    pre_norm: bool = False
    """Normalise patches before the first block."""
    feature_layer: int = -2
    """Block after which features are taken: 0 before the first, -1 after the last, -2 one earlier."""

    @model_validator(mode="after")
    def _layer_exists(self) -> "TowerConfig":
        if not -self.blocks - 1 <= self.feature_layer <= self.blocks:
            raise ValueError(f"feature_layer {self.feature_layer} is none of a tower with {self.blocks} blocks")
        return self

    @property
    def num_run(self) -> int:
        """Number of blocks that run; blocks after the feature layer are unused weights."""
        return self.feature_layer + (self.blocks + 1 if self.feature_layer < 0 else 0)


class Tower(nn.Module):
    """Vision transformer for a language model; no norm follows its last block.

    Args:
        config: sizes and choices.
    """

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config = config
        learned = config.positions == "learned"
        # A table of positions contains a bias already.
        self.patch_embed = Linear(3 * config.patch**2, config.width, bias=config.bias and not learned)
        self.class_token: nn.Parameter | None = None
        self.positions: nn.Module
        if learned:
            self.class_token = nn.Parameter(torch.empty(config.width))
            self.positions = nn.Embedding(1 + config.side**2, config.width)  # the class token's, then row by row
        else:
            self.positions = GridPositions(config.width)
        self.pre_norm = Norm(config.norm, config.width, config.eps) if config.pre_norm else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        init_weights(self, config.blocks)
        if self.class_token is not None:
            nn.init.normal_(self.class_token, std=0.02)

    def forward(self, media: RaggedBatch) -> Tensor:
        """Features in the order of the patches, (total_patches, width), fp32 or wider; arguments and errors as in
        `look`."""
        return self.look(media, wants_attention=False)[0]

    def look(self, media: RaggedBatch, wants_attention: bool) -> tuple[Tensor, Tensor | None]:
        """Features in the order of the patches, (total_patches, width), fp32 or wider, and with `wants_attention` the
        attention that patches receive in the last block that runs, (total_patches,) without gradient.

        The attention is the class token's, as in VisionZip (Yang et al. 2024, arXiv 2412.04467), or without a class
        token the mean over the patches of the image.

        Args:
            media: a flat run of images: `inputs_embeds` (total_patches, 3 * patch * patch), the pixels of each patch
                by channel, then row, then column; `position_ids` row by row; `grid`.

        Raises:
            SourceError: patches have another size, or an image has another size than learned positions.
        """
        layout = media.flat_layout
        pixels, grid = required(media.inputs_embeds), required(media.grid)
        self._check(pixels, grid)
        # The weights' dtype: fp32 pixels must not limit an fp64 model, and the residual stream stays fp32 while
        # products run in bf16.
        dtype = self.patch_embed.weight.dtype
        x = self.patch_embed(pixels.to(dtype)).to(dtype)  # (total_patches, width)
        places = None
        if self.class_token is None:
            x = x + self.positions(media.position_ids, grid, layout).to(dtype)
        else:
            x, layout, places = self._with_class_tokens(x + self.positions(1 + media.position_ids), layout)
        x, received = self._blocks(x, layout, places, wants_attention)
        return x if places is None else x.index_select(0, places), received

    def _blocks(
        self, x: Tensor, layout: Layout, patches: Tensor | None, wants_attention: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run the blocks over a run in which only `patches` are patches; results as of `look`, for all tokens."""
        if self.pre_norm is not None:
            # Its output is the residual stream, which autocast must not round.
            with torch.autocast(x.device.type, enabled=False):
                x = self.pre_norm(x)[1]
        stream, received = Stream(x, None, layout), None
        for index, block in enumerate(islice(self.blocks, self.config.num_run)):
            if wants_attention and index == self.config.num_run - 1:
                received = self._received(block, stream.hidden(), layout, patches)
            stream = block(stream)
        if stream.delta is None:
            return stream.x, received
        share = self.config.dropout if self.training else 0.0
        delta = dropout(stream.delta, share, draw(), layout.places) if share else stream.delta
        return stream.x + delta, received

    @torch.no_grad()
    def _received(self, block: nn.Module, x: Tensor, layout: Layout, patches: Tensor | None) -> Tensor:
        """Attention that each patch receives in a block with input x (total_tokens, width), (total_patches,)."""
        assert isinstance(block, Block), "a tower is a stack of blocks"
        q, k = block.attention.queries_and_keys(block.norm_1(x)[1], None)
        looked_at = torch.ones(len(x), dtype=torch.bool, device=x.device)
        looking = looked_at
        if patches is not None:
            looked_at = torch.zeros_like(looked_at)
            looked_at[patches] = True
            looking = ~looked_at
        return text_to_vision_attention(q, k, layout, looked_at, looking, self.config.causal)

    def _with_class_tokens(self, x: Tensor, layout: Layout) -> tuple[Tensor, Layout, Tensor]:
        """Insert a class token before the patches of every image.

        Returns:
            The longer run, its layout, and the place of every patch in it, (total_patches,) int64.
        """
        assert self.class_token is not None, "only beside a table of positions"
        assert isinstance(self.positions, nn.Embedding), "which has its position in row 0"
        num_images, device = layout.num_seqs, x.device
        image = torch.repeat_interleave(layout.lengths(), output_size=len(x))  # (total_patches,)
        places = torch.arange(1, len(x) + 1, device=device) + image
        first = self.class_token + self.positions.weight[0]
        run = first.expand(len(x) + num_images, -1).index_copy(0, places, x)
        bounds = layout.cu_seqlens + torch.arange(num_images + 1, dtype=torch.int32, device=device)
        return run, Layout(bounds, layout.max_seqlen + (num_images > 0), keys=layout.keys), places

    def _check(self, patches: Tensor, grid: Tensor) -> None:
        config = self.config
        if patches.shape[1] != 3 * config.patch**2:
            what = f"a patch has {patches.shape[1]} values, expected 3 x {config.patch} x {config.patch}"
            raise SourceError(what, fix="cut images into patches of vision.patch pixels a side, in three channels")
        # Reading the sizes would make an accelerator wait; there the preparation of images ensures them.
        if config.positions == "grid" or grid.device.type != "cpu":
            return
        wrong = (grid != config.side).any(1).nonzero().flatten().tolist()
        if wrong:
            rows, columns = grid[wrong[0]].tolist()
            pixels = config.side * config.patch
            raise SourceError(
                f"an image has {rows} x {columns} patches; learned positions know {config.side} x {config.side} alone",
                where=f"image {wrong[0]} of the batch",
                fix=f"resize images to {pixels} x {pixels} pixels, or build the tower with positions=grid",
            )
