"""Columns of `unpad compare` are counted from the files of each run."""

from __future__ import annotations

import json
from pathlib import Path

from tests.run.report.test_page import run_directory
from unpad.run.compare import compare


def test_the_best_check_is_of_the_last_stage_and_memory_is_in_gigabytes_of_a_thousand_million(tmp_path: Path) -> None:
    folders = [run_directory(tmp_path / name) for name in ("one", "two")]
    metrics, best = folders[1] / "metrics.jsonl", []
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in lines:
        if row["kind"] == "eval" and row["stage"] == "pretrain":
            row["loss"] = 0.01  # of another task
        elif row["kind"] == "eval":
            best.append(row["loss"])
    metrics.write_text("".join(json.dumps(row) + "\n" for row in lines))
    found = compare([str(folder) for folder in folders], tmp_path / "both.html")
    assert found.measures["held-out loss, best check"] == [f"{min(best):.4f}"] * 2
    assert found.measures["peak memory, GB"] == ["0.60", "0.60"]
