"""Listed images as patches: decoded once, and changed by the draws of an epoch, of an image and of a row."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import questions
from tests.helpers.pictures import images_of, micro_of, recipe_of, write_folder
from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Micro
from unpad.data.pictures import album
from unpad.data.pictures.album import Album, pixels_of
from unpad.data.pixels.patches import augment, prepare, unpatch
from unpad.data.sources.images import ImageExample
from unpad.data.sources.split import Split
from unpad.data.vqa import VqaData

EPOCH = (7, 3)
CHANGES = {"flip": 0.5, "shift": 0.2, "zoom": 0.5, "color": 0.3, "erase": 0.5}


def own(pictures: Album, image: int, key: list[int] | None) -> torch.Tensor:
    """Patches of an image straight from its file, changed by the draws of a key."""
    rows, columns = pictures.grids[image].tolist()
    pixels = pixels_of(pictures.images[image], pictures.channels == 4)
    patches = prepare(pixels, (rows, columns), pictures.patch, pictures.settings)
    if key is not None:
        rng = np.random.default_rng(key)
        patches = augment(patches, (rows, columns), pictures.patch, pictures.settings, rng)
    return torch.from_numpy(patches)


def load_rows(data: VqaData, rows: list[int]) -> RaggedBatch:
    seqs = np.array(rows, np.int64)
    stops = data.table.positions[seqs].astype(np.int32)
    return data.load(Micro(seqs, np.zeros_like(stops), stops, np.zeros_like(stops), 0, 0, EPOCH))


def test_changes_of_an_image_are_drawn_by_the_epoch_and_its_number(tmp_path: Path) -> None:
    data = images_of(recipe_of(write_folder(tmp_path / "pictures"), images=CHANGES))
    ids = [5, 0, 17, 8, 11, 20]
    batch = data.load(replace(micro_of(data, ids), epoch_seed=EPOCH))
    assert set(data.table.split[ids].tolist()) == {Split.TRAIN, Split.HOLDOUT}
    keys = [[*EPOCH, image] if data.table.split[image] == Split.TRAIN else None for image in ids]
    wanted = [own(data.album, image, key) for image, key in zip(ids, keys, strict=True)]
    assert torch.equal(batch.inputs_embeds, torch.cat(wanted))


def test_changes_of_an_image_in_a_question_are_drawn_by_the_epoch_the_row_and_the_image(tmp_path: Path) -> None:
    data = questions.questions_of(questions.recipe_of(questions.write_questions(tmp_path / "pictures"), images=CHANGES))
    rows = list(range(len(data.examples)))
    wanted = [
        own(data.album, image, [*EPOCH, row, image] if data.table.split[row] == Split.TRAIN else None)
        for row in rows
        for image in data.examples[row].images
    ]
    assert torch.equal(load_rows(data, rows).media.inputs_embeds, torch.cat(wanted))


def test_an_image_of_several_rows_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = {**CHANGES, "cache_mib": 0}
    data = questions.questions_of(questions.recipe_of(questions.write_questions(tmp_path / "pictures"), images=images))
    decoded: Counter[str] = Counter()

    def counting(example: ImageExample, *settings: Any) -> np.ndarray:
        decoded[example.where] += 1
        return pixels_of(example, *settings)

    monkeypatch.setattr(album, "pixels_of", counting)
    load_rows(data, list(range(len(data.examples))))
    assert sum(len(example.images) for example in data.examples) > len(decoded) == len(data.album.images)
    assert set(decoded.values()) == {1}


def test_a_picture_is_what_the_model_reads(tmp_path: Path) -> None:
    data = questions.questions_of(questions.recipe_of(questions.write_questions(tmp_path / "pictures"), images=CHANGES))
    rows, columns = data.album.grids[3].tolist()
    patches = own(data.album, 3, None).numpy()
    assert np.array_equal(
        data.album.picture(3), unpatch(patches, (rows, columns), data.album.patch, data.album.settings)
    )
    assert np.array_equal(data.album.decode(3), patches)
