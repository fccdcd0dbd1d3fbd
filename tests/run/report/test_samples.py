"""Evaluations and replies that a run keeps are read back whole, or not at all."""

import json
from typing import Any

import pytest

from unpad.run.report.samples import EVALUATIONS, keep_evaluation, newest_evaluation

OF: dict[str, Any] = {"num": 3, "part": "valid", "best_of": None}
GOOD: dict[str, Any] = {"value": 1.5, "low": 1, "high": "inf", **OF}
REFUSED: dict[str, Any] = {"value": None, "low": None, "high": None, "reason": "lossy", **OF}


def test_the_newest_evaluation_is_read_back_as_it_was_kept(tmp_path):
    assert newest_evaluation(tmp_path) is None
    for step, metrics in ((4, {}), (9, {"loss": GOOD, "bits_per_char": REFUSED})):
        keep_evaluation(tmp_path, step, metrics, ["a line"])
        found = newest_evaluation(tmp_path)
        assert {"time": found["time"], "step": step, "metrics": metrics, "lines": ["a line"]} == found


@pytest.mark.parametrize(
    "wrong",
    [{"metrics": 5}, {"metrics": {"loss": GOOD, "accuracy": 3}}, {"step": "9"}, {"time": 3}, {"metrics": None},
     *({"metrics": {"loss": GOOD, "accuracy": {**GOOD, name: value}}}
       for name, value in (("value", "x"), ("low", []), ("high", {}), ("num", 3.0), ("num", None)))],
)  # fmt: skip
def test_an_evaluation_with_one_wrong_field_is_none(tmp_path, wrong):
    row = {"time": "2026-01-01T00:00:00", "step": 9, "metrics": {"loss": GOOD, "accuracy": REFUSED}}
    for given, expected in ((row, row), ({**row, **wrong}, None)):
        (tmp_path / EVALUATIONS).write_text(json.dumps(given) + "\n")
        assert newest_evaluation(tmp_path) == expected
    for name in ("value", "low", "high", "num"):
        metric = {key: value for key, value in GOOD.items() if key != name}
        (tmp_path / EVALUATIONS).write_text(json.dumps({**row, "metrics": {"loss": GOOD, "b": metric}}) + "\n")
        assert newest_evaluation(tmp_path) is None, name
