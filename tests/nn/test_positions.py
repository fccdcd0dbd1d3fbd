"""Places in a grid: distinct, alike for alike places, and ready for sizes that nobody trained on."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from unpad.batching.batch import to_padded
from unpad.batching.layout import Layout, PaddedLayout, build_layout
from unpad.nn.positions import MAX_DOUBLINGS, GridPositions, SizeEmbedding

WIDTH = 16


def positions(dtype: torch.dtype = torch.float64) -> GridPositions:
    torch.manual_seed(0)
    module = GridPositions(WIDTH)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64).to(dtype)
    return module


def images(*sizes: tuple[int, int]) -> tuple[Tensor, Tensor, Layout]:
    """Position ids, grid and layout of images of these rows and columns."""
    lengths = np.array([rows * columns for rows, columns in sizes], np.int64)
    ids = torch.cat([torch.arange(0), *(torch.arange(n) for n in lengths.tolist())])
    return ids, torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2), build_layout(lengths)


SIZES = ((3, 5), (1, 1), (6, 90), (7, 1), (1, 4))


@torch.no_grad()
def test_an_image_has_the_same_positions_in_any_company():
    module, (ids, grid, layout) = positions(), images(*SIZES)
    embeddings = module(ids, grid, layout)
    alone = torch.cat([module(*images(size)) for size in SIZES])
    torch.testing.assert_close(embeddings, alone, rtol=1e-12, atol=1e-12)
    for side in ("left", "right"):
        padded_ids, mask = to_padded(ids, layout, side, pad_to=545)
        padded = module(padded_ids.flatten(), grid, PaddedLayout(mask))
        torch.testing.assert_close(padded[mask.flatten()], alone, rtol=1e-12, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("size", [(40, 70), (1, 1000), (300, 2)])
def test_every_place_of_an_image_larger_than_any_seen_is_finite_and_distinct(size):
    embeddings = positions()(*images(size))
    assert torch.isfinite(embeddings).all()
    assert len(torch.unique((embeddings * 1e8).round(), dim=0)) == size[0] * size[1]


@torch.no_grad()
def test_places_of_equal_number_in_images_of_unlike_shape_differ():
    wide, tall, other = positions()(*images((2, 6), (6, 2), (3, 4))).split(12)
    assert torch.equal(wide[0], tall[0])  # the upper left corner is where every coordinate begins
    assert (wide - tall)[1:].norm(dim=1).min() > 1e-3
    assert (wide - other)[1:].norm(dim=1).min() > 1e-3


@torch.no_grad()
def test_patches_left_when_others_were_dropped_keep_their_places():
    module, (ids, grid, layout) = positions(), images(*SIZES)
    kept = torch.rand(len(ids)) < 0.5
    torch.testing.assert_close(module(ids[kept], grid, layout.keep(kept)), module(ids, grid, layout)[kept])


@torch.no_grad()
def test_no_images_have_no_positions_and_an_empty_image_harms_none():
    module = positions()
    assert module(*images()).shape == (0, WIDTH)
    torch.testing.assert_close(module(*images((0, 0), (2, 3), (0, 5))), module(*images((2, 3))))
    mask = torch.tensor([[False, False], [True, True]])
    grid = torch.tensor([[0, 0], [1, 2]])
    padded = module(torch.tensor([0, 0, 0, 1]), grid, PaddedLayout(mask))
    torch.testing.assert_close(padded[2:], module(*images((1, 2))))


def waves(coordinate: int, size: int) -> Tensor:
    """What a map sees of one coordinate, (4 * num_waves,), with num_waves = 4."""
    absolute = [coordinate / 10_000 ** (i / 4) for i in range(4)]
    relative = [coordinate / max(size - 1, 1) * math.pi * 64 ** (i / 4) for i in range(4)]
    angles = [math.sin(a) for a in absolute], [math.cos(a) for a in absolute]
    fractions = [math.sin(a) for a in relative], [math.cos(a) for a in relative]
    return torch.tensor([*angles[0], *angles[1], *fractions[0], *fractions[1]], dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_an_embedding_follows_its_formula_near_and_far(dtype, tolerance):
    exact = positions()
    rows, columns = 2, 20_000
    embeddings = positions(dtype)(*images((3, 5), (rows, columns)))[15:].double()
    for row, column in [(0, 0), (1, 1), (0, 777), (1, 14_321), (1, 19_999)]:
        expected = exact.row.weight @ waves(row, rows) + exact.column.weight @ waves(column, columns)
        assert (embeddings[row * columns + column] - expected).norm() <= tolerance * expected.norm()


def test_gradients_of_low_precision_are_summed_in_fp32():
    exact, low = positions(), positions(torch.float32)
    strip = images((1, 4096))  # in bf16 a sum of ones stops at 256
    exact(*strip).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        embeddings = low(*strip)
    assert embeddings.dtype == torch.float32
    embeddings.sum().backward()
    assert (low.row.weight.grad - exact.row.weight.grad).norm() <= 1e-2 * exact.row.weight.grad.norm()


def test_any_width_has_positions_and_both_maps_are_trained():
    for width in (1, 3, 6, 8):
        module = GridPositions(width)
        embeddings = module(*images((2, 3)))
        assert embeddings.shape == (6, width)
        embeddings.square().sum().backward()
        for linear in (module.row, module.column):
            assert linear.weight.grad.abs().max() > 0


def test_sizes_are_linear_in_logarithms_between_powers_of_two():
    torch.manual_seed(0)
    embed = SizeEmbedding(6).double()
    height, width = embed.height.weight.t(), embed.width.weight.t()  # (powers of two, 6)
    sizes = torch.tensor([[1, 1], [16, 32], [24, 1], [0, 100_000]])
    part = math.log2(24) - 4
    expected = torch.stack([
        height[0] + width[0], height[4] + width[5], (1 - part) * height[4] + part * height[5] + width[0],
        height[0] + width[MAX_DOUBLINGS],
    ])  # fmt: skip
    torch.testing.assert_close(embed(sizes), expected, rtol=1e-12, atol=1e-12)
    assert embed(sizes[:0]).shape == (0, 6)
