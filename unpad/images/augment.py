"""Changes of training images that leave their class as it is: mirrored, shifted, in other colours."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unpad.images.sizes import Grid
from unpad.recipe import ImageSettings


def augment(
    patches: NDArray[np.float32], grid: Grid, patch: int, settings: ImageSettings, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Change one image as `rng` draws; its size stays.

    A shift repeats the pixels at the edge. Colours change by a factor on the contrast, the same for all channels, and a
    sum and a factor for each channel.

    Args:
        patches: (rows * columns, 3 * patch * patch), as `patches.prepare` made them; not written to.

    Returns:
        The same shape.
    """
    rows, columns = grid
    cut = patches.reshape(rows, columns, 3, patch, patch)
    pixels = cut.transpose(2, 0, 3, 1, 4).reshape(3, rows * patch, columns * patch)  # (channel, y, x)
    mirrored, places, tint = rng.random() < settings.flip, rng.uniform(-1, 1, 2), rng.uniform(-1, 1, (3, 3))
    if mirrored:
        pixels = pixels[:, :, ::-1]
    if settings.shift:
        for axis, place in ((1, places[0]), (2, places[1])):
            size = pixels.shape[axis]
            moved = np.arange(size) - round(place * settings.shift * size)
            pixels = pixels.take(moved.clip(0, size - 1), axis)
    if settings.color:
        contrast, sums, factors = tint[0, 0], tint[1], tint[2]
        scale = (1 + settings.color * contrast) * (1 + settings.color * factors)
        pixels = pixels * scale[:, None, None] + settings.color * sums[:, None, None]
    back = pixels.astype(np.float32).reshape(3, rows, patch, columns, patch).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(back).reshape(patches.shape)
