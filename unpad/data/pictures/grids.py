"""Pixels of listed images, and the rows and columns of patches that they are cut into."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from unpad.data.pixels.decode import decode
from unpad.data.pixels.header import ImageError
from unpad.data.pixels.sizes import detail, grid_of
from unpad.data.sources.images import ImageExample, read_bytes
from unpad.recipes.data import ImageSettings
from unpad.terminal.progress import counted

DECODERS = 4  # threads: decoding and resizing release the interpreter's lock
CHUNK = 64  # images per task of a thread that finds sizes


def pixels_of(example: ImageExample, opacity: bool = False) -> np.ndarray:
    """Decode a listed image, (height, width, 3) uint8, or 4 channels with opacity.

    Raises:
        ImageError: the coded pixels are damaged, which only decoding reveals; names the file.
    """
    try:
        return decode(read_bytes(example), opacity).pixels
    except ImageError as error:
        raise ImageError(error.code, error.what, error.fix, error.where or example.where) from None


def grids_of(examples: list[ImageExample], patch: int, settings: ImageSettings) -> np.ndarray:
    """Rows and columns of patches of every image, (num_images, 2) int64; adaptive sizes depend on the pixels."""

    def grid(example: ImageExample) -> tuple[int, int]:
        content = detail(pixels_of(example)) if settings.size == "adaptive" else None
        return grid_of(example.width, example.height, patch, settings, content)

    if settings.size != "adaptive":
        return np.array([grid(example) for example in examples], np.int64).reshape(-1, 2)
    with ThreadPoolExecutor(DECODERS) as pool:
        grids = counted(pool.map(grid, examples, chunksize=CHUNK), "measuring images", len(examples), "images")
        return np.array(list(grids), np.int64).reshape(-1, 2)
