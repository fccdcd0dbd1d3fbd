"""Conversion of pixels to patches, and back to a picture."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unpad.data.pixels.sizes import Grid
from unpad.recipes.data import ImageSettings


def prepare(pixels: NDArray[np.uint8], grid: Grid, patch: int, settings: ImageSettings) -> NDArray[np.float32]:
    """Resize an image to its grid, normalise it, and cut it into patches row by row.

    The result depends on these arguments alone, so an image has the same patches in any batch.

    Args:
        pixels: (height, width, channels) uint8: RGB, and opacity where it is the fourth.
        grid: rows and columns of patches, from `sizes.grid_of`.
        patch: side of a patch, in pixels.

    Returns:
        (rows * columns, channels * patch * patch) float32, ordered (channel, y, x) within a patch, like the weights of
        a convolution over patches.
    """
    rows, columns = grid
    height, width, channels = rows * patch, columns * patch, pixels.shape[2]
    # Empty areas of letterbox have the mean colour, which is zero here, and no opacity.
    normalised = np.zeros((height, width, channels), np.float32)
    normalised[:, :, 3:] = -1
    top, left, inner_height, inner_width = 0, 0, height, width
    if settings.size == "letterbox":
        top, left, inner_height, inner_width = _inside(pixels.shape[0], pixels.shape[1], height, width)
    scale, shift = _scale_and_shift(settings, channels)
    inner = resize(pixels, inner_height, inner_width) * scale - shift
    normalised[top : top + inner_height, left : left + inner_width] = inner
    cut = normalised.reshape(rows, patch, columns, patch, channels).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(cut).reshape(rows * columns, channels * patch * patch)


def resize(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Resize (old height, old width, channels) by Lanczos over the whole of each target pixel.

    An image of that size keeps its pixels. Opacity is resized separately: colours are on white already, and must not be
    weighted by it again.
    """
    parts = [pixels[:, :, :3]] + [pixels[:, :, channel] for channel in range(3, pixels.shape[2])]
    resized = [Image.fromarray(part).resize((width, height), Image.Resampling.LANCZOS) for part in parts]
    return np.dstack([np.asarray(part) for part in resized])


def unpatch(patches: NDArray[np.float32], grid: Grid, patch: int, settings: ImageSettings) -> NDArray[np.uint8]:
    """Join patches to a picture, the inverse of `prepare` except for resizing and opacity.

    Args:
        patches: (rows * columns, channels * patch * patch).

    Returns:
        (rows * patch, columns * patch, 3) uint8; values outside the range of colours are clipped.
    """
    rows, columns = grid
    scale, shift = _scale_and_shift(settings, 3)
    cut = patches.reshape(rows, columns, -1, patch, patch)[:, :, :3].transpose(0, 3, 1, 4, 2)
    pixels = (cut.reshape(rows * patch, columns * patch, 3) + shift) / scale
    rounded: NDArray[np.uint8] = np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
    return rounded


def _scale_and_shift(settings: ImageSettings, channels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(channels,) each: a value of 0 to 255 times scale, minus shift, is (value / 255 - mean) / std.

    Opacity goes from -1 to 1.
    """
    mean, std = np.full(channels, 0.5), np.full(channels, 0.5)
    mean[:3], std[:3] = settings.mean, settings.std
    return (1 / (255 * std)).astype(np.float32), (mean / std).astype(np.float32)


def _inside(height: int, width: int, box_height: int, box_width: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of the largest picture of the same aspect ratio in the middle of a box."""
    if width * box_height > height * box_width:
        inner = max(1, (2 * height * box_width + width) // (2 * width)), box_width
    else:
        inner = box_height, max(1, (2 * width * box_height + height) // (2 * height))
    return (box_height - inner[0]) // 2, (box_width - inner[1]) // 2, *inner
