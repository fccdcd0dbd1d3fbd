import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from unpad.data.pixels.patches import detail, grid_of
from unpad.errors import RecipeError
from unpad.recipes.data import ImageSettings

SIDES = st.integers(1, 16_384)


@pytest.mark.promise("images.square")
@pytest.mark.parametrize(("side", "num_tokens"), [(224, 256), (336, 576), (448, 1024)])
def test_a_square_of_patches_of_14_has_the_tokens_of_clip(side, num_tokens):
    for size in ("square", "letterbox", "native"):
        rows, columns = grid_of(side, side, 14, ImageSettings(size=size, square=side, max_tokens=1024))
        assert (rows, columns) == (side // 14, side // 14)
        assert rows * columns == num_tokens
    assert grid_of(1000, 30, 14, ImageSettings(size="square", square=side)) == (side // 14, side // 14)


@pytest.mark.promise("images.square")
def test_a_square_that_no_patches_fill_is_refused():
    for size in ("square", "letterbox"):
        with pytest.raises(RecipeError, match="not a multiple of the patch") as caught:
            grid_of(64, 64, 14, ImageSettings(size=size, square=64))
        assert "56 or 70" in caught.value.fix


def test_a_native_image_has_the_nearest_number_of_patches():
    settings = ImageSettings()
    assert grid_of(128, 128, 16, settings) == (8, 8)
    assert grid_of(130, 119, 16, settings) == (7, 8)
    assert grid_of(24, 40, 16, settings) == (3, 2)  # a half is rounded up
    assert grid_of(1, 1, 16, settings) == (1, 1)
    assert grid_of(48, 720, 16, settings) == (45, 3)
    assert grid_of(154, 166, 10, settings) == (17, 15)  # 255 fit, though 16 x 15 would be nearer to the aspect


def test_a_strip_stays_a_strip():
    assert grid_of(720, 48, 16, ImageSettings(max_tokens=64)) == (2, 30)
    assert grid_of(48, 720, 16, ImageSettings(max_tokens=64)) == (30, 2)
    assert grid_of(16_384, 1, 16, ImageSettings()) == (1, 256)
    assert grid_of(1_000, 30, 10, ImageSettings(max_tokens=16)) == (1, 16)
    assert grid_of(179, 19, 10, ImageSettings(max_tokens=34)) == (2, 17)  # and not 1 x 17, which is twice as long


@pytest.mark.promise("images.own-size")
@given(SIDES, SIDES, st.integers(1, 64), st.integers(1, 1024))
def test_a_grid_fits_its_budget_and_is_never_larger_than_the_image(w, h, patch, most):
    rows, columns = grid_of(w, h, patch, ImageSettings(max_tokens=most))
    assert 1 <= rows <= max(1, h / patch + 0.5)
    assert 1 <= columns <= max(1, w / patch + 0.5)
    assert rows * columns <= most
    assert grid_of(h, w, patch, ImageSettings(max_tokens=most)) in ((columns, rows), (rows, columns))


@given(SIDES, SIDES, st.integers(1, 64), st.integers(1, 200), st.integers(0, 300))
def test_a_small_image_is_enlarged_to_its_least_number_of_patches(w, h, patch, least, more):
    own = grid_of(w, h, patch, ImageSettings(max_tokens=least + more))
    rows, columns = grid_of(w, h, patch, ImageSettings(min_tokens=least, max_tokens=least + more))
    if math.prod(own) >= least:
        assert (rows, columns) == own
        return
    assert rows * columns <= least + more
    assert rows * columns >= math.prod(own)
    if more > 4 * math.isqrt(least) + 1 and 1 / 4 < w / h < 4:  # room for one patch more on each side
        assert rows * columns >= least


def test_enlarging_keeps_the_aspect_ratio():
    settings = ImageSettings(min_tokens=16, max_tokens=64)
    assert [grid_of(side, side, 8, settings) for side in (1, 16, 22, 32, 48, 128)] == [
        (4, 4), (4, 4), (4, 4), (4, 4), (6, 6), (8, 8)
    ]  # fmt: skip
    assert grid_of(16, 8, 8, settings) == (3, 6)
    assert grid_of(4, 100, 8, settings) == (21, 1)


@pytest.mark.promise("images.own-size")
@given(st.integers(200, 4_000), st.integers(200, 4_000))
def test_scaling_down_keeps_the_aspect_ratio(width, height):
    rows, columns = grid_of(width, height, 8, ImageSettings(max_tokens=256))
    # A patch more or less on the shorter side is what whole numbers cost.
    shorter = min(rows, columns)
    assert abs(math.log(columns * height / (rows * width))) <= math.log((shorter + 1) / shorter)
    assert rows * columns > 256 * 0.6


@pytest.mark.promise("images.own-size")
@given(SIDES, SIDES, st.floats(0, 1), st.floats(0, 1))
def test_adaptive_lies_between_its_bounds_and_reaches_native(w, h, low, high):
    adaptive, native = ImageSettings(size="adaptive", min_tokens=4), ImageSettings()
    full = math.prod(grid_of(w, h, 16, native))
    for value in (low, high):
        assert math.prod(grid_of(w, h, 16, adaptive, value)) <= full
    assert math.prod(grid_of(w, h, 16, adaptive, 0.0)) <= min(4, full)
    assert grid_of(w, h, 16, adaptive, 1.0) == grid_of(w, h, 16, native)


@pytest.mark.promise("images.own-size")
def test_more_detail_gives_more_tokens():
    settings = ImageSettings(size="adaptive", min_tokens=4)
    counts = [math.prod(grid_of(640, 480, 16, settings, value / 20)) for value in range(21)]
    assert counts == sorted(counts)
    assert counts[0] <= 4
    assert counts[-1] > 200


def lines(every: int) -> NDArray[np.uint8]:
    pixels = np.full((64, 64, 3), 255, np.uint8)
    pixels[::every, ::2] = 0
    return pixels


def test_detail_grows_from_a_plain_colour_to_noise():
    shading = np.repeat(np.linspace(0, 255, 64).astype(np.uint8)[None, :, None], 64, 0).repeat(3, 2)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    measured = [detail(pixels) for pixels in (np.full((64, 64, 3), 77, np.uint8), shading, lines(16), lines(4), noise)]
    assert measured[0] == 0
    assert measured == sorted(measured)
    assert measured[1] < 0.1
    assert measured[2] > 0.05
    assert 0.8 < measured[-1] <= 1


def test_detail_is_the_same_of_a_picture_on_its_side():
    upright = lines(8)
    across = np.repeat(upright[:1], len(upright), 0)  # lines of one direction alone
    assert detail(across) > 0.1
    for pixels in (upright, across):
        assert detail(pixels.transpose(1, 0, 2)) == pytest.approx(detail(pixels))


@pytest.mark.parametrize(
    "fields",
    [{"min_tokens": 9, "max_tokens": 8}, {"std": (0.5, 0, 0.5)}, {"mean": (0.5, 127, 0.5)}, {"square": 0}, {"sise": 1}],
)
def test_settings_that_cannot_be_are_refused(fields):
    with pytest.raises(ValidationError):
        ImageSettings(**fields)
