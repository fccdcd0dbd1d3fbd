"""A resume that misses rows of its metrics, or runs on another processor, says so and goes on."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.toy import events, rows, run, same_tensors, weights, write_toy
from unpad.errors import CheckpointError

SIX_STEPS = {"stages": [], "optim": {"lr": 0.01, "schedule": "constant"}, "checkpoint": {"every": 2, "keep": 5}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one recipe, of 10 steps, of 8 and of 2."""
    root = tmp_path_factory.mktemp("gaps")
    recipe = write_toy(root, **SIX_STEPS)
    for steps in (10, 8, 2):
        run(recipe, root / str(steps), f"train.max_steps={steps}")
    return root


LOSSES = {
    "emptied": (lambda path: path.write_bytes(b""), "1 to 8"),
    "deleted": (lambda path: path.unlink(), "1 to 8"),
    "a hole": (lambda path: path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:2])), "3 to 8"),
    "the first rows": (lambda path: path.write_bytes(b"".join(path.read_bytes().splitlines(True)[3:])), "1 to 3"),
}


@pytest.mark.promise("run.missing-rows")
@pytest.mark.parametrize("file", ["metrics.jsonl", "timing.jsonl"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_resume_names_the_steps_whose_rows_are_lost(trained, tmp_path, loss, file):
    calm, (lose, missing) = trained / "10", LOSSES[loss]
    shutil.copytree(trained / "8", tmp_path / "run")
    lose(tmp_path / "run" / file)
    run(trained / "toy.yaml", tmp_path / "run", "train.max_steps=10", resume=True)
    [warning] = events(tmp_path / "run", "warning")
    assert warning["message"] == f"{file} lacks steps {missing}: they were trained, and their rows are lost"
    assert warning["message"] in (tmp_path / "run/report.html").read_text()
    assert "they were trained" not in (calm / "report.html").read_text()
    assert same_tensors(weights(tmp_path / "run"), weights(calm))
    assert rows(tmp_path / "run", "train")[-2:] == rows(calm, "train")[-2:]


def test_an_epoch_whose_rows_are_partly_lost_has_no_mean_loss(tmp_path):
    recipe = write_toy(tmp_path, **SIX_STEPS)
    run(recipe, tmp_path / "calm", "train.max_epochs=2")
    first, second = rows(tmp_path / "calm", "epoch")
    run(recipe, tmp_path / "run", f"train.max_steps={first['step'] - 1}")
    (tmp_path / "run/metrics.jsonl").unlink()
    run(recipe, tmp_path / "run", "train.max_steps=1000", "train.max_epochs=2", resume=True)
    assert rows(tmp_path / "run", "epoch")[0]["loss"] is None
    assert rows(tmp_path / "run", "epoch")[1] == second


def test_a_checkpoint_that_comes_back_after_a_resume_without_it_leaves_no_silent_hole(tmp_path):
    recipe = write_toy(tmp_path, **SIX_STEPS)
    run(recipe, tmp_path / "run", "train.max_steps=8")
    newest = tmp_path / "run/checkpoints/step-00000008"
    newest.rename(tmp_path / "away")  # unreadable for one resume, which is stopped before it gets there again
    run(recipe, tmp_path / "run", "train.max_steps=7", resume=True)
    (tmp_path / "run/checkpoints/step-00000007").rename(tmp_path / "seven")
    (tmp_path / "away").rename(newest)
    run(recipe, tmp_path / "run", "train.max_steps=9", resume=True)
    warnings = events(tmp_path / "run", "warning")
    assert [entry["message"].split(":")[0] for entry in warnings] == [
        "metrics.jsonl lacks steps 8",
        "timing.jsonl lacks steps 8",
    ]
    assert [entry["missing"] for entry in warnings] == [[[8, 8]]] * 2


@pytest.mark.parametrize("line", [{}, {"step": "eight", "kind": "train", "stage": "x"}, {"step": 1, "kind": "train"}])
def test_a_line_without_its_fields_is_refused_by_place(tmp_path, line):
    recipe = write_toy(tmp_path, **SIX_STEPS)
    run(recipe, tmp_path / "run", "train.max_steps=4")
    path = tmp_path / "run/metrics.jsonl"
    path.write_text(json.dumps(line) + "\n" + path.read_text(), encoding="utf-8")
    with pytest.raises(CheckpointError, match="lacks fields") as caught:
        run(recipe, tmp_path / "run", "train.max_steps=6", resume=True)
    assert caught.value.where == f"{path}:1"


@pytest.mark.promise("run.missing-rows")
def test_a_resume_on_another_processor_says_that_bits_may_differ(tmp_path, monkeypatch):
    recipe = write_toy(tmp_path, **SIX_STEPS)
    run(recipe, tmp_path / "run", "train.max_steps=4")
    now = torch.backends.cpu.get_cpu_capability()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER")
    run(recipe, tmp_path / "run", "train.max_steps=6", resume=True)
    said = f"cpu_capability is OTHER, was {now}: the run continues, and its bits may differ"
    assert [entry["message"] for entry in events(tmp_path / "run", "warning")] == [said]
    assert events(tmp_path / "run", "environment")[-1]["cpu_capability"] == "OTHER"
