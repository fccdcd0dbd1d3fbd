"""Endings of runs of several processes: the exit code, soon, of all processes; and resumed runs with the same bytes."""

import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import unpad
from benchmarks.equal_processes import digests
from tests.helpers.endings import ENDINGS, UNLIKE, happen, killed_at, run_command
from tests.helpers.toy import events, rows, write_toy
from unpad.terminal.printing import resume_run
from unpad.training.context import SaveClock

pytestmark = pytest.mark.slow

SECONDS = 20.0  # from an event to the end of all processes
NUM_KILLS = 3


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache, and a working directory from which the recipe names its data."""
    monkeypatch.chdir(tmp_path)
    write_toy(
        Path(),
        plan={"tokens_per_step": 80, "tokens_per_micro": 40},
        checkpoint={"every": 2},
        stages=[
            {"name": "pretrain", "use": ["text"], "train": {"max_epochs": 3, "eval_every": 7}},
            {"name": "tune", "use": ["chat"], "optim": {"per": "epoch"}, "train": {"max_epochs": 3}},
        ],
        train={"threads": 1},
    )


def train(folder: Path, *more: str) -> list[str]:
    return ["train", str(folder.parent / "toy.yaml"), "--out", str(folder), *more]


@pytest.mark.nightly
@pytest.mark.promise("processes.endings")
def test_a_run_that_ends_in_every_way_has_the_bytes_of_one_that_does_not(tmp_path):
    assert run_command(train(tmp_path / "calm"), 1, tmp_path / "outputs").codes == [0]
    folder = tmp_path / "run"
    for ending in ENDINGS:
        arguments = train(folder, "--resume", "checkpoint.every_seconds=0.1", *ending.overrides)
        ended = run_command(arguments, 2, tmp_path / "outputs", ending.fault)
        assert ended.codes == ending.codes(2), (ending.name, ended.error)
        assert ending.said in ended.error, ending.name
        assert 0 < ended.seconds < SECONDS, ending.name
        assert "Traceback" not in ended.error, ending.name
    draw = random.Random(0)
    for _ in range(NUM_KILLS):
        rank = draw.randrange(3)
        ended = run_command(train(folder, "--resume"), 3, tmp_path / "outputs", killed_at(draw.randint(1, 5), rank))
        assert ended.codes == [-9 if other == rank else 10 for other in range(3)], ended.error
        assert ended.seconds < SECONDS
    assert run_command(train(folder, "--resume"), 3, tmp_path / "outputs").codes == [0] * 3
    assert digests(folder) == digests(tmp_path / "calm")


def test_the_clock_of_the_first_process_decides_on_checkpoints_by_time(tmp_path):
    def stopped_clock(rank: int, size: int) -> None:
        if rank > 0:
            SaveClock.due = lambda self: False

    arguments = train(tmp_path / "run", "train.max_steps=3", "checkpoint.every=9", "checkpoint.every_seconds=1e-9")
    assert run_command(arguments, 2, tmp_path / "outputs", stopped_clock).codes == [0, 0]
    assert [event["step"] for event in events(tmp_path / "run", "checkpoint")] == [1, 2, 3]


def test_a_script_whose_processes_torchrun_has_started_trains_one_run(tmp_path):
    recipe, folder = str(tmp_path / "toy.yaml"), tmp_path / "run"
    ended = run_command([], 2, tmp_path / "outputs", work=lambda: unpad.train(recipe, "train.max_steps=3", out=folder))
    assert (ended.codes, ended.error) == ([0, 0], "")
    assert [row["step"] for row in rows(folder, "train")] == [1, 2, 3]


@pytest.mark.nightly
@pytest.mark.promise("processes.endings")
def test_the_command_passes_ctrl_c_on_and_shows_one_error_of_three_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    folder = tmp_path / "run"

    def interrupt(rank: int, size: int) -> None:
        def once_it_trains() -> None:
            metrics = folder / "metrics.jsonl"
            while not (metrics.is_file() and metrics.stat().st_size):
                time.sleep(0.02)
            happen()
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=once_it_trains, daemon=True).start()

    forever = [f"stages.{name}.train.max_epochs=1000" for name in ("pretrain", "tune")]
    ended = run_command(train(folder, "--processes", "2", *forever), 1, tmp_path / "outputs", interrupt)
    said = "Interrupted: stopped by Ctrl-C; everything up to here is saved"
    error = f"{said}\n  at: {folder}\n  do: continue with {resume_run(folder)}\n"
    assert (ended.codes, ended.error) == ([130], error)
    assert (folder / "processes" / "1.log").read_text() == error
    assert 0 < ended.seconds < SECONDS


@pytest.mark.promise("processes.endings")
@pytest.mark.parametrize("ending", UNLIKE, ids=lambda ending: ending.name)
def test_processes_that_are_not_alike_are_named_before_they_write_a_checkpoint(tmp_path, ending):
    (tmp_path / "changed").mkdir()
    for name in ("texts", "chats"):
        shutil.copy(f"{name}.jsonl", "changed")
    with (tmp_path / "changed" / "texts.jsonl").open("a") as file:
        file.write('{"text": "一行"}\n')
    ended = run_command(train(tmp_path / "run", *ending.overrides), 2, tmp_path / "outputs", ending.fault)
    assert ended.codes == [9, 9], ended.error
    assert ending.said in ended.error
    assert 0 < ended.seconds < SECONDS
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_another_recipe_is_named(tmp_path):
    ended = run_command(train(tmp_path / "run"), 2, tmp_path / "outputs", own={1: ["optim.lr=1"]})
    assert ended.codes == [9, 9]
    assert "process 1 has another recipe than process 0" in ended.error
    assert not (tmp_path / "run").exists()
