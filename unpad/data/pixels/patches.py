"""Patches of images: sizes in rows x columns of them, conversion of pixels to patches, and back to a picture; and
augmentation."""

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unpad.errors import RecipeError
from unpad.recipes.data import ImageSettings

COPY_SIDE = 64  # pixels of the grey copy on which detail is measured
EDGE = 16.0  # grey levels between neighbours; a smaller step is shading or noise rather than a line

Grid = tuple[int, int]  # rows, columns


def grid_of(width: int, height: int, patch: int, settings: ImageSettings, detail: float | None = None) -> Grid:
    """Choose the rows and columns of patches of an image; each at least 1.

    native: the nearest whole number of patches at the image's own scale, or with nearly the same aspect ratio fewer or
    more so that min_tokens <= rows * columns <= max_tokens (Dehghani et al. 2023, "Patch n' Pack", arXiv 2307.06304);
    a few less if no whole numbers near the aspect ratio are between the two. adaptive: native's number
    times the square root of `detail`, with room for min_tokens at least, and no more than native; the root because no
    model can restore what a small size loses. square and letterbox: `square` pixels a side.

    Args:
        width: pixels; `height` and `patch` likewise.
        detail: of this image's pixels, in [0, 1]; required for adaptive.

    Raises:
        RecipeError: `square` is not a multiple of the patch.
    """
    if settings.size in ("square", "letterbox"):
        side, rest = divmod(settings.square, patch)
        if rest:
            fix = f"set it to {max(side, 1) * patch} or {(side + 1) * patch}"
            raise RecipeError(f"square={settings.square} is not a multiple of the patch, {patch} pixels", fix=fix)
        return side, side
    rows, columns = _fit(width, height, patch, settings.max_tokens)
    if settings.size == "native" and rows * columns < settings.min_tokens:
        return max((rows, columns), _enlarge(width, height, settings), key=math.prod)
    if settings.size == "adaptive":
        assert detail is not None, "adaptive chooses by the image's detail"
        num_tokens = max(settings.min_tokens, math.ceil(rows * columns * math.sqrt(detail)))
        if num_tokens < rows * columns:
            return _fit(width, height, patch, num_tokens)
    return rows, columns


def scaled_grid(width: int, height: int, factor: float, patch: int, settings: ImageSettings) -> Grid:
    """Grid of an image at `factor` times its size."""
    return grid_of(max(1, round(width * factor)), max(1, round(height * factor)), patch, settings)


def _fit(width: int, height: int, patch: int, max_tokens: int) -> Grid:
    """Choose the native grid, or, of those near the exact one of `max_tokens` patches, that nearest in aspect ratio."""
    native = max(1, (2 * height + patch) // (2 * patch)), max(1, (2 * width + patch) // (2 * patch))
    if native[0] * native[1] <= max_tokens:
        return native
    # rows / columns = height / width and rows * columns = max_tokens; whole numbers, so no rounding decides.
    rows = min(native[0], max(1, math.isqrt(max_tokens * height // width)))
    columns = min(native[1], max(1, math.isqrt(max_tokens * width // height)))
    around = [(rows, columns), (rows + 1, columns), (rows, columns + 1)]
    legal = [grid for grid in around if grid[0] <= native[0] and grid[1] <= native[1] and math.prod(grid) <= max_tokens]
    # A strip thinner than a patch has one row, and the most columns.
    legal = legal or [(min(rows, max_tokens), min(columns, max_tokens))]
    return min(legal, key=lambda grid: (abs(math.log(grid[0] * width / (grid[1] * height))), -math.prod(grid)))


def _enlarge(width: int, height: int, settings: ImageSettings) -> Grid:
    """Choose, of the grids near the exact one of `min_tokens` patches that have as many, the nearest to the aspect
    ratio; none has more than `max_tokens`."""
    least, most = settings.min_tokens, settings.max_tokens
    # rows / columns = height / width and rows * columns = min_tokens, then each of them rounded up or down.
    rows, columns = (min(most, max(1, math.isqrt(least * a // b))) for a, b in ((height, width), (width, height)))
    around = [(r, c) for r in (rows, rows + 1) for c in (columns, columns + 1) if r * c <= most]
    enough = [grid for grid in around if math.prod(grid) >= least] or [max(around, key=math.prod)]
    return min(enough, key=lambda grid: (abs(math.log(grid[0] * width / (grid[1] * height))), math.prod(grid)))


def detail(pixels: NDArray[np.uint8]) -> float:
    """Share of an image with visible detail: 0 for one plain colour, near 1 for noise.

    The mean over a small grey copy of e / (e + EDGE ** 2), where e is the energy of the gradient: the square of the
    step to the pixel on the right plus that to the pixel below. So it is the share of the picture with lines: a
    sharp line counts no more than a clear one, and shading or faint noise counts little.

    Args:
        pixels: (height, width, 3) uint8; a fourth channel of opacity has no effect.
    """
    height, width = pixels.shape[:2]
    scale = max(width, height, COPY_SIDE) / COPY_SIDE
    size = max(1, round(width / scale)), max(1, round(height / scale))
    grey = Image.fromarray(pixels).convert("L").resize(size, Image.Resampling.BOX)
    values = np.asarray(grey, np.float64)  # (rows, columns), 0 to 255
    energy = np.square(np.diff(values, axis=0, append=values[-1:]))
    energy += np.square(np.diff(values, axis=1, append=values[:, -1:]))
    return float((energy / (energy + EDGE**2)).mean())


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
    return np.asarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))


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


# --------------------------------------------------------------------------- augmentation of training images


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
    return ((colours + np.float32(curve) * colours * (1 - colours)) - mean) / std


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
