"""Augmentation of training images: mirroring, shifts, zoom, colour, and erased rectangles."""

import math

import numpy as np
from numpy.typing import NDArray

from unpad.data.pixels.patches import Grid
from unpad.recipes.data import ImageSettings


def augment(
    patches: NDArray[np.float32], grid: Grid, patch: int, settings: ImageSettings, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Change one image as `rng` draws; its size stays the same.

    A shift or a smaller zoom fills uncovered areas with the pixels at the edge. Changes of hue, saturation and
    brightness keep white, black and greys free of colour, so the ground of a drawing stays the same. The erased
    rectangle has one random colour (Zhong et al. 2017, arXiv 1708.04896).

    Args:
        patches: (rows * columns, channels * patch * patch), from `patches.prepare`; not modified.

    Returns:
        The same shape.
    """
    rows, columns = grid
    cut = patches.reshape(rows, columns, -1, patch, patch)
    pixels: NDArray[np.float32]  # (channel, y, x)
    pixels = cut.transpose(2, 0, 3, 1, 4).reshape(-1, rows * patch, columns * patch)
    # All numbers are drawn in any case, so that one setting does not affect another.
    mirrored, places, tint = rng.random() < settings.flip, rng.uniform(-1, 1, 2), rng.uniform(-1, 1, 3)
    factor, erased = (1 + settings.zoom) ** rng.uniform(-1, 1), rng.random(7)
    if mirrored:
        pixels = pixels[:, :, ::-1]
    if settings.shift or settings.zoom:
        for axis, place in ((1, places[0]), (2, places[1])):
            pixels = _move(pixels, axis, place * settings.shift, factor)
    if settings.color:
        pixels = np.concatenate([_recolour(pixels[:3], settings, tint), pixels[3:]])
    if settings.erase:
        pixels = _erase(pixels, settings.erase, erased)
    back = pixels.astype(np.float32).reshape(-1, rows, patch, columns, patch).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(back).reshape(patches.shape)


def _move(pixels: NDArray[np.float32], axis: int, shift: float, factor: float) -> NDArray[np.float32]:
    """Shift and zoom (channels, height, width) along one axis.

    Enlarging interpolates linearly between two old pixels; shrinking averages with a triangle over all that fall
    together; a mere shift moves by whole pixels.

    Args:
        shift: share of the size; factor: zoom, above 1 for an enlarged middle of the axis.
    """
    size = pixels.shape[axis]
    middle, narrow = (size - 1) / 2, min(factor, 1)
    source = ((np.arange(size) - middle - round(shift * size)) / factor + middle).clip(0, size - 1)  # of each new pixel
    reach = math.ceil(1 / narrow)
    taken = np.floor(source).astype(np.int64)[:, None] + np.arange(1 - reach, reach + 1)  # (size, 2 * reach)
    weights = (1 - np.abs(source[:, None] - taken) * narrow).clip(0)
    weights = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    others = [1 if other != axis else size for other in range(3)]
    moved = np.zeros_like(pixels)
    for weight, place in zip(weights.T, taken.clip(0, size - 1).T, strict=True):
        moved += weight.reshape(others) * pixels.take(place, axis)
    return moved


def _recolour(pixels: NDArray[np.float32], settings: ImageSettings, drawn: NDArray[np.float64]) -> NDArray[np.float32]:
    """Turn the hue of (3, height, width) by up to `color` half turns, and change saturation and brightness.

    Args:
        drawn: of hue, saturation and brightness, (3,) in [-1, 1].
    """
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (settings.mean, settings.std))
    turn, saturation, curve = settings.color * drawn
    grey = np.full((3, 3), 1 / 3)
    across = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / math.sqrt(3)  # a quarter turn about the axis of greys
    turned = math.cos(math.pi * turn) * (np.eye(3) - grey) + math.sin(math.pi * turn) * across
    mix = (grey + (1 + saturation) * turned).astype(np.float32)
    colours = (mix @ (pixels * std + mean).reshape(3, -1)).clip(0, 1).reshape(pixels.shape)
    # A curve through black and white; brighter or darker in between.
    recoloured: NDArray[np.float32] = ((colours + np.float32(curve) * colours * (1 - colours)) - mean) / std
    return recoloured


def _erase(pixels: NDArray[np.float32], most: float, drawn: NDArray[np.float64]) -> NDArray[np.float32]:
    """Paint an opaque rectangle of (channels, height, width) in one colour, its sides up to `most` of the image's."""
    colour = np.ones(len(pixels), np.float32)
    colour[:3] = 2 * drawn[4:] - 1
    inside = np.ones(pixels.shape[1:], bool)
    for axis, (share, place) in enumerate(drawn[:4].reshape(2, 2)):
        size = pixels.shape[axis + 1]
        length = round(share * most * size)
        line = np.arange(size) - int(place * (size - length + 1))
        inside &= np.expand_dims((line >= 0) & (line < length), 1 - axis)
    return np.where(inside, colour[:, None, None], pixels)
