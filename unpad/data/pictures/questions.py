"""Images of questions: which rows show them, the parts of these rows, and near-duplicates among the images."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from unpad.data.pictures.alike import Pictures, tie_alike
from unpad.data.sources.images import ImageExample
from unpad.data.sources.picture_groups import group_names
from unpad.data.sources.split import Split, Wanted, declared_splits, divide, groups_on_both_sides, numbered, units
from unpad.data.sources.vqa import VqaExample
from unpad.recipes.recipe import Recipe


def split_rows(
    recipe: Recipe, examples: list[VqaExample], images: list[ImageExample], wanted: Wanted
) -> tuple[np.ndarray, int, np.ndarray]:
    """Choose the part of every row.

    Returns:
        The independent unit of each row, (num_rows,) int64; the number of groups on both sides; and the parts,
        (num_rows,) uint8 of `Split`.
    """
    declared = declared_splits(example.split for example in examples)
    keys = np.array([_content_key(example, images) for example in examples], np.uint64)
    groups = numbered([example.group for example in examples])
    things, same = numbered(group_names(images)), numbered([image.sha256 for image in images])
    rows = np.repeat(np.arange(len(examples)), [len(example.images) for example in examples])
    shown = np.array([image for example in examples for image in example.images], np.int64)
    links = [(np.arange(len(examples)), groups), (rows, same[shown]), (rows, things[shown])]
    if recipe.data.near_duplicates == "together" and wanted is not Wanted.NEW:
        links.append((rows, tie_alike(images)[shown]))
    split = divide(keys, declared, recipe.data, recipe.train.seed, wanted, links=links)
    return units(keys, links), groups_on_both_sides(groups, split), split


def pictures_of(
    recipe: Recipe, examples: list[VqaExample], images: list[ImageExample], rows: dict[Split, np.ndarray]
) -> Pictures:
    """Images with the first row that shows each, given the rows of every part, (num_rows,) bool."""
    first = {image: example.where for example in reversed(examples) for image in example.images}
    places = [f"{first[index]}: {image.where}" if index in first else image.where for index, image in enumerate(images)]
    parts = {part: shown_by(examples, images, np.flatnonzero(chosen)) for part, chosen in rows.items()}
    return Pictures(images, places, parts, recipe.data.near_duplicates)


def shown_by(examples: list[VqaExample], images: list[ImageExample], rows: np.ndarray) -> np.ndarray:
    """Images that some rows show, (num_images,) bool."""
    shown = np.zeros(len(images), np.bool_)
    shown[[image for row in rows.tolist() for image in examples[row].images]] = True
    return shown


def _content_key(example: VqaExample, images: list[ImageExample]) -> int:
    """64-bit hash of a row's pictures, or of its question without pictures."""
    content = "\0".join(images[image].sha256 for image in example.images) or example.question
    return int.from_bytes(blake2b(content.encode(), digest_size=8).digest(), "little")
