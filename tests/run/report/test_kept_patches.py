"""Pictures of what a pruned model kept: kept patches are untouched, and no caption becomes boxes."""

import base64
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.kept_patches import GRID, PATCH, QUESTION, kept
from unpad.errors import RecipeError
from unpad.run.report import vqa


@pytest.mark.promise("vqa.hard-pruning")
def test_patches_that_stay_are_untouched_and_the_others_fade():
    one = kept()
    stays = one.stays[0].reshape(GRID)
    found = vqa.dimmed(one.pixels, stays, PATCH)
    for row in range(GRID[0]):
        for column in range(GRID[1]):
            place = np.s_[row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
            before, after = one.pixels[place].astype(float), found[place].astype(float)
            assert np.array_equal(before, after) == stays[row, column]
            if not stays[row, column]:
                assert after.std() < 0.25 * before.std()


def test_a_picture_has_a_panel_per_layer_and_text_as_text():
    one = kept()
    assert [title for title, _ in one.panels] == ["12 patches", "after block 0: 3", "after block 2: 1"]
    early = replace(one, stays={-1: one.stays[0]})
    assert [title for title, _ in early.panels] == ["12 patches", "before the first block: 3"]
    text = vqa.to_svg(one)
    shown = [np.array(Image.open(io.BytesIO(base64.b64decode(data)))) for data in re.findall('base64,([^"]*)', text)]
    assert all(np.array_equal(panel, wanted) for panel, (_, wanted) in zip(shown, one.panels, strict=True))
    assert QUESTION in vqa.to_svg(kept(QUESTION, "圆形"))
    assert "Which &lt;shape&gt;?" in text
    assert "after block 2: 1" in text


def test_several_pictures_have_numbers(tmp_path):
    vqa.write_pictures([kept(), kept()], tmp_path / "out.svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-1.svg", "out-2.svg"]


def test_images_of_every_size_can_be_drawn():
    for rows, columns in ((1, 1), (60, 80), (1, 90)):
        pixels = np.zeros((rows * PATCH, columns * PATCH, 3), np.uint8)
        one = vqa.Kept(pixels, PATCH, {1: np.ones(rows * columns, np.bool_)}, "?", "")
        assert int(re.search(r'width="(\d+)"', vqa.to_svg(one))[1]) >= 2 * pixels.shape[1]


def test_what_cannot_be_shown_is_refused():
    with pytest.raises(RecipeError, match="writes SVG"):
        vqa.check_request(Path("out.jpg"), "?")
    with pytest.raises(RecipeError, match="nothing is asked"):
        vqa.check_request(Path("out.svg"), None)
    with pytest.raises(RecipeError, match="merges patches"):
        vqa.refuse_unshowable(("origin", "merge_only", "hard"), True, "run")
    with pytest.raises(RecipeError, match="removes no patches"):
        vqa.refuse_unshowable(("origin",), False, "run")
    vqa.refuse_unshowable(("origin", "hard"), False, "run")
