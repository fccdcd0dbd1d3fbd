import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from unpad.data.pixels.patches import grid_of, prepare, unpatch
from unpad.recipes.data import ImageSettings

IMAGENET = ImageSettings(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def noise(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def test_patches_are_what_a_convolution_over_patches_multiplies():
    pixels, weight = noise(6, 9), torch.randn(5, 3, 3, 3, dtype=torch.float64)
    patches = torch.from_numpy(prepare(pixels, (2, 3), 3, IMAGENET)).double()
    scaled = (pixels / 255 - np.array(IMAGENET.mean)) / np.array(IMAGENET.std)
    image = torch.from_numpy(scaled).permute(2, 0, 1)[None]
    expected = torch.nn.functional.conv2d(image, weight, stride=3)[0].flatten(1).T  # (rows * columns, 5), row by row
    torch.testing.assert_close(patches @ weight.flatten(1).T, expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("settings", [ImageSettings(), IMAGENET])
def test_an_image_of_whole_patches_comes_back_exactly(settings):
    pixels = noise(32, 48)
    patches = prepare(pixels, (2, 3), 16, settings)
    assert patches.shape == (6, 3 * 16 * 16)
    assert patches.dtype == np.float32
    assert patches.flags["C_CONTIGUOUS"]
    np.testing.assert_array_equal(unpatch(patches, (2, 3), 16, settings), pixels)


def test_resizing_averages_what_a_pixel_covers():
    board = np.indices((64, 64)).sum(0) % 2 * 255  # without antialiasing, some pixels of it are black or white
    pixels = np.repeat(board[:, :, None], 3, 2).astype(np.uint8)
    small = unpatch(prepare(pixels, (1, 1), 8, ImageSettings()), (1, 1), 8, ImageSettings())
    assert abs(small.astype(int) - 127).max() < 8


def test_opacity_is_resized_on_its_own_and_goes_from_minus_one_to_one():
    pixels = np.random.default_rng(0).integers(0, 256, (10, 12, 4), np.uint8)
    pixels[:, :6, 3] = 0
    settings = ImageSettings(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    both = prepare(pixels, (2, 3), 8, settings).reshape(6, 4, 64)
    colours = prepare(np.ascontiguousarray(pixels[:, :, :3]), (2, 3), 8, settings).reshape(6, 3, 64)
    assert np.array_equal(both[:, :3], colours), "what is transparent keeps its colour"
    assert both[0, 3].reshape(8, 8)[:, :4].max() == -1.0, "out of reach of what is opaque"
    opaque = prepare(np.full((8, 8, 4), 255, np.uint8), (1, 1), 8, ImageSettings())
    assert np.array_equal(opaque, np.ones((1, 256), np.float32))
    shown = unpatch(both.reshape(6, 256), (2, 3), 8, settings)
    assert np.array_equal(shown, unpatch(colours.reshape(6, 192), (2, 3), 8, settings))


@pytest.mark.promise("images.square")
def test_letterbox_keeps_the_aspect_and_fills_with_the_mean_colour():
    settings = ImageSettings(size="letterbox", square=32, mean=(0.2, 0.4, 0.6))
    for pixels, inner in ((np.full((20, 40, 3), 250, np.uint8), np.s_[8:24, :]),
                          (np.full((120, 60, 3), 250, np.uint8), np.s_[:, 8:24])):  # fmt: skip
        grid = grid_of(pixels.shape[1], pixels.shape[0], 8, settings)
        patches = prepare(pixels, grid, 8, settings)
        picture = unpatch(patches, grid, 8, settings)
        assert (picture[inner] == 250).all()
        border = np.ones((32, 32), bool)
        border[inner] = False
        assert (picture[border] == (51, 102, 153)).all()
        assert (patches == 0).sum() == border.sum() * 3
        opaque = np.dstack([pixels, np.full(pixels.shape[:2], 255, np.uint8)])
        opacity = prepare(opaque, grid, 8, settings).reshape(-1, 4, 64)[:, 3]
        assert ((opacity == -1).sum(), (opacity == 1).sum()) == (border.sum(), (~border).sum())


@pytest.mark.promise("images.square")
def test_square_fills_the_square():
    settings = ImageSettings(size="square", square=32)
    pixels = np.full((20, 40, 3), 250, np.uint8)
    assert (unpatch(prepare(pixels, (4, 4), 8, settings), (4, 4), 8, settings) == 250).all()


@pytest.mark.parametrize(("long", "short", "inside"), [(10, 3, 5), (10, 2, 3), (20, 3, 2), (100, 1, 1)])
def test_letterbox_rounds_the_short_side_to_the_nearest_pixel(long, short, inside):
    settings = ImageSettings(size="letterbox", square=16)
    for shape in ((short, long, 3), (long, short, 3)):
        patches = prepare(np.full(shape, 255, np.uint8), (1, 1), 16, settings)
        covered = patches.reshape(3, 16, 16)[0] != 0  # (y, x)
        assert covered.sum() == 16 * inside
        assert sorted((int(covered.any(0).sum()), int(covered.any(1).sum()))) == [inside, 16]
