"""Images with a class each, as sequences of patches.

The header of an image determines its number of patches. Pixels are decoded when a batch needs them, in the loader's
thread and a few more, and stay in memory while they fit.
"""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Micro
from unpad.data import rows
from unpad.data.family import Data, NearDuplicates, check_near_duplicates, digest_of, refuse_cuts
from unpad.data.pictures.album import Album, image_batch, open_album
from unpad.data.pictures.alike import Pictures, label_remarks, pixel_remarks, tie_alike
from unpad.data.pixels.formats import NOTES
from unpad.data.show import Shown
from unpad.data.sources.bad_rows import fault_lines
from unpad.data.sources.images import ImageExample, content_key, expand, group_names, read_all
from unpad.data.sources.split import Split, Wanted
from unpad.errors import SourceError
from unpad.models import model_config
from unpad.models.contract import PatchConfig
from unpad.recipes.recipe import Recipe
from unpad.terminal.table import number_of

KINDS = ("images",)
UNITS = ("images", "patches")
FILES = (rows.CLASSES,)
num_outputs = rows.num_classes
NO_TEXT = "this run classifies images and writes no text", "use `unpad predict {run} FILE`"


@dataclass(frozen=True, eq=False)
class ImageData(rows.ClassData[ImageExample]):
    """Images of a run. A sequence is an image, a position one of its patches.

    Args:
        album: the images, by number of their sequence.
        unknown_classes: class of new images that the run does not know -> their number; they are left out as well.
    """

    album: Album
    unknown_classes: dict[str, int]
    compares: ClassVar[bool] = True
    augmentation: ClassVar[str] = "images"
    family: ClassVar[str] = "images"
    kinds: ClassVar[tuple[str, ...]] = KINDS

    @property
    def examples(self) -> list[ImageExample]:
        """Place and header of every image."""
        return self.album.images

    @property
    def files(self) -> dict[str, bytes]:
        return super().files | self.album.files(self.table.split == Split.TRAIN)

    def shown(self, seq_ids: np.ndarray) -> np.ndarray:
        """Pictures of the album that some sequences show, (num_images,) bool."""
        return np.isin(np.arange(len(self.table)), seq_ids)

    def lengths(self, epoch_seed: tuple[int, int]) -> np.ndarray:
        return self.album.drawn_grids(np.arange(len(self.examples)), epoch_seed).prod(1)

    def load(self, micro: Micro) -> RaggedBatch:
        ids = micro.seq_ids
        grids = self.album.drawn_grids(ids, micro.epoch_seed)
        assert np.array_equal(micro.stops - micro.starts, grids.prod(1)), "an image is never cut"
        split = self.table.split
        keys = [(*micro.epoch_seed, image) if split[image] == Split.TRAIN else None for image in ids.tolist()]
        batch = self._batch(self.album.load(ids.tolist(), grids, keys), grids, ids)
        return batch.pad(pad_to=micro.pad_to) if micro.pad_to else batch

    def show(self, micro: Micro) -> Shown:
        image = int(micro.seq_ids[0])
        picture, sizes = self.album.as_read(image, self.load(micro))
        facts = [f"class {self.classes[self.labels[image]]}", sizes]
        facts += [NOTES[note] for note in self.examples[image].notes]
        if self.album.settings.augments and self.table.split[image] == Split.TRAIN:
            facts.append("changed as the first epoch draws it")
        return Shown(self.where(image), tuple(facts), pictures=(picture,))

    def alone(self, seq_id: int, start: int, stop: int, first_target: int) -> RaggedBatch:
        return self._batch([self.album.decode(seq_id)], self.album.grids[[seq_id]], np.array([seq_id]))

    def fingerprint(self) -> str:
        arrays = (self.labels, self.table.split, self.album.grids)
        return digest_of(self.album.settings.identity(), *arrays, *(example.sha256 for example in self.examples))

    def lines(self) -> list[str]:
        patch = self.album.patch
        notes = Counter(note for example in self.examples for note in example.notes)
        counts = Counter(self.classes[label] for label in self.labels.tolist())
        shown = ", ".join(f"{name} {count:,}" for name, count in counts.most_common(12))
        more = f" and {len(counts) - 12} more" if len(counts) > 12 else ""
        others, why = sum(self.unknown_classes.values()), _describe_unknown(self.unknown_classes)
        lines = [
            *self.chosen.lines("images", f"{number_of(len(self.classes), 'classes')}: {shown}{more}", others, why),
            *self.album.pictures.lines(),
            f"{number_of(int(self.table.positions.sum()), 'patches')} of {patch} x {patch} pixels, "
            f"{self.table.positions.min()} to {self.table.positions.max()} per image ({self.album.settings.size})",
        ]
        if self.chosen.wanted is Wanted.LEARNING:
            lines += [*self.album.remarks(), *label_remarks(self.chosen.listed.rows)]
        lines += [f"  {count:,} with {NOTES[note]} ({note})" for note, count in sorted(notes.items())]
        return lines + fault_lines(self.bad_rows, "  quarantined: ")

    def compare(self) -> list[str]:
        self.album.pictures.refuse()
        return []  # `lines` has them

    def near_training(self, run: Data, seq_ids: np.ndarray) -> NearDuplicates:
        assert isinstance(run, ImageData), "data of one family"
        where, settings = [example.where for example in self.examples], self.album.settings
        pictures = Pictures(self.examples, where, {}, "report", settings.grey_bits)
        return run.album.pictures.compare_new(pictures, self.shown(seq_ids))

    def _batch(self, patches: list[np.ndarray], grids: np.ndarray, ids: np.ndarray) -> RaggedBatch:
        sizes = [(self.examples[i].height, self.examples[i].width) for i in ids.tolist()]
        return image_batch(patches, grids, self.album.num_values, sizes, self.labels[ids], ids)


def next_command(recipe: Recipe, run: str) -> str:
    """Command that uses a trained run."""
    return f"unpad predict {run} FILE"


def open_data(recipe: Recipe, kept: dict[str, bytes] | None, wanted: Wanted = Wanted.LEARNING) -> ImageData:
    """List the images of a recipe, split them by content and group, and count the patches of each.

    New images of classes that the run does not know are left out and counted.

    Raises:
        SourceError: a file is missing or unusable, bad images are refused, there is no image to train on, or an image
            has a class that is unknown to the run.
    """
    chosen = _choose(recipe, wanted)
    unknown: Counter[str] = Counter()
    if kept is not None and wanted is not Wanted.LEARNING:
        classes = rows.read_classes(kept)
        known = np.array([example.label in classes for example in chosen.rows], np.bool_)
        unknown.update(example.label for example in chosen.only(~known).rows)
        if unknown and not known.any():
            what = f"the run knows none of the classes: {', '.join(sorted(unknown)[:8])}"
            fix = f"name them as the run does: {', '.join(classes[:8])}"
            raise SourceError(what, where=str(chosen.listed.files[0].path), fix=fix)
        chosen = chosen.only(known)
    chosen.refuse_empty()
    used = chosen.rows
    classes, labels = rows.label_rows(chosen, kept)
    album = open_album(recipe, used, _pictures(recipe, chosen), kept, resized=chosen.split == Split.TRAIN)
    refuse_image_cuts(recipe, int(album.largest_grids().prod(1).max()), "an image")
    return ImageData(
        table=chosen.table(album.grids.prod(1), [(example.where, example.sha256) for example in used]),
        chosen=chosen,
        album=album,
        classes=classes,
        labels=labels,
        unknown_classes=dict(unknown.most_common()),
    )


def near_duplicates(recipe: Recipe) -> list[str]:
    """Lines on held-out images that are near-duplicates of training ones, and remarks on all; see `Family`."""
    check_near_duplicates(recipe, ImageData)
    chosen = _choose(recipe, Wanted.LEARNING)
    images, pictures = chosen.listed.rows, _pictures(recipe, chosen)
    pictures.refuse()
    reads = isinstance(model_config(recipe.model), PatchConfig)
    seen = open_album(recipe, images, pictures, None).remarks() if reads else pixel_remarks(images, recipe.images)
    return [*pictures.lines(), *seen, *label_remarks(images)]


def _pictures(recipe: Recipe, chosen: rows.ChosenRows[ImageExample]) -> Pictures:
    images = chosen.listed.rows
    where, rule = [image.where for image in images], recipe.data.near_duplicates
    return Pictures(images, where, chosen.sides(), rule, recipe.images.grey_bits)


def _choose(recipe: Recipe, wanted: Wanted) -> rows.ChosenRows[ImageExample]:
    """List the images of a recipe, and choose by content, group and class."""
    listed = rows.list_rows(recipe, "images", read_all, expand)
    images = listed.rows
    together = recipe.data.near_duplicates == "together" and wanted is not Wanted.NEW
    return rows.choose_rows(
        listed,
        wanted,
        map(content_key, images),
        groups=group_names(images),
        links=[(np.arange(len(images)), tie_alike(images, recipe.images.grey_bits))] if together else [],
        classes=[image.label for image in images],
    )


def _describe_unknown(classes: dict[str, int]) -> str:
    shown = ", ".join(list(classes)[:5]) + (f" and {len(classes) - 5} more" if len(classes) > 5 else "")
    return f"of classes that the run does not know ({shown})"


def refuse_image_cuts(recipe: Recipe, most: int, what: str) -> None:
    """Refuse plans that would cut through an image, given the positions of the longest sequence."""
    refuse_cuts(recipe, most, f"{what} has {{}} positions", "images are never cut", "lower images.max_tokens")
