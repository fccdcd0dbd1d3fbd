"""Listed images as patches, for families of data with images, and what sets other images apart from them."""

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch, from_vectors, required
from unpad.data.family import PICTURES
from unpad.data.pictures.alike import DECODERS, Pictures, pixel_remarks, shrunk
from unpad.data.pixels.decode import decode
from unpad.data.pixels.formats import ImageError
from unpad.data.pixels.patches import Grid, augment, detail, grid_of, prepare, resize, scaled_grid, unpatch
from unpad.data.sources.images import ImageExample, read_bytes
from unpad.models import model_config
from unpad.models.contract import PatchConfig, PixelConfig
from unpad.recipes.data import ImageSettings
from unpad.recipes.recipe import Recipe
from unpad.storage.reading import Count, shaped
from unpad.terminal.progress import counted
from unpad.terminal.table import number_of


def pixels_of(example: ImageExample, opacity: bool = False, grey_bits: int = 16) -> np.ndarray:
    """Decode a listed image, (height, width, 3) uint8, or 4 channels with opacity.

    Raises:
        ImageError: the coded pixels are damaged, which only decoding reveals; names the file.
    """
    try:
        return decode(read_bytes(example), opacity, grey_bits).pixels
    except ImageError as error:
        raise ImageError(error.code, error.what, error.fix, error.where or example.where) from None


def grids_of(examples: list[ImageExample], patch: int, settings: ImageSettings) -> np.ndarray:
    """Rows and columns of patches of every image, (num_images, 2) int64; adaptive sizes depend on the pixels."""

    details: Iterable[float | None] = [None] * len(examples)
    with ThreadPoolExecutor(DECODERS) as pool:
        if settings.size == "adaptive":
            contents = pool.map(lambda example: detail(pixels_of(example, grey_bits=settings.grey_bits)), examples)
            details = counted(contents, "measuring images", len(examples), "images")
        pairs = zip(examples, details, strict=True)
        grids = [grid_of(one.width, one.height, patch, settings, content) for one, content in pairs]
    return np.array(grids, np.int64).reshape(-1, 2)


@dataclass(eq=False)
class PixelCache:
    """Cache of patches or pixels of images, up to `most_bytes`."""

    most_bytes: int
    used: int = 0
    made: dict[int, np.ndarray] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, image: int, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the cached values of an image; `make` them if they are missing."""
        known = self.made.get(image)
        if known is not None:
            return known
        values = make()
        with self.lock:
            if image not in self.made and self.used + values.nbytes <= self.most_bytes:
                self.made[image] = values
                self.used += values.nbytes
        return values


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
    seen: "SeenPictures | None"
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
            return self.grids[images]
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
            return list(pool.map(lambda entry, key: self._changed(patches[entry], entry[1], key), shown, keys))

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

    def as_read(self, image: int, batch: RaggedBatch, place: int = 0) -> tuple[np.ndarray, str]:
        """An image of a batch as the model reads it, (rows * patch, columns * patch, 3) uint8, and its sizes in words.

        Args:
            batch: from `image_batch`; place: of the image there.
        """
        grid, example = required(batch.grid), self.images[image]
        (rows, columns), counts = grid[place].tolist(), grid.prod(1).tolist()
        patches = required(batch.inputs_embeds)[sum(counts[:place]) :][: counts[place]].numpy()
        num = number_of(rows * columns, "patches")
        colours = "colours and opacity" if self.channels == WITH_OPACITY else "colours"
        return unpatch(patches, (rows, columns), self.patch, self.settings), (
            f"{example.width} x {example.height} pixels ({example.mode}) in the file, {columns * self.patch} x "
            f"{rows * self.patch} ({colours}) for the model: {num} of {self.patch} x {self.patch}"
        )

    def files(self, trained: np.ndarray) -> dict[str, bytes]:
        """Files that a run keeps of the images that it trains on, (num_images,) bool, by name."""
        examples = [self.images[image] for image in np.flatnonzero(trained).tolist()]
        factor = 1 + self.settings.scale if self.resized.any() else 1.0
        return {PICTURES: summarise(examples, factor).to_bytes()} if examples else {}

    def remarks(self) -> list[str]:
        """Lines on how far the images are shrunk, and warnings about dark and blank ones."""
        size = shrunk(self.images, self.grids, self.patch, self.settings)
        return [*size, *pixel_remarks(self.images, self.settings, self.channels)]

    def unlike_training(self) -> tuple[list[str], dict[str, object]]:
        """Lines and values by name on images of a mode or size that training did not have; none if the run did not
        record its modes and sizes."""
        return compare_pictures(self.seen, [(image.mode, (image.width, image.height)) for image in self.images])

    def _pixels(self, image: int) -> np.ndarray:
        return pixels_of(self.images[image], self.channels == WITH_OPACITY, self.settings.grey_bits)

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
        grids = [scaled_grid(one.width, one.height, factor, self.patch, self.settings) for one, factor in pairs]
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


# Larger shares of pictures are warnings.
MOST_UNLIKE = 0.05
NUM_NAMED = 5

Size = tuple[int, int]  # width and height in pixels


@dataclass(frozen=True)
class SeenPictures:
    """Pictures of training, as `pictures.json` of a run keeps them.

    Args:
        modes: mode -> number of pictures.
        width, height: least and most that training saw, in pixels.
    """

    modes: dict[str, Count]
    width: tuple[Count, Count]
    height: tuple[Count, Count]

    def to_bytes(self) -> bytes:
        """The content of `pictures.json`."""
        return json.dumps({"modes": self.modes, "width": self.width, "height": self.height}, indent=1).encode()

    def has_size(self, size: Size) -> bool:
        """Check that a size is within those of training."""
        bounds = zip(size, (self.width, self.height), strict=True)
        return all(low <= length <= high for length, (low, high) in bounds)

    def mark(self, mode: str, size: Size) -> str:
        """Reasons to doubt what is said of a picture, "" without one."""
        reasons = [] if mode in self.modes else [f"mode not in training: {mode}"]
        reasons += [] if self.has_size(size) else [f"size outside of training: {size[0]} x {size[1]}"]
        return "; ".join(reasons)


def summarise(examples: Sequence[ImageExample], factor: float = 1.0) -> SeenPictures:
    """Sum up the pictures of training, at least one.

    Args:
        factor: by which training makes some of them larger and others smaller.
    """
    modes = dict(sorted(Counter(example.mode for example in examples).items()))
    sides = [example.width for example in examples], [example.height for example in examples]
    width, height = ((max(1, math.floor(min(each) / factor)), math.ceil(max(each) * factor)) for each in sides)
    return SeenPictures(modes, width, height)


def seen_pictures(kept: dict[str, bytes] | None) -> SeenPictures | None:
    """Summary of the training pictures among the kept files of a run; None for a run of an earlier version.

    Raises:
        CheckpointError: the file is damaged.
    """
    if kept is None or PICTURES not in kept:
        return None
    values = shaped(kept[PICTURES], SeenPictures, Path(PICTURES))
    return SeenPictures(values["modes"], (*values["width"],), (*values["height"],))


def compare_pictures(
    seen: SeenPictures | None, pictures: Sequence[tuple[str, Size]]
) -> tuple[list[str], dict[str, object]]:
    """Count the pictures of a mode or size that training did not have: lines, with a warning where their share is
    large, and values by name.

    Args:
        seen: None if the run does not record it; then nothing is said.
        pictures: mode and size of each.
    """
    if seen is None or not pictures:
        return [], {}
    modes = Counter(mode for mode, _ in pictures if mode not in seen.modes)
    sizes = sum(not seen.has_size(size) for _, size in pictures)
    named = ", ".join(f"{mode} {count:,}" for mode, count in modes.most_common(NUM_NAMED))
    known = ", ".join(f"{mode} {count:,}" for mode, count in Counter(seen.modes).most_common(NUM_NAMED))
    (narrow, wide), (low, high) = seen.width, seen.height
    total = sum(modes.values())
    lines = [
        _share(total, len(pictures), f"have a mode that training had not{f': {named}' if named else ''}", MOST_UNLIKE)
        + f"; training had {known}",
        _share(sizes, len(pictures), "have a size that training had not", MOST_UNLIKE)
        + f"; it had widths of {narrow:,} to {wide:,} and heights of {low:,} to {high:,} pixels"
        + ("; resize the others to these, as the size of a picture changes what is said of it" if sizes else ""),
    ]
    unlike = {"pictures": len(pictures), "unknown_modes": dict(modes.most_common()), "unknown_sizes": sizes}
    return lines, {"unlike_training": unlike}


def _share(number: int, total: int, what: str, most: float) -> str:
    share = number / total
    return f"{'warning: ' if share > most else ''}{number:,} of {total:,} pictures ({share:.1%}) {what}"
