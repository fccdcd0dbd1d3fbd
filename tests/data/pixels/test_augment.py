"""Changed images keep their size, are what the draw says, and change nothing that is held out or proven."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.pictures import images_of, recipe_of, write_folder, write_recipe
from unpad.batching.plan import plan
from unpad.data.images import ImageData
from unpad.data.pictures.album import pixels_of
from unpad.data.pixels.patches import augment, prepare
from unpad.data.sources.split import Split
from unpad.proof.recipe import prove_recipe
from unpad.recipes.data import ImageSettings

pytestmark = pytest.mark.slow

ALL = {"flip": 0.5, "shift": 0.2, "scale": 1.0, "zoom": 0.5, "color": 0.3, "erase": 0.5}


def picture(rows: int, columns: int, patch: int = 4) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (rows * patch, columns * patch, 3)).astype(np.uint8)


def test_a_mirrored_image_is_its_mirror_image():
    settings = ImageSettings(flip=1.0)
    pixels = picture(2, 5)
    changed = augment(prepare(pixels, (2, 5), 4, settings), (2, 5), 4, settings, np.random.default_rng(0))
    assert np.array_equal(changed, prepare(np.ascontiguousarray(pixels[:, ::-1]), (2, 5), 4, settings))


def test_a_shift_moves_pixels_and_repeats_the_edge():
    settings = ImageSettings(shift=0.5)
    patches = prepare(picture(3, 3), (3, 3), 4, settings)
    seen = set()
    for seed in range(30):
        changed = augment(patches, (3, 3), 4, settings, np.random.default_rng(seed))
        assert changed.shape == patches.shape
        assert set(np.unique(changed)) <= set(np.unique(patches))
        seen.add(changed.tobytes())
    assert len(seen) > 15


def changed(pixels: np.ndarray, seed: int, **fields: Any) -> np.ndarray:
    """A picture of one channel thrice and of whole patches of 4, changed and put together again, (3, height, width)."""
    settings, grid = ImageSettings(**fields), (pixels.shape[0] // 4, pixels.shape[1] // 4)
    patches = augment(prepare(pixels, grid, 4, settings), grid, 4, settings, np.random.default_rng(seed))
    return patches.reshape(*grid, 3, 4, 4).transpose(2, 0, 3, 1, 4).reshape(3, *pixels.shape[:2])


def test_a_zoom_keeps_the_middle_and_changes_the_size_of_what_is_there():
    pixels = np.full((40, 80, 3), 255, np.uint8)
    pixels[10:30, 20:60] = 0  # half of each side
    shares = []
    for seed in range(40):
        black = changed(pixels, seed, zoom=0.5)[0] < 0
        rows, columns = black.any(1), black.any(0)
        assert np.array_equal(rows, rows[::-1])
        assert np.array_equal(columns, columns[::-1])
        assert rows.sum() * 2 == pytest.approx(columns.sum(), abs=2)
        shares.append(rows.sum() / 20)
    assert 1 / 1.5 - 0.1 <= min(shares) < 0.8
    assert 1.3 < max(shares) <= 1.5 + 0.1
    assert np.ptp(changed(np.full((16, 24, 3), 77, np.uint8), 3, zoom=1.0)) < 1e-5, "one colour stays one colour"


def test_colours_change_and_greys_stay_without_colour():
    greys = np.repeat(np.arange(0, 256, 17), 4)[:, None, None].repeat(4, 1).repeat(3, 2).astype(np.uint8)
    red = np.zeros((4, 4, 3), np.uint8)
    red[..., 0] = 200
    seen = []
    for seed in range(30):
        turned = changed(greys, seed, color=0.8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
        back = turned * np.array([0.2, 0.3, 0.4])[:, None, None] + np.array([0.4, 0.5, 0.6])[:, None, None]
        assert np.ptp(back, axis=0).max() < 1e-5
        assert back[:, 0].max() < 1e-5
        assert back[:, -1].min() > 1 - 1e-5
        assert bool((np.diff(back[0, ::4, 0]) > 0).all()), "what was brighter still is"
        seen.append(changed(red, seed, color=0.8)[:, 0, 0].argmax())
    assert {0, 1, 2} == set(seen)


def test_one_rectangle_of_one_colour_is_erased():
    plain, shares = np.full((40, 80, 3), 255, np.uint8), []
    for seed in range(60):
        hidden = (changed(plain, seed, erase=0.5) != 1).any(0)
        rows, columns = hidden.any(1), hidden.any(0)
        assert np.array_equal(hidden, rows[:, None] & columns)
        assert rows.sum() <= 20
        assert columns.sum() <= 40
        shares.append(hidden.mean())
        if hidden.any():
            assert len(np.unique(changed(plain, seed, erase=0.5)[:, hidden], axis=1).T) == 1
    assert 0.04 < np.mean(shares) < 0.09  # a quarter of each side


def test_opacity_moves_with_the_colours_and_keeps_its_values():
    patches = np.random.default_rng(3).uniform(-1, 1, (6, 4 * 64)).astype(np.float32)
    colours = np.ascontiguousarray(patches.reshape(6, 4, 64)[:, :3]).reshape(6, -1)
    settings = ImageSettings(flip=1.0, shift=0.3, zoom=0.5, color=0.5, erase=0.5)
    for seed in range(5):
        both = augment(patches, (2, 3), 8, settings, np.random.default_rng(seed)).reshape(6, 4, 64)
        alone = augment(colours, (2, 3), 8, settings, np.random.default_rng(seed)).reshape(6, 3, 64)
        np.testing.assert_array_equal(both[:, :3], alone)
    both = augment(patches, (2, 3), 8, ImageSettings(flip=1.0, color=0.5), np.random.default_rng(0))
    mirrored = patches.reshape(2, 3, 4, 8, 8)[:, ::-1, 3, :, ::-1]
    np.testing.assert_array_equal(both.reshape(2, 3, 4, 8, 8)[:, :, 3], mirrored)
    erased = augment(np.full_like(patches, -1), (2, 3), 8, ImageSettings(erase=1.0), np.random.default_rng(1))
    assert set(np.unique(erased.reshape(6, 4, 64)[:, 3])) == {-1.0, 1.0}, "what hides is opaque"


def test_an_epoch_draws_the_size_of_training_images_and_the_plan_knows(tmp_path):
    recipe = recipe_of(write_folder(tmp_path / "pictures"), images={"scale": 1.0, "min_tokens": 2, "max_tokens": 30})
    data = images_of(recipe)
    held = data.table.split == Split.HOLDOUT
    epochs = [data.lengths((7, epoch)) for epoch in range(20)]
    assert np.array_equal(epochs[3], data.lengths((7, 3)))
    assert not np.array_equal(epochs[3], data.lengths((8, 3)))
    for lengths in epochs:
        assert np.array_equal(lengths[held], data.table.positions[held])
        assert 2 <= lengths.min() <= lengths.max() <= 30
    changes = [(lengths - data.table.positions)[~held] for lengths in epochs]
    smaller, larger = (sum((sign * change > 0).mean() for change in changes) / 20 for sign in (-1, 1))
    assert 0.25 < smaller < 0.55
    assert 0.25 < larger < 0.55
    for epoch in (0, 1):
        made = plan(data.lengths((7, epoch)), recipe.plan, seed=7, epoch=epoch, targets=data.count_targets)
        for step in range(made.num_steps):
            for micro in made.step(step):
                batch = data.load(micro)
                assert batch.layout.lengths().tolist() == (micro.stops - micro.starts).tolist()
                for place, image in enumerate(micro.seq_ids.tolist()):
                    assert torch.equal(batch.select([place]).inputs_embeds, _drawn_alone(data, image, (7, epoch)))


def _drawn_alone(data: ImageData, image: int, epoch_seed: tuple[int, int]) -> torch.Tensor:
    """The patches of an image at the size that an epoch draws, straight from its file."""
    rows, columns = data.album.drawn_grids(np.array([image]), epoch_seed)[0].tolist()
    pixels = pixels_of(data.examples[image])
    return torch.from_numpy(prepare(pixels, (rows, columns), data.album.patch, data.album.settings))


def test_a_recipe_that_changes_images_is_proven_all_the_same(tmp_path):
    name = write_recipe(tmp_path / "r.yaml", recipe_of(write_folder(tmp_path / "pictures"), images=ALL))
    certificate = prove_recipe(name, [])
    assert certificate.passed, "\n".join(certificate.text())
