"""Openings come from held-out texts that are long enough to be cut."""

import json

import pytest

from tests.helpers.toy import run, write_toy
from unpad.evaluation.text import heldout_openings
from unpad.inference.loaded import load

pytestmark = pytest.mark.slow


def test_openings_are_the_beginnings_of_long_held_out_texts(tmp_path):
    recipe = write_toy(tmp_path / "toy", stages=[], model={"context": 200})
    long = "小猫喜欢甲乙的花" * 8
    texts = [{"text": f"{i}、{long}", "split": "train"} for i in range(6)]
    texts += [{"text": f"{letter}：{long}", "split": "holdout"} for letter in "甲乙"] + [
        {"text": "短", "split": "holdout"}
    ]
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in texts)
    (tmp_path / "toy" / "texts.jsonl").write_text(rows, encoding="utf-8")
    run(recipe, tmp_path / "run", "train.max_steps=1")
    loaded = load(tmp_path / "run")
    found = heldout_openings(loaded, 10)
    assert sorted(opening[0] for opening in found) == ["乙", "甲"]
    assert all(f"{opening[0]}：{long}".startswith(opening) for opening in found)
    assert len(heldout_openings(loaded, 1)) == 1
