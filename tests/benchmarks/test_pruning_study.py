"""The study of visual tokens compares the same questions, draws icons rather than pictures, and scores what it says."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_ICONS = 30


@pytest.fixture(scope="module", autouse=True)
def _path() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield
        for name in ("pruning", "pruning_report"):
            sys.modules.pop(name, None)


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def study(lost: float, copies: int = 1) -> Any:
    """Two seeds; of the icons that all tokens get right, learned pruning loses a share `lost`."""
    rng = np.random.default_rng(0)
    right = (rng.random((2, NUM_ICONS)) < 0.7).astype(float)
    learned = right * (np.arange(NUM_ICONS) >= lost * NUM_ICONS)
    scores = {("origin", 1.0): right, ("learned", 0.25): learned, ("random", 0.25): np.zeros_like(right)}
    scores["commonest answer", 0.0] = np.zeros_like(right)
    icons = np.repeat(np.arange(NUM_ICONS), copies)
    return module("pruning_report").Study(
        {key: values.repeat(copies, 1) for key, values in scores.items()}, icons,
        np.array(["what"] * len(icons)), [], [0, 1], {"threads": 1, "cores": 1, "processor": "one", "torch": "2"},
    )  # fmt: skip


def test_a_difference_is_of_the_same_questions() -> None:
    same = study(0.0).gap(("learned", 0.25), ("origin", 1.0))
    assert (same.value, math.isnan(same.low)) == (0, True), "what two methods share takes no part, and so has no spread"
    worse = study(0.2).gap(("learned", 0.25), ("origin", 1.0))
    assert worse.low < worse.value < worse.high <= 0


def test_more_pictures_of_the_same_icons_are_no_more_evidence() -> None:
    keys = ("learned", 0.25), ("origin", 1.0)
    one, ten = study(0.2).gap(*keys), study(0.2, copies=10).gap(*keys)
    assert (ten.low, ten.high) == pytest.approx((one.low, one.high))
    assert ten.num == NUM_ICONS


def test_what_the_study_asked_is_answered_by_the_figures() -> None:
    report = module("pruning_report")
    good, bad = ({question: holds for question, _, holds in report.checks(study(lost))} for lost in (0.0, 0.2))
    assert all(good.values())
    assert len(good) == 3
    assert [question for question, holds in bad.items() if not holds] == ["learned, 0.25 kept: within 5 points of all"]
    text = report.markdown(study(0.2), "command")
    assert "| NO |" in text
    assert "| learned |" in text


def test_names_of_files_are_not_asked_and_images_come_along(tmp_path: Path) -> None:
    pruning = module("pruning")
    source, folder = tmp_path / "source", tmp_path / "study"
    (source / "images").mkdir(parents=True)
    folder.mkdir()
    (source / "images" / "a_32.png").write_bytes(b"pixels")
    asked = ["How large is the picture?", pruning.LEFT_OUT + " as its designers would have."]
    rows = [{"image": "images/a_32.png", "question": text, "answer": "x", "split": "val"} for text in asked]
    (source / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with_images, without = pruning.prepare(source / "all.jsonl", folder)
    kept, blind = (json.loads(file.read_text(encoding="utf-8")) for file in (with_images, without))
    assert kept == rows[0]
    assert blind == {**rows[0], "image": None}
    assert (folder / "images" / "a_32.png").read_bytes() == b"pixels"


def test_a_method_is_what_its_share_makes_of_the_model() -> None:
    pruning = module("pruning")
    assert pruning.METHODS["random"].overrides(0.25) == [
        'model.prune={"layers": [-1], "method": "random", "keep": 0.25}'
    ]
    assert pruning.METHODS["similarity"].overrides(0.5) == ['model.merge={"variant": "similarity", "ratio": 0.5}']
