"""The benchmark of long contexts counts every target once, at its position, in every way of extension."""

from __future__ import annotations

import argparse
import json
import math
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.toy import quiet
from unpad.data.measuring import Measuring
from unpad.data.text import TextData
from unpad.evaluation.text import document_nll
from unpad.inference.loaded import load
from unpad.training.loop import train

pytestmark = pytest.mark.slow

CONTEXT = 16


@pytest.fixture(scope="module")
def bench() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        return import_module("long_context")


def test_ranges_double_and_end_at_the_factor(bench: Any) -> None:
    assert bench.ranges(64, 1) == [(0, 64)]
    assert bench.ranges(64, 2) == [(0, 64), (64, 128)]
    assert bench.ranges(64, 4) == [(0, 64), (64, 128), (128, 256)]


@pytest.mark.promise("llm.context")
def test_every_way_reads_the_same_targets_and_one_time_the_context_is_the_models_own(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    texts = tmp_path / "texts.jsonl"
    draw = random.Random(3)
    texts.write_text(
        "".join(json.dumps({"text": "".join(draw.choices("天地玄黄宇宙洪荒", k=40))}) + "\n" for _ in range(400))
    )
    arguments = argparse.Namespace(data=texts, width=16, context=CONTEXT, steps=1)
    train("llm", tmp_path / "run", bench.recipe_fields(arguments), console=quiet())
    found = bench.compare(tmp_path / "run", CONTEXT)
    assert [(one.way, one.factor, one.first) for one in found] == [("as trained", 1, 0)] + [
        (way, factor, first)
        for factor in (2, 4)
        for way in ("none", "linear", "ntk")
        for first in (0, CONTEXT, 2 * CONTEXT)[: 2 if factor == 2 else 3]
    ]
    for factor in (2, 4):
        chars = [[one.chars for one in found if (one.way, one.factor) == (way, factor)] for way in bench.METHODS]
        for other in chars[1:]:
            assert np.array_equal(np.stack(chars[0]), np.stack(other))
    run = load(tmp_path / "run")
    data = run.data()
    assert isinstance(data, TextData)
    sums = document_nll(Measuring(run.model, data, np.flatnonzero(data.table.split == 1), run.recipe.plan))
    whole = sums.nll.sum() / math.log(2) / sums.chars.sum()
    assert found[0].bits()[0] == pytest.approx(whole, rel=0.02), "but for the rest of a sequence after its last window"
    beyond = {one.way: one.bits()[0] for one in found if (one.factor, one.first) == (4, 2 * CONTEXT)}
    assert len(set(beyond.values())) == 3, "the ways differ where positions are new"
