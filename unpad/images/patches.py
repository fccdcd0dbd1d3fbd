"""Pixels to the patches a model reads, and back to a picture."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unpad.images.sizes import Grid
from unpad.recipe_data import ImageSettings


def prepare(pixels: NDArray[np.uint8], grid: Grid, patch: int, settings: ImageSettings) -> NDArray[np.float32]:
    """Resize an image to its grid, normalise it, and cut it into patches row by row.

    The result depends on these arguments alone, so an image has the same patches in any batch. Sizes change by
    Lanczos over the whole of each target pixel; an image that has its size already keeps its pixels.

    Args:
        pixels: (height, width, 3) uint8.
        grid: rows and columns of patches, as `sizes.grid_of` chose them.
        patch: side of a patch, in pixels.

    Returns:
        (rows * columns, 3 * patch * patch) float32, in a patch ordered (channel, y, x), as the weights of a
        convolution over patches are.
    """
    rows, columns = grid
    height, width = rows * patch, columns * patch
    # What letterbox leaves empty has the mean colour, which is zero here.
    normalised = np.zeros((height, width, 3), np.float32)
    top, left, inner_height, inner_width = 0, 0, height, width
    if settings.size == "letterbox":
        top, left, inner_height, inner_width = _inside(pixels.shape[0], pixels.shape[1], height, width)
    resized = Image.fromarray(pixels).resize((inner_width, inner_height), Image.Resampling.LANCZOS)
    scale, shift = _scale_and_shift(settings)
    normalised[top : top + inner_height, left : left + inner_width] = np.asarray(resized) * scale - shift
    cut = normalised.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(cut).reshape(rows * columns, 3 * patch * patch)


def unpatch(patches: NDArray[np.float32], grid: Grid, patch: int, settings: ImageSettings) -> NDArray[np.uint8]:
    """Put patches together to a picture, the inverse of `prepare` but for the resizing.

    Args:
        patches: (rows * columns, 3 * patch * patch).

    Returns:
        (rows * patch, columns * patch, 3) uint8; values that no colour has are cut off.
    """
    rows, columns = grid
    scale, shift = _scale_and_shift(settings)
    cut = patches.reshape(rows, columns, 3, patch, patch).transpose(0, 3, 1, 4, 2)
    pixels = (cut.reshape(rows * patch, columns * patch, 3) + shift) / scale
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def _scale_and_shift(settings: ImageSettings) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(3,) each: a colour's value of 0 to 255 times scale, minus shift, is (value / 255 - mean) / std."""
    std = np.array(settings.std)
    return (1 / (255 * std)).astype(np.float32), (np.array(settings.mean) / std).astype(np.float32)


def _inside(height: int, width: int, box_height: int, box_width: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of the largest picture of the same aspect ratio in the middle of a box."""
    if width * box_height > height * box_width:
        inner = max(1, (2 * height * box_width + width) // (2 * width)), box_width
    else:
        inner = box_height, max(1, (2 * width * box_height + height) // (2 * height))
    return (box_height - inner[0]) // 2, (box_width - inner[1]) // 2, *inner
