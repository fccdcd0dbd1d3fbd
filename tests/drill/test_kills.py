"""Kills of a real training: a sound one passes, and each planted fault of a resume is found."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from tests.helpers.toy import write_toy
from unpad.drill import kills
from unpad.drill.kills import (
    Calm,
    KillPlan,
    Tally,
    check_kills,
    difference,
    kill_and_compare,
    undisturbed,
    unlike_steps,
)
from unpad.drill.train import train_here
from unpad.errors import CheckpointError
from unpad.processes import children

torch.set_num_threads(1)  # a forked child must not wait for threads that did not come along

STEPS = 12


def write_run(folder: Path, steps: int = 4, weights: bytes = b"w") -> Path:
    """What a drill compares of a run."""
    for name in ("best", "best-pretrain", "step-00000003", f"step-{steps:08d}"):
        (folder / "checkpoints" / name).mkdir(parents=True)
        (folder / "checkpoints" / name / "model.safetensors").write_bytes(weights)
    rows = [{"step": step, "loss": 1 / step} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "metrics.csv").write_text("".join(f"{row['step']},{row['loss']}\n" for row in rows))
    return folder


def write_log(folder: Path, *entries: tuple[str, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"time": "now", "kind": kind, "step": step}) + "\n" for kind, step in entries]
    (folder / "log.jsonl").write_text("".join(["{cut short\n", *lines, '{"kind": "resu']))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("", ""),
        ("metrics.jsonl", "metrics.jsonl differs from line 5 on"),
        ("metrics.csv", "metrics.csv differs from line 2 on"),
        ("checkpoints/best/model.safetensors", "best/model.safetensors differs"),
        ("checkpoints/best-pretrain/model.safetensors", "best-pretrain/model.safetensors is missing"),
        ("checkpoints/step-00000004/model.safetensors", "step-00000004/model.safetensors differs"),
        ("checkpoints/step-00000003/model.safetensors", ""),
    ],
)
def test_every_byte_that_a_run_leaves_is_compared(tmp_path: Path, change: str, says: str) -> None:
    calm, other = write_run(tmp_path / "calm"), write_run(tmp_path / "other")
    path = other / change
    if "pretrain" in change:
        path.unlink()
    elif change == "metrics.csv":
        path.write_text(path.read_text().replace("2,0.5", "2,0.6"))
    elif change:
        path.write_bytes(path.read_bytes() + b"x\n")
    assert difference(other, calm) == says
    assert unlike_steps(other, calm) == "", "where bits may differ, steps alone count"


@pytest.mark.promise("drill.kills")
def test_a_saved_checkpoint_that_a_resume_does_not_find_is_a_fault(tmp_path: Path) -> None:
    write_log(tmp_path, ("checkpoint", 3), ("resumed", 3), ("checkpoint", 6), ("resumed", 6))
    assert kills._lost(tmp_path) == ""
    assert kills._begins(tmp_path) == [3, 6]
    write_log(tmp_path, ("checkpoint", 3), ("checkpoint", 6), ("resumed", 3))
    assert kills._lost(tmp_path).startswith("the checkpoint of step 6 was saved, and lost")


def test_a_stop_that_did_not_save_its_last_step_is_a_fault(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 5)
    assert kills._not_saved(run) == ""
    shutil.rmtree(run / "checkpoints" / "step-00000005")
    assert kills._not_saved(run) == "SIGTERM at step 5 left step-00000003"


@pytest.mark.parametrize(
    ("tally", "verdict", "says"),
    [
        (Tally(1, 0, 1, 3), "ok", "1 kill, 0 SIGTERM in 1 run of 12 steps"),
        (Tally(7, 1, 2, 3), "ok", "7 kills, 1 SIGTERM in 2 runs of 12 steps: every byte equal"),
        (Tally(7, 1, 2, 3, ["metrics.csv differs"]), "fault", "metrics.csv differs"),
        (Tally(), "warning", "no time for a kill"),
    ],
)
def test_the_verdict_on_kills(tally: Tally, verdict: str, says: str) -> None:
    found = check_kills(tally, STEPS)
    assert found.severity == verdict
    assert says in found.values["measured"]


def test_where_a_step_has_other_bits_each_time_every_step_must_be_there_once(tmp_path: Path) -> None:
    calm, other = write_run(tmp_path / "calm"), write_run(tmp_path / "other")
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4}\n')
    assert unlike_steps(other, calm) == "the metrics lack steps, or have some twice"
    assert check_kills(Tally(3, 1, 1), STEPS, exact=False).values["measured"].endswith("every step once")


# --------------------------------------------------------------------------- real trainings


def goes_on_elsewhere(recipe: Path, folder: Path) -> None:
    """A trainer that goes on one step before or after the place in its data that its checkpoint names."""
    from unpad.training import loop

    restore = loop.restore

    def elsewhere(setup):  # type: ignore[no-untyped-def]
        progress, state, warnings = restore(setup)
        if state is not None:
            progress.epoch_step += -1 if progress.epoch_step else 1
        return progress, state, warnings

    loop.restore = elsewhere
    train_here(recipe, folder)


def cannot_resume(recipe: Path, folder: Path) -> None:
    """A trainer that refuses its own checkpoints."""
    if (folder / "checkpoints").exists():
        raise CheckpointError("all are damaged")
    train_here(recipe, folder)


def hangs(recipe: Path, folder: Path) -> None:
    """A trainer that does not go on."""
    time.sleep(600)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, Calm]]:
    """Recipe, folder and undisturbed run."""
    folder = tmp_path_factory.mktemp("drill")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children, "CONTEXT", get_context("fork"))  # which has imported everything already
        patch.setenv("UNPAD_CACHE", str(folder / "cache"))
        recipe = write_toy(folder, train={"max_steps": STEPS, "threads": 1}, checkpoint={"every": 2})
        yield recipe, folder, undisturbed(recipe, folder, 120.0)


@pytest.mark.promise("drill.kills")
@pytest.mark.slow
def test_a_sound_training_leaves_the_same_bytes_however_often_it_is_killed(calm: tuple[Path, Path, Calm]) -> None:
    recipe, folder, run = calm
    assert (run.code, run.last_words, run.error) == (0, "", None)
    tally = kill_and_compare(KillPlan(recipe, folder, run, math.inf, 3))
    assert tally.faults == []
    assert tally.kills + tally.stops == 3
    assert tally.stops == 1
    assert not list(folder.glob("run-*"))


@pytest.mark.promise("drill.kills")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "says"), [(goes_on_elsewhere, "differs"), (cannot_resume, "exit code 4: CheckpointError")]
)
def test_a_resume_that_is_wrong_is_found(calm: tuple[Path, Path, Calm], train: kills.Train, says: str) -> None:
    recipe, folder, run = calm
    tally = kill_and_compare(KillPlan(recipe, folder, run, math.inf, 6, train=train))
    assert len(tally.faults) == 1
    assert says in tally.faults[0]


@pytest.mark.slow
def test_a_training_that_hangs_is_given_up_and_its_process_ended(
    calm: tuple[Path, Path, Calm], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, folder, run = calm
    monkeypatch.setattr(kills, "LEAST_WAIT", 0.2)
    monkeypatch.setattr(kills, "HANGS", 0.0)
    tally = kill_and_compare(KillPlan(recipe, folder, run, 0.0, 2, train=hangs))
    assert tally.faults == ["a resume did not end within 0 s"]
    assert undisturbed(recipe, folder, 0.2, hangs).code is None
