"""The list of runs."""

import json
import os
import shlex

import pytest

from tests.helpers.run_folders import run_directory
from unpad.errors import RunFileError
from unpad.run.compare import HEAD, RunSummary, describe_runs, summarize
from unpad.run.folder import COMMAND
from unpad.run.report.history import load_metrics, read_history


def test_the_command_of_a_run_can_be_typed_again(tmp_path):
    override = "data.text=[a.jsonl, {path: b.csv, field: body}]"
    (tmp_path / COMMAND).write_text(json.dumps({"recipe": "llm", "overrides": [override]}))
    (tmp_path / "log.jsonl").write_text("")
    assert shlex.split(summarize(tmp_path).command) == ["unpad", "train", "llm", override]


def test_a_summary_is_counted_from_the_files_of_the_run(tmp_path):
    folder = run_directory(tmp_path / "run")
    (folder / COMMAND).write_text(json.dumps({"recipe": "llm", "overrides": []}))
    *_, best = [row["loss"] for row in load_metrics(folder) if row["kind"] == "eval" and row["best"]]
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    expected = RunSummary("run", "finished", log[0]["time"], 60, best, size, "unpad train llm")
    assert summarize(folder) == expected
    (folder / "checkpoints/best").mkdir(parents=True)
    for step, shown in ((60, load_metrics(folder)[-1]["loss"]), (20, best)):  # of a stage before the newest
        (folder / "checkpoints/best/state.json").write_text(f'{{"step": {step}}}')
        assert summarize(folder).heldout == shown
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
def test_a_run_is_shown_in_columns_of_one_width(summary, lines):
    assert [line.rstrip() for line in summary.lines()] == lines
    assert len(lines[-2]) == len(HEAD)


def test_runs_are_listed_newest_first_under_one_head(tmp_path, monkeypatch):
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


TIME, END = "'time': '2026-01-02T03:04:05+00:00'", "'kind': 'finished'"
MADE = {"recipe": "runs/qwen/recipe.yaml", "overrides": [], "family": "Qwen3ForCausalLM"}


@pytest.mark.promise("models.listed")
@pytest.mark.parametrize(
    ("log", "made_by", "state", "started"),
    [
        (
            '{"time": "2026-01-02T03:04:05+00:00", "kind": "finished", "step": 0}', "unpad import x", "imported",
            "2026-01-02",
        ),
        (f"{{{END}, 'step': 0}}", "unpad import x", "imported", "2001-09-09"),
        (
            '{"time": "2026-01-02T03:04:05+00:00", "kind": "finished", "step": 9}', "unpad merge y", "merged",
            "2026-01-02",
        ),
    ],
)  # fmt: skip
def test_a_run_that_was_made_says_from_what(log, made_by, state, started, tmp_path):
    (tmp_path / COMMAND).write_text(json.dumps({**MADE, "made_by": made_by}))
    os.utime(tmp_path / COMMAND, (10**9, 10**9))  # in the place of a time that logs of imports lacked at first
    (tmp_path / "log.jsonl").write_text(log.replace("'", '"') + "\n")
    found = summarize(tmp_path)
    assert (found.state, found.started[:10], found.command) == (state, started, f"{made_by}  # Qwen3ForCausalLM")
    assert found.num_bytes > 0
    with pytest.raises(RunFileError, match=f'"{made_by}" made this run, which has no steps') as caught:
        read_history(tmp_path)
    assert "unpad train" in caught.value.fix


@pytest.mark.promise("models.listed")
def test_runs_are_listed_from_inside_their_folder(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    folder = run_directory(tmp_path / "runs" / "mine", steps=9)
    (folder / COMMAND).write_text(json.dumps({"recipe": "llm", "overrides": []}))
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "other" / "recipe.yaml").write_text("")  # a recipe beside the runs, and no run
    monkeypatch.chdir(tmp_path / "runs")
    assert [line.split()[0] for line in describe_runs()[1::2]] == ["mine"]


@pytest.mark.promise("proof.names")
def test_runs_of_another_folder_are_listed_by_their_paths_in_it(tmp_path, unpad):
    for name in ("disk/mine", "disk/search/trial-1", "disk/a/b/c/deep", "disk/.hidden/run"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        folder = run_directory(tmp_path / name, steps=9)
        (folder / COMMAND).write_text(json.dumps({"recipe": "llm", "overrides": []}))
    (tmp_path / "disk" / "recipes").mkdir()
    (tmp_path / "disk" / "recipes" / "recipe.yaml").write_text("")  # no run
    os.utime(tmp_path / "disk/mine/recipe.yaml", (10**9, 10**9))
    told = unpad("runs", tmp_path / "disk")
    head, *lines = told.out.splitlines()
    assert (told.code, head) == (0, HEAD)
    assert [line.split()[0] for line in lines[::2]] == ["search/trial-1", "mine"]
    assert unpad("runs", tmp_path / "disk" / "mine").out == f"{tmp_path}/disk/mine/report.html\n"
    assert unpad("runs", tmp_path / "disk" / "recipes").out == f"no runs in {tmp_path}/disk/recipes\n"
    told = unpad("runs", tmp_path / "nowhere")
    assert (told.code, "there is no run" in told.err) == (2, True)
