"""Kept tokens and costs are those that a count by hand gives."""

from itertools import count

import numpy as np
import pytest
import torch
from rich.cells import cell_len

from tests.helpers.merging import merging
from tests.helpers.pruning import pruned
from tests.helpers.vision import VOCAB, Row, prepare
from unpad.evaluation.metrics import EXTREMES, Metric, metric_lines
from unpad.evaluation.vqa import kept_metrics, mode_metrics
from unpad.evaluation.vqa_cost import measure, prefill_operations
from unpad.inference.engine import prefill
from unpad.models.cost import pruner_operations, reading_operations, sizes_of

ROWS: list[Row] = [("1 5 <image> 7 8", [(3, 4)], ""), ("2 3 4", [], ""), ("1 <image> <image> 3", [(2, 2), (1, 3)], "")]


@pytest.mark.promise("vqa.cost")
def test_kept_tokens_equal_a_count_by_hand():
    """Three rows, of which the second has no image, in a model of four blocks that merges and prunes, after block 1 or
    before the first as well."""
    patches, given = np.array([12, 0, 8]), np.array([6, 0, 4])
    kept = np.array([[6, 6, 3, 3], [0, 0, 0, 0], [4, 4, 1, 1]])
    found = kept_metrics(patches, given, kept)
    counts = {name: (one.value, one.low, one.high, one.num) for name, one in found.items() if "ratio" not in name}
    assert counts == {
        "visual_tokens": (10, 8, 12, 2),
        "kept_block_0": (5, 4, 6, 2), "kept_block_1": (5, 4, 6, 2), "kept_block_2": (2, 1, 3, 2),
        "kept_block_3": (2, 1, 3, 2), "kept_average": (3.5, 2.5, 4.5, 2), "kept_final": (2, 1, 3, 2),
    }  # fmt: skip
    ratios = {name: one.value for name, one in found.items() if "ratio" in name}
    assert ratios == pytest.approx({"keep_ratio_merge": 0.5, "keep_ratio_average": 0.7, "keep_ratio_final": 0.4})
    assert found["keep_ratio_final"].low < 0.4 < found["keep_ratio_final"].high
    early = kept_metrics(patches, given, np.array([[4, 4, 3, 3], [0, 0, 0, 0], [2, 2, 1, 1]]))
    ratios = {name: one.value for name, one in early.items() if "ratio" in name}
    assert ratios == pytest.approx({"keep_ratio_merge": 0.5, "keep_ratio_average": 0.5, "keep_ratio_final": 0.4})
    assert kept_metrics(patches[1:2], given[1:2], kept[1:2]) == {}
    assert kept_metrics(patches, given, kept[:, :0]) == {}


@pytest.mark.promise("vqa.modes")
def test_the_gap_between_soft_and_hard_is_of_the_same_rows():
    soft, hard = np.array([1.0, 0, 1, 0]), np.array([0.0, 0, 1, 0])
    found = mode_metrics({"origin": np.ones(4), "soft": soft, "hard": hard})
    assert {name: one.value for name, one in found.items()} == {
        "accuracy_origin": 1.0, "accuracy_soft": 0.5, "accuracy_hard": 0.25, "soft_to_hard_gap": -0.25,
    }  # fmt: skip
    assert found["soft_to_hard_gap"].low < -0.25 < found["soft_to_hard_gap"].high
    same = mode_metrics({"soft": np.ones(10), "hard": np.ones(10)})["soft_to_hard_gap"]
    assert (same.value, same.low, same.high) == pytest.approx((0, -0.3085, 0.3085), abs=1e-4)


@pytest.mark.promise("vqa.cost")
@torch.no_grad()
def test_operations_of_every_mode_equal_a_count_by_hand():
    """After block 1 of four a head leaves some of 12 and 7 patches; text has 4, 3 and 2 tokens."""
    model, prompts = pruned(layers=[1], keep=0.5), prepare(ROWS, answers=None).batch
    sizes = sizes_of(model.config.language, VOCAB)
    expected = {
        "origin": reading_operations(sizes, [[16, 3, 9]] * 4, 3),
        "hard": reading_operations(sizes, [[16, 3, 9]] * 2 + [[10, 3, 6]] * 2, 3)
        + pruner_operations(32, 8, [12, 0, 7], [4, 3, 2]),
    }
    for mode, operations in expected.items():
        model.mode = mode
        prefill(model, prompts, 40)
        assert prefill_operations(model, prompts) == operations
    early = pruned(layers=[-1], keep=0.5)
    prefill(early, prompts, 40)
    everywhere = reading_operations(sizes, [[10, 3, 6]] * 4, 3)
    assert prefill_operations(early, prompts) == everywhere + pruner_operations(32, 8, [12, 0, 7], [4, 3, 2])
    merged = merging("class_token")
    prefill(merged, prompts, 40)
    sizes = sizes_of(merged.config.language, VOCAB)
    assert prefill_operations(merged, prompts) == reading_operations(sizes, [[8, 3, 4]] * 3, 3)


@pytest.mark.promise("vqa.cost")
@torch.no_grad()
def test_modes_are_measured_in_turn_on_the_same_prompts():
    model, prompts, ticks = pruned(layers=[0], keep=0.25), prepare(ROWS, answers=None).batch, count()
    found = measure(model, prompts, 2, 5, lambda: float(next(ticks)))
    assert list(found) == ["origin", "hard"]
    for costs in found.values():
        assert [one.prefill_seconds for one in costs] == [1.0, 1.0]
        assert [one.decode_seconds for one in costs] == [1 / 15] * 2
    assert next(ticks) == 3 * 2 * 3, "a round to warm up, and two"
    origin, hard = (costs[0] for costs in found.values())
    assert hard.cache_bytes < origin.cache_bytes
    assert hard.operations != origin.operations
    assert model.mode == "hard"


def test_the_table_lines_up_whatever_the_names():
    """Letters of Chinese take two cells; a question too long for the column has a line to itself."""
    question = "accuracy: " + "Which of the shapes in the picture is it? " * 2
    metrics = {
        "accuracy": Metric(0.5, 0.4, 0.6, 9), "accuracy: 图形是什么颜色？": Metric(0.25, 0.1, 0.4, 4),
        question: Metric(0.75, 0.5, 1.0, 4), "kept_final": Metric(2.5, 1.0, 4.0, 9, EXTREMES),
    }  # fmt: skip
    lines = metric_lines(metrics)
    assert lines[2] == question
    places = [cell_len(line[: line.rindex(value)]) for line, value in zip(
        (lines[0], lines[1], lines[3], lines[4]), ("0.5000   ", "0.2500   ", "0.7500   ", "2.5000   "), strict=True
    )]  # fmt: skip
    assert len(set(places)) == 1
    assert lines[4].endswith("2.5000   least 1.0000, most 4.0000   of 9")
    assert lines[0].endswith("0.5000   0.4000 to 0.6000   of 9")
