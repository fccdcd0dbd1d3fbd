"""The page's pictures of visual tokens: what was measured, and the patches that stayed."""

import json

import numpy as np

from tests.helpers.kept_patches import QUESTION, kept
from tests.helpers.run_folders import html_of
from unpad.evaluation.metrics import EXTREMES, Metric
from unpad.run.report.vqa import picture_from_json, section, to_json

METRICS = {
    "accuracy": Metric(0.5, 0.4, 0.6, 9), "kept_average": Metric(8, 4, 9, 9, EXTREMES),
    "visual_tokens": Metric(16, 4, 64, 9, EXTREMES),
    "kept_block_0": Metric(12, 4, 20, 9, EXTREMES), "kept_block_1": Metric(3, 1, 5, 9, EXTREMES),
}  # fmt: skip


def test_pictures_are_read_back_as_they_were():
    found = json.loads(json.dumps(to_json(METRICS, [(kept(QUESTION, "圆形"), "圆环")])))
    one, back = kept(QUESTION, "圆形"), picture_from_json(found["pictures"][0])
    assert np.array_equal(one.pixels, back.pixels)
    assert (one.patch, one.question, one.answer) == (back.patch, back.question, back.answer)
    assert list(one.stays) == list(back.stays)
    assert all(np.array_equal(one.stays[block], back.stays[block]) for block in one.stays)


def test_the_page_has_tokens_of_every_block_and_patches_that_stayed():
    found = to_json(METRICS, [(kept("<b>?</b>", "x"), "y"), (kept(), "circle")])
    assert found["kept"] == [[12, 4, 20], [3, 1, 5]]
    page = html_of(section, found)
    assert "patches of the images" in page
    assert "block 0: 12</title>" in page
    assert "block 1: 3</title>" in page
    assert page.count("<image") == 6
    assert "<b>?</b>" not in page
    assert "the answer is y" in page
    assert "<p>right</p>" in page
