"""Convolutions over images of any size in one flat run of patches, without padding.

A patch holds a small square of cells. Before a convolution each patch copies one line of cells from every neighbour in
its own image, so that computing patch by patch equals the convolution of the whole image with zeros around it.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unpad.batching.layout import Layout, PaddedLayout
from unpad.nn.activation import activate
from unpad.nn.linear import Linear
from unpad.nn.norm import Norm
from unpad.nn.positions import seq_of_cell
from unpad.nn.precision import widened

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


class ConvolutionalStem(nn.Module):
    """Patches of pixels to vectors by convolutions of 3 x 3, each followed by a max-pool of 2 x 2
    (Xiao et al. 2021, arXiv 2106.14881, use convolutions with stride 2 instead).

    Norms run over the channels of a cell, so that an image's result does not depend on the rest of the batch. A linear
    map turns the remaining cells of a patch into its vector.

    Args:
        patch: side in pixels, divisible by 2 once per convolution.
        colours: channels of a pixel.
        channels: of each convolution.
        width: of a patch's vector.
        eps: of the norms.
    """

    def __init__(self, patch: int, colours: int, channels: tuple[int, ...], width: int, eps: float) -> None:
        super().__init__()
        self.patch, self.colours = patch, colours
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, bias=False) for a, b in pairwise((colours, *channels)))
        self.norms = nn.ModuleList(Norm("layernorm", count, eps) for count in channels)
        left = patch >> len(channels)
        self.project = Linear(channels[-1] * left**2, width)

    def init_weights(self) -> None:
        """Keep the size of the signal (He et al. 2015, arXiv 1502.01852)."""
        for convolution in self.convolutions:
            assert isinstance(convolution, nn.Conv2d)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")

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
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            cells = convolution(with_borders(x, beside).permute(0, 3, 1, 2))
            x = F.max_pool2d(cells, 2).permute(0, 2, 3, 1)
            flat = x.reshape(-1, x.shape[-1])
            x = activate("gelu", norm(widened(flat))[1]).view(x.shape)
        out: Tensor = self.project(x.flatten(1))
        return out
