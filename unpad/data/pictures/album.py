"""Listed images as patches, for families of data with images of their own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch, from_vectors
from unpad.data.family import PICTURES
from unpad.data.pictures.alike import Pictures
from unpad.data.pictures.grids import DECODERS, grids_of, pixels_of
from unpad.data.pictures.seen import SeenPictures, compare_pictures, seen_pictures, summarise
from unpad.data.pixels.augment import augment
from unpad.data.pixels.cache import PixelCache
from unpad.data.pixels.patches import prepare, resize, unpatch
from unpad.data.pixels.sizes import Grid, scaled_grid
from unpad.data.sources.images import ImageExample
from unpad.models import model_config
from unpad.models.contract import PatchConfig, PixelConfig
from unpad.recipes.data import ImageSettings
from unpad.recipes.recipe import Recipe

WITH_OPACITY = 4  # channels


@dataclass(frozen=True, eq=False)
class Album:
    """Images that are decoded when a batch needs them, kept in memory while they fit, and changed as an epoch draws.

    Args:
        images: place and header of every image.
        grids: (num_images, 2) int64, rows and columns of patches at an image's own size.
        resized: (num_images,) bool, images with a size drawn anew in every epoch.
        patch: side of a patch, in pixels.
        channels: channels of a pixel, 4 with opacity.
        pictures: images of every part, to compare with others.
        seen: what the run trained on, if it keeps that.
    """

    images: list[ImageExample]
    grids: np.ndarray
    resized: np.ndarray
    settings: ImageSettings
    patch: int
    channels: int
    pictures: Pictures
    seen: SeenPictures | None
    cache: PixelCache

    @property
    def num_values(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.patch**2

    def drawn_grids(self, images: np.ndarray, epoch_seed: tuple[int, int]) -> np.ndarray:
        """Rows and columns of images at the sizes that an epoch draws, (num_chosen, 2) int64.

        A resized image has its own size times a factor from 1 / (1 + scale) to 1 + scale, small factors as often as
        large ones.
        """
        if not self.resized.any():
            grids: np.ndarray = self.grids[images]
            return grids
        # A stream of its own: the changes of pixels draw from the number of an image, which is smaller.
        drawn = np.random.default_rng([*epoch_seed, len(self.images)]).uniform(-1, 1, len(self.images))[images]
        factors = np.where(self.resized[images], (1 + self.settings.scale) ** drawn, 1.0).tolist()
        return self._scaled(images.tolist(), factors)

    def largest_grids(self) -> np.ndarray:
        """Rows and columns of every image at the largest size that an epoch may draw, (num_images, 2) int64."""
        num = len(self.images)
        return self._scaled(range(num), [1 + self.settings.scale] * num) if self.settings.draws_sizes else self.grids

    def load(
        self, images: Sequence[int], grids: np.ndarray, keys: Sequence[tuple[int, ...] | None] | None = None
    ) -> list[np.ndarray]:
        """Patches of images, decoded in several threads.

        Args:
            grids: (num_chosen, 2) rows and columns; those of `drawn_grids` for resized images.
            keys: seeds of the changes of each; None changes nothing.

        Returns:
            Per image (rows * columns, channels * patch * patch) float32.
        """
        shown = [(image, (rows, columns)) for image, (rows, columns) in zip(images, grids.tolist(), strict=True)]
        once = list(dict.fromkeys(shown))
        with ThreadPoolExecutor(DECODERS, thread_name_prefix="unpad-decoder") as pool:
            patches = dict(zip(once, pool.map(lambda entry: self._patches(*entry), once), strict=True))
            if keys is None or not self.settings.augments:
                return [patches[entry] for entry in shown]
            of_each = [(patches[entry], entry[1], key) for entry, key in zip(shown, keys, strict=True)]
            return list(pool.map(lambda entry: self._changed(*entry), of_each))

    def decode(self, image: int) -> np.ndarray:
        """Patches of an image at its own size, straight from its file: (num_patches, channels * patch * patch) float32.

        Raises:
            ImageError: the coded pixels are damaged.
        """
        rows, columns = self.grids[image].tolist()
        return prepare(self._pixels(image), (rows, columns), self.patch, self.settings)

    def picture(self, image: int) -> np.ndarray:
        """An image as the model reads it, (rows * patch, columns * patch, 3) uint8."""
        (patches,) = self.load([image], self.grids[[image]])
        rows, columns = self.grids[image].tolist()
        return unpatch(patches, (rows, columns), self.patch, self.settings)

    def files(self, trained: np.ndarray) -> dict[str, bytes]:
        """Files that a run keeps of the images that it trains on, (num_images,) bool, by name."""
        examples = [self.images[image] for image in np.flatnonzero(trained).tolist()]
        factor = 1 + self.settings.scale if self.resized.any() else 1.0
        return {PICTURES: summarise(examples, factor).to_bytes()} if examples else {}

    def unlike_training(self) -> tuple[list[str], dict[str, object]]:
        """Lines and values by name on images of a mode or size that training did not have; none if the run did not
        record its modes and sizes."""
        unlike = compare_pictures(self.seen, [(image.mode, (image.width, image.height)) for image in self.images])
        return ([], {}) if unlike is None else ([*unlike.lines], {"unlike_training": unlike.to_json()})

    def _pixels(self, image: int) -> np.ndarray:
        return pixels_of(self.images[image], self.channels == WITH_OPACITY)

    def _patches(self, image: int, grid: Grid) -> np.ndarray:
        if self.resized[image]:
            pixels = self.cache.get(image, lambda: self._shrunk(image))
            return prepare(pixels, grid, self.patch, self.settings)
        return self.cache.get(image, lambda: prepare(self._pixels(image), grid, self.patch, self.settings))

    def _shrunk(self, image: int) -> np.ndarray:
        """Pixels of an image, shrunk to the largest size that any epoch draws if they are more."""
        pixels = self._pixels(image)
        rows, columns = self._scaled([image], [1 + self.settings.scale])[0].tolist()
        return resize(pixels, min(pixels.shape[0], rows * self.patch), min(pixels.shape[1], columns * self.patch))

    def _scaled(self, images: Sequence[int], factors: Sequence[float]) -> np.ndarray:
        """Rows and columns of images at `factors` times their size, (num_chosen, 2) int64."""
        pairs = [(self.images[image], factor) for image, factor in zip(images, factors, strict=True)]
        grids = [
            scaled_grid(picture.width, picture.height, factor, self.patch, self.settings) for picture, factor in pairs
        ]
        return np.array(grids, np.int64).reshape(-1, 2)

    def _changed(self, patches: np.ndarray, grid: Grid, key: tuple[int, ...] | None) -> np.ndarray:
        if key is None:
            return patches
        return augment(patches, grid, self.patch, self.settings, np.random.default_rng(key))


def open_album(
    recipe: Recipe,
    images: list[ImageExample],
    pictures: Pictures,
    kept: dict[str, bytes] | None,
    resized: np.ndarray | None = None,
) -> Album:
    """Count the patches of images.

    Args:
        pictures: images of every part, to compare with others.
        kept: files of an earlier run.
        resized: (num_images,) bool, images that may get a size drawn anew in every epoch; None for none.
    """
    config, settings = model_config(recipe.model), recipe.images
    assert isinstance(config, PatchConfig), "a model of images says what its patches are"
    return Album(
        images=images,
        grids=grids_of(images, config.patch, settings),
        resized=np.zeros(len(images), np.bool_) if resized is None else resized & settings.draws_sizes,
        settings=settings,
        patch=config.patch,
        channels=config.channels if isinstance(config, PixelConfig) else 3,
        pictures=pictures,
        seen=seen_pictures(kept),
        cache=PixelCache(settings.cache_mib << 20),
    )


def image_batch(
    patches: Sequence[np.ndarray],
    grids: np.ndarray,
    num_values: int,
    sizes: Sequence[tuple[int, int]] | None = None,
    labels: np.ndarray | None = None,
    seq_ids: np.ndarray | None = None,
) -> RaggedBatch:
    """Build a flat batch of the patches of several images.

    Args:
        patches: per image (rows * columns, num_values) float32, row by row, from `prepare`.
        grids: (num_images, 2) int, rows and columns.
        sizes: height and width of every image in pixels.
        labels: (num_images,) class of every image; None if they are unknown.
    """
    assert [len(array) for array in patches] == grids.prod(1).tolist(), "a row for every patch"
    return replace(
        from_vectors(patches, num_values, labels, seq_ids),
        grid=torch.from_numpy(np.asarray(grids, np.int64)),
        image_sizes=None if sizes is None else torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2),
    )


def with_images(text: RaggedBatch, media: RaggedBatch, places: np.ndarray, counts: Sequence[int]) -> RaggedBatch:
    """Put images into a batch of text that has room for them.

    Args:
        media: from `image_batch`, images of the first sequence first.
        places: (total_patches,) position of each patch in the batch of text.
        counts: number of images of every sequence.
    """
    of_images = np.repeat(np.arange(len(counts)), np.asarray(counts, np.int64))
    return replace(text, media=media, media_index=torch.from_numpy(places), media_seqs=torch.from_numpy(of_images))
