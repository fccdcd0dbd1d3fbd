"""Changed images keep their size, are what the draw says, and change nothing that is held out or proven."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.test_images import images_of, micro_of, recipe_of, write_folder, write_recipe
from unpad.images.augment import augment
from unpad.images.patches import prepare
from unpad.prove_recipe import prove_recipe
from unpad.recipe import ImageSettings

ALL = {"flip": 0.5, "shift": 0.2, "color": 0.3}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))


def picture(rows: int, columns: int, patch: int = 4) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (rows * patch, columns * patch, 3)).astype(np.uint8)


def test_a_mirrored_image_is_its_mirror_image() -> None:
    settings = ImageSettings(flip=1.0)
    pixels = picture(2, 5)
    changed = augment(prepare(pixels, (2, 5), 4, settings), (2, 5), 4, settings, np.random.default_rng(0))
    assert np.array_equal(changed, prepare(np.ascontiguousarray(pixels[:, ::-1]), (2, 5), 4, settings))


def test_a_shift_moves_pixels_and_repeats_the_edge() -> None:
    settings = ImageSettings(shift=0.5)
    patches = prepare(picture(3, 3), (3, 3), 4, settings)
    seen = set()
    for seed in range(30):
        changed = augment(patches, (3, 3), 4, settings, np.random.default_rng(seed))
        assert changed.shape == patches.shape
        assert set(np.unique(changed)) <= set(np.unique(patches))
        seen.add(changed.tobytes())
    assert len(seen) > 15


def test_nothing_asked_for_changes_nothing() -> None:
    patches = prepare(picture(2, 3), (2, 3), 4, ImageSettings())
    before = patches.copy()
    assert np.array_equal(augment(patches, (2, 3), 4, ImageSettings(), np.random.default_rng(1)), before)
    augment(patches, (2, 3), 4, ImageSettings(**ALL), np.random.default_rng(1))
    assert np.array_equal(patches, before), "what is kept in memory is not written to"


def test_an_epoch_draws_for_training_images_alone_and_always_the_same(tmp_path: Path) -> None:
    data = images_of(recipe_of(write_folder(tmp_path / "pictures"), images=ALL))
    held, trained = (np.flatnonzero(data.split == side).tolist() for side in (1, 0))

    def pixels(ids: list[int], epoch: int) -> torch.Tensor:
        found = data.load(replace(micro_of(data, ids), draw=(7, epoch))).inputs_embeds
        assert found is not None
        return found

    assert torch.equal(pixels(held, 0), pixels(held, 1))
    assert not torch.equal(pixels(trained, 0), pixels(trained, 1))
    assert torch.equal(pixels(trained, 1), pixels(trained, 1))
    alone = torch.cat([pixels([i], 1) for i in trained])
    assert torch.equal(alone, pixels(trained, 1)), "whatever else is in the batch"


def test_a_recipe_that_changes_images_is_proven_all_the_same(tmp_path: Path) -> None:
    name = write_recipe(tmp_path / "r.yaml", recipe_of(write_folder(tmp_path / "pictures"), images=ALL))
    certificate = prove_recipe(name, [])
    assert certificate.passed, "\n".join(certificate.text())
