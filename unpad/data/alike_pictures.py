"""Near-duplicate pictures across the split, by a difference hash of small copies.

A picture is shrunk to 9 x 8 pixels; bit by bit the hash says whether a pixel is brighter than its left neighbour
(Krawetz 2013, "Kind of like that"). Two pictures are alike if few bits differ and the small copies have nearly the same
colours, so other sizes, formats and qualities of a picture are found, and pictures that are merely flat are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unpad.data.pixels.decode import ImageError, decode
from unpad.data.sources.images import ImageExample, read_bytes
from unpad.data.tokens.cache import make_key, read_sealed, write_sealed
from unpad.errors import DiskError
from unpad.storage import cache_folder

ROWS, COLUMNS = 8, 9
VERSION = 1  # of the small copies; a change makes new files in the cache
MOST_BITS = 6  # of 64 that may differ
MOST_DIFFERENCE = 6.0  # mean difference of colours, of 255
MOST_PIXELS = 1 << 32  # decoding takes about a second per hundred million and processor
MAX_SHOWN = 10
DECODERS = 4
BLOCK = 1 << 24  # pairs that are compared at a time


def describe_alike(examples: Sequence[ImageExample], held: NDArray[np.bool_], trained: NDArray[np.bool_]) -> list[str]:
    """Lines on held-out pictures that are near-duplicates of training ones; none without held-out pictures.

    Args:
        held, trained: (num_images,) pictures of either side; one may be on both.
    """
    if not held.any() or not trained.any():
        return []
    pixels = sum(example.width * example.height for example in examples)
    if pixels > MOST_PIXELS:
        return [
            f"  near-duplicate pictures are not looked for: {pixels / 1e9:,.1f} thousand million pixels are too many"
        ]
    found = near_pictures(small_copies(examples), held, trained)
    lines = [f"  held out {int(held.sum()):,} pictures: {len(found):,} near-duplicates of training ones"]
    return lines + [f"    {examples[one].where} is like {examples[other].where}" for one, other in found[:MAX_SHOWN]]


def small_copies(examples: Sequence[ImageExample]) -> NDArray[np.uint8]:
    """Small copies of pictures on white, (num_images, 8, 9, 3) uint8, kept in the cache; 0 for a damaged picture."""
    key = make_key("pictures", VERSION, [example.sha256 for example in examples])
    path = cache_folder() / "pictures" / f"{key}.bin"
    shape = (len(examples), ROWS, COLUMNS, 3)
    kept, _ = read_sealed(path)
    if kept is not None and len(kept) == int(np.prod(shape)):
        return np.frombuffer(kept, np.uint8).reshape(shape)
    with ThreadPoolExecutor(DECODERS, thread_name_prefix="unpad-decoder") as pool:
        copies = np.stack([*pool.map(_small, examples)])
    with suppress(DiskError):  # the next run looks at the pictures again
        write_sealed(path, copies.tobytes())
    return copies


def _small(example: ImageExample) -> NDArray[np.uint8]:
    try:
        pixels = decode(read_bytes(example)).pixels
    except ImageError:  # training reports the damage
        return np.zeros((ROWS, COLUMNS, 3), np.uint8)
    return np.asarray(Image.fromarray(pixels).resize((COLUMNS, ROWS), Image.Resampling.BOX))


def near_pictures(
    copies: NDArray[np.uint8], held: NDArray[np.bool_], trained: NDArray[np.bool_]
) -> list[tuple[int, int]]:
    """For every held-out picture that is like a training one: its index and that of the training one nearest to it.

    Args:
        copies: of `small_copies`.
        held, trained: (num_images,).
    """
    grey = copies.astype(np.int32).sum(-1)  # (num_images, 8, 9)
    bits = (grey[:, :, 1:] > grey[:, :, :-1] + 3).reshape(len(copies), -1)
    hashes = np.packbits(bits, axis=1).view(np.uint64)[:, 0]
    colours = copies.reshape(len(copies), -1).astype(np.float32)
    ours, theirs = np.flatnonzero(trained), np.flatnonzero(held)
    found = []
    for rows in np.array_split(theirs, -(-len(theirs) * len(ours) // BLOCK)):
        near = np.bitwise_count(hashes[rows][:, None] ^ hashes[ours][None]) <= MOST_BITS  # (rows, trained)
        for row, mine in zip(rows.tolist(), near, strict=True):
            chosen = ours[mine]
            chosen = chosen[chosen != row]
            if len(chosen):
                distance = np.abs(colours[chosen] - colours[row]).mean(1)
                best = int(np.argmin(distance))
                if distance[best] <= MOST_DIFFERENCE:
                    found.append((row, int(chosen[best])))
    return found
