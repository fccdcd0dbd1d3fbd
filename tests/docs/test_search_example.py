"""`examples/search.py` trains trials, goes on where it ended, and names the best by rows that are not of the test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.toy import write_toy

SCRIPT = Path(__file__).parents[2] / "examples" / "search.py"


@pytest.mark.slow
@pytest.mark.nightly
def test_two_trials_are_trained_and_kept(tmp_path):
    pytest.importorskip("optuna")
    recipe = write_toy(tmp_path, stages=[], train={"threads": 1, "max_steps": 2})
    with (tmp_path / "texts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"text": "apart", "split": "test"}) + "\n")
    for trials in ("1", "2"):
        words = [sys.executable, str(SCRIPT), str(recipe), str(tmp_path / "search"), trials]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("best: trial-")
    assert sorted(path.name for path in (tmp_path / "search").glob("trial-*")) == ["trial-0", "trial-1"]
    measured = (tmp_path / "search" / "trial-0" / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    assert {one["part"] for line in measured for one in json.loads(line)["metrics"].values()} == {"valid"}
