"""Images of questions: which rows show them, the parts of these rows, and near-duplicates among the images."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from unpad.data.pictures.alike import Pictures, tie_alike
from unpad.data.rows import ChosenRows, ListedRows, choose_rows
from unpad.data.sources.images import ImageExample
from unpad.data.sources.picture_groups import group_names
from unpad.data.sources.split import Wanted, numbered
from unpad.data.sources.vqa import VqaExample


def choose_questions(
    listed: ListedRows[VqaExample], images: list[ImageExample], wanted: Wanted
) -> ChosenRows[VqaExample]:
    """Choose rows by content and group; rows with a picture in common, or with pictures of one thing, are together."""
    examples = listed.rows
    things, same = numbered(group_names(images)), numbered([image.sha256 for image in images])
    rows = np.repeat(np.arange(len(examples)), [len(example.images) for example in examples])
    shown = np.array([image for example in examples for image in example.images], np.int64)
    links = [(rows, same[shown]), (rows, things[shown])]
    if listed.recipe.data.near_duplicates == "together" and wanted is not Wanted.NEW:
        links.append((rows, tie_alike(images)[shown]))
    keys = [_content_key(example, images) for example in examples]
    return choose_rows(listed, wanted, keys, groups=[example.group for example in examples], links=links)


def pictures_of(chosen: ChosenRows[VqaExample], images: list[ImageExample]) -> Pictures:
    """Images with the first row that shows each, and the parts of these rows."""
    examples = chosen.listed.rows
    first = {image: example.where for example in reversed(examples) for image in example.images}
    places = [f"{first[index]}: {image.where}" if index in first else image.where for index, image in enumerate(images)]
    parts = {part: shown_by(examples, images, np.flatnonzero(rows)) for part, rows in chosen.sides().items()}
    return Pictures(images, places, parts, chosen.listed.recipe.data.near_duplicates)


def shown_by(examples: list[VqaExample], images: list[ImageExample], rows: np.ndarray) -> np.ndarray:
    """Images that some rows show, (num_images,) bool."""
    shown = np.zeros(len(images), np.bool_)
    shown[[image for row in rows.tolist() for image in examples[row].images]] = True
    return shown


def _content_key(example: VqaExample, images: list[ImageExample]) -> int:
    """64-bit hash of a row's pictures, or of its question without pictures."""
    content = "\0".join(images[image].sha256 for image in example.images) or example.question
    return int.from_bytes(blake2b(content.encode(), digest_size=8).digest(), "little")
