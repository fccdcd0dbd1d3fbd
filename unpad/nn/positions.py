"""Position embeddings of patches in images of any size."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unpad.batching.layout import Layout, PaddedLayout
from unpad.nn.linear import Linear
from unpad.nn.precision import widened
from unpad.nn.rope import rotary_frequencies

# Half turns of the fastest wave over the fraction of a side, enough for sides of 64 patches; on longer sides the
# absolute coordinate distinguishes neighbours.
MAX_HALF_TURNS = 64.0
MAX_DOUBLINGS = 14  # of one pixel; the longest side that is decoded


class GridPositions(nn.Module):
    """Embedding of a patch's place: f(row, rows) + g(column, columns), factorised so that no size needs a table
    (Dehghani et al. 2023, arXiv 2307.06304, section 2.1).

    f and g see sines and cosines of the coordinate, counted in patches, and of its fraction of the side, from 0 at one
    edge to 1 at the other, and are one linear map each. Untrained sizes stay in range: fractions never leave [0, 1],
    and waves are bounded.

    Args:
        width: channels of the embedding.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_waves = max(width // 4, 1)  # of the coordinate, and as many of its fraction
        self.row = Linear(4 * self.num_waves, width, bias=False)
        self.column = Linear(4 * self.num_waves, width, bias=False)

    def forward(self, position_ids: Tensor, grid: Tensor, layout: Layout | PaddedLayout) -> Tensor:
        """Embed every patch.

        Args:
            position_ids: (total_tokens,) int64, row * columns + column in the patch's own image.
            grid: (num_seqs, 2) int64, rows and columns of each image.

        Returns:
            (total_tokens, width), fp32 or wider.
        """
        sizes = grid.clamp_min(1)  # padding cells of an image without patches would divide by 0
        sequence = seq_of_cell(layout)  # (total_tokens,)
        columns = sizes[:, 1].index_select(0, sequence)
        row = self._embed_side(self.row, sizes[:, 0], sequence, position_ids // columns)
        return row + self._embed_side(self.column, sizes[:, 1], sequence, position_ids % columns)

    def _embed_side(self, linear: Linear, size: Tensor, sequence: Tensor, coordinate: Tensor) -> Tensor:
        """Embed coordinates along one side, (total_tokens, width), once per place of an image and not per patch.

        Args:
            size: (num_seqs,) int64, length of this side of each image.
            sequence, coordinate: (total_tokens,) int64.
        """
        starts = size.cumsum(0) - size  # (num_seqs,) where the places of each image begin
        image = torch.repeat_interleave(size)  # (num_places,)
        places = torch.arange(image.numel(), device=size.device) - starts[image]
        table = linear(self.waves(places, size[image]))  # (num_places, width)
        # Widened before the lookup: the gradient of a place is a sum over all its patches.
        return F.embedding(starts[sequence] + coordinate, widened(table))

    def waves(self, coordinate: Tensor, size: Tensor) -> Tensor:
        """Sines and cosines of coordinates, then of their fractions of the side, (num, 4 * num_waves); made in fp64."""
        device = coordinate.device
        exponents = torch.arange(self.num_waves, dtype=torch.float64, device=device) / self.num_waves
        absolute = coordinate.double()[:, None] * rotary_frequencies(2 * self.num_waves, 1e4, "none", 1.0).to(device)
        fraction = coordinate.double() / (size - 1).clamp_min(1)  # 0 where a side has one patch
        relative = fraction[:, None] * math.pi * MAX_HALF_TURNS**exponents
        waves = [absolute.sin(), absolute.cos(), relative.sin(), relative.cos()]
        return torch.cat(waves, 1).to(self.row.weight.dtype)


class SizeEmbedding(nn.Module):
    """Embedding of an image's size: f(height) + g(width), piecewise linear in the logarithms of both.

    Patches show only the resized image: a small image may be enlarged and a large one shrunk to the same number.

    Args:
        width: channels of the embedding.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.height = Linear(MAX_DOUBLINGS + 1, width, bias=False)
        self.width = Linear(MAX_DOUBLINGS + 1, width, bias=False)

    def forward(self, sizes: Tensor) -> Tensor:
        """Embed (num_seqs, 2) int64, height and width in pixels: (num_seqs, width), fp32 or wider."""
        doublings = sizes.clamp_min(1).double().log2().clamp_max(MAX_DOUBLINGS)
        # Closeness to each power of two: two numbers that add up to 1, and zeros.
        near = 1 - (doublings[..., None] - torch.arange(MAX_DOUBLINGS + 1, device=sizes.device)).abs()
        height, width = near.clamp_min(0).to(self.height.weight.dtype).unbind(1)  # (num_seqs, MAX_DOUBLINGS + 1)
        return widened(self.height(height) + self.width(width))


def seq_of_cell(layout: Layout | PaddedLayout) -> Tensor:
    """Sequence of every token, (total_tokens,) int64, padding cells included."""
    if isinstance(layout, Layout):
        return layout.seq_of_token()
    mask = layout.attention_mask
    return torch.arange(mask.shape[0], device=mask.device).repeat_interleave(mask.shape[1])
