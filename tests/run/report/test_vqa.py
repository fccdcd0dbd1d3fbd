"""The page's pictures of visual tokens: what was measured."""

from tests.helpers.run_folders import html_of
from unpad.evaluation.metrics import EXTREMES, Metric
from unpad.run.report.vqa import section, to_json

METRICS = {
    "accuracy": Metric(0.5, 0.4, 0.6, 9), "kept_average": Metric(8, 4, 9, 9, EXTREMES),
    "visual_tokens": Metric(16, 4, 64, 9, EXTREMES),
    "kept_block_0": Metric(12, 4, 20, 9, EXTREMES), "kept_block_1": Metric(3, 1, 5, 9, EXTREMES),
}  # fmt: skip


def test_the_page_has_tokens_of_every_block():
    found = to_json(METRICS)
    assert found["kept"] == [[12, 4, 20], [3, 1, 5]]
    page = html_of(section, found)
    assert "patches of the images" in page
    assert "block 0: 12</title>" in page
    assert "block 1: 3</title>" in page
