"""The list of runs."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from tests.run.report.test_page import run_directory
from unpad.run.folder import COMMAND
from unpad.run.report.history import load_metrics
from unpad.run.summary import HEAD, RunSummary, describe_runs, summarize


def test_the_command_of_a_run_can_be_typed_again(tmp_path: Path) -> None:
    override = "data.text=[a.jsonl, {path: b.csv, field: body}]"
    (tmp_path / COMMAND).write_text(json.dumps({"recipe": "llm", "overrides": [override]}))
    (tmp_path / "log.jsonl").write_text("")
    assert shlex.split(summarize(tmp_path).command) == ["unpad", "train", "llm", override]


def test_a_summary_is_counted_from_the_files_of_the_run(tmp_path: Path) -> None:
    folder = run_directory(tmp_path / "run")
    (folder / COMMAND).write_text(json.dumps({"recipe": "llm", "overrides": []}))
    *_, best = [row["loss"] for row in load_metrics(folder) if row["kind"] == "eval" and row["best"]]
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    expected = RunSummary("run", "finished", log[0]["time"], 60, best, size, "unpad train llm")
    assert summarize(folder) == expected
    metrics = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(metrics + '{"step": 61, "kind": "tra')  # still being written
    assert (summarize(folder).step, summarize(folder).heldout) == (60, best)
    (folder / "metrics.jsonl").unlink()
    assert (summarize(folder).step, summarize(folder).heldout) == (0, None)


@pytest.mark.parametrize(
    ("summary", "lines"),
    [
        (
            RunSummary("mine", "finished", "2026-01-02T03:04:05+00:00", 1234, 1.23456, 5_000_000, "unpad train llm"),
            ["mine                 finished  2026-01-02 03:04     1,234    1.2346       5MB", "  unpad train llm"],
        ),
        (
            RunSummary("a" * 21, "killed", "", 0, None, 20, "unpad train " + "x" * 66),
            ["a" * 21, " " * 21 + "killed" + " " * 20 + "         0         -       20B", "  unpad train " + "x" * 66],
        ),
    ],
)
def test_a_run_is_shown_in_columns_of_one_width(summary: RunSummary, lines: list[str]) -> None:
    assert [line.rstrip() for line in summary.lines()] == lines
    assert len(lines[-2]) == len(HEAD)


def test_runs_are_listed_newest_first_under_one_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert describe_runs() == ["nothing has run here yet; start with: unpad train zh_chat"]
    (tmp_path / "runs").mkdir()
    for age, name in enumerate(("new", "old")):
        folder = run_directory(tmp_path / "runs" / name, steps=9)
        (folder / COMMAND).write_text(json.dumps({"recipe": "llm", "overrides": []}))
        os.utime(folder / "recipe.yaml", (10**9 - age, 10**9 - age))
    head, *lines = describe_runs()
    assert head == HEAD
    assert [line.split()[0] for line in lines] == ["new", "unpad", "old", "unpad"]
