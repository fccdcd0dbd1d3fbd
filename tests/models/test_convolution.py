"""Convolutions over a flat run of patches: those of every whole image, alone and in any company."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.image_models import cut_patches
from tests.helpers.samples import moved
from unpad.batching.batch import to_padded
from unpad.batching.layout import Layout, PaddedLayout, build_layout
from unpad.models.vit import ConvolutionalStem, neighbours

PATCH, WIDTH = 4, 6
SIZES = ((3, 5), (1, 1), (6, 90), (0, 0), (7, 1), (16, 16), (1, 4))  # rows and columns of patches
Run = tuple[Tensor, Tensor, Layout]


def places(*sizes: tuple[int, int]) -> Run:
    """Position ids, grid and layout of images of these rows and columns."""
    lengths = np.array([rows * columns for rows, columns in sizes], np.int64)
    ids = torch.cat([torch.arange(0), *(torch.arange(n) for n in lengths.tolist())])
    return ids, torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2), build_layout(lengths)


def pictures(*sizes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(3, r * PATCH, c * PATCH, generator=generator, dtype=torch.float64) for r, c in sizes]


def stem(channels: tuple[int, ...] = (4, 5), residual: int = 0) -> ConvolutionalStem:
    return moved(ConvolutionalStem(PATCH, 3, channels, WIDTH, 1e-6, residual))


def on_whole_image(module: ConvolutionalStem, image: Tensor) -> Tensor:
    """What torch's convolutions make of one image (3, height, width), (rows * columns, WIDTH)."""
    x, side = image[None], PATCH
    for convolution, norm in zip(module.convolutions, module.norms, strict=True):
        y, residual = F.conv2d(x, convolution.weight, padding=1), convolution.in_channels == convolution.out_channels
        y = y if residual else F.max_pool2d(y, 2)
        y = F.gelu(F.layer_norm(y.permute(0, 2, 3, 1), norm.weight.shape, norm.weight, norm.bias, norm.eps))
        y = y.permute(0, 3, 1, 2)
        x, side = (x + y, side) if residual else (y, side // 2)
    rows, columns = image.shape[1] // PATCH, image.shape[2] // PATCH
    cells = x[0].unflatten(1, (rows, side)).unflatten(3, (columns, side)).permute(1, 3, 2, 4, 0)
    return module.project(cells.reshape(rows * columns, -1))


def test_neighbours_share_a_side_and_never_an_image():
    (ids, grid, layout), total = places((2, 3), (1, 2)), 8
    left, right, above, below = neighbours(ids, grid, layout)
    none = total
    assert left.tolist() == [none, 0, 1, none, 3, 4, none, 6]
    assert right.tolist() == [1, 2, none, 4, 5, none, 7, none]
    assert above.tolist() == [none, none, none, 0, 1, 2, none, none]
    assert below.tolist() == [3, 4, 5, none, none, none, none, none]


def test_a_dropped_patch_is_nobodys_neighbour():
    ids, grid, layout = places((2, 3), (1, 2))
    kept = torch.tensor([True, False, True, True, True, False, True, True])
    left, right, above, below = neighbours(ids[kept], grid, layout.keep(kept))
    assert left.tolist() == [6, 6, 6, 2, 6, 4]  # patches 0, 2, 3, 4 of the first image, 0 and 1 of the second
    assert right.tolist() == [6, 6, 3, 6, 5, 6]
    assert above.tolist() == [6, 6, 0, 6, 6, 6]
    assert below.tolist() == [2, 6, 6, 6, 6, 6]


@pytest.mark.parametrize(("channels", "residual"), [((4, 5), 1), ((4, 5), 0), ((4,), 2)])
def test_the_stem_is_the_convolution_of_every_whole_image_outputs_and_gradients(channels, residual):
    module, images = stem(channels, residual), pictures(*SIZES)
    expected = torch.cat([on_whole_image(module, image) for image in images if image.numel()])
    weight = torch.randn_like(expected)
    truth = torch.autograd.grad((expected * weight).sum(), list(module.parameters()))
    for run in _ways(torch.cat([cut_patches(image, PATCH) for image in images])):
        flat, (ids, grid, layout) = run
        got = module(flat, neighbours(ids, grid, layout))
        if isinstance(layout, PaddedLayout):
            got = got[layout.attention_mask.flatten()]
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
        gradients = torch.autograd.grad((got * weight).sum(), list(module.parameters()))
        for one, other in zip(gradients, truth, strict=True):
            assert (one - other).norm() <= 1e-10 * other.norm()


def _ways(pixels: Tensor) -> list[tuple[Tensor, tuple[Tensor, Tensor, Layout | PaddedLayout]]]:
    """The images as a flat run, and as rectangles whose padding holds noise."""
    ids, grid, layout = places(*SIZES)
    ways: list[tuple[Tensor, tuple[Tensor, Tensor, Layout | PaddedLayout]]] = [(pixels, (ids, grid, layout))]
    for side in ("left", "right"):
        padded, mask = to_padded(pixels, layout, side, 545, fill=7.0)
        padded_ids = to_padded(ids, layout, side, 545)[0]
        ways.append((padded.flatten(0, 1), (padded_ids.flatten(), grid, PaddedLayout(mask))))
    return ways


def test_a_run_without_patches_is_legal():
    module = stem()
    out = module(torch.zeros(0, 3 * PATCH**2, dtype=torch.float64), neighbours(*places()))
    assert out.shape == (0, WIDTH)
    out.sum().backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in module.parameters())
