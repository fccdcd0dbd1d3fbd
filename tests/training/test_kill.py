"""A run killed at any instant and resumed leaves the same bytes as an undisturbed run."""

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.faults import kill
from tests.helpers.processes import in_child
from tests.helpers.toy import LOOP, events, rows, run, same_tensors, weights, write_toy
from unpad.cli.main import main
from unpad.run import checkpoint
from unpad.storage import disk

pytestmark = pytest.mark.slow

torch.set_num_threads(1)  # a forked child must not wait for threads that did not come along


def two_stages(folder: Path, precision: str = "fp32", threads: int = 1, **model: int) -> Path:
    """Dropout, micro-batches, epochs of 9 and 6 steps, evaluation inside an epoch, a rate that changes by epoch."""
    return write_toy(
        folder,
        precision=precision,
        train={"threads": threads},
        model=model,
        plan={"tokens_per_step": 120, "tokens_per_micro": 70},
        stages=[
            {"name": "pretrain", "use": ["text"], "train": {"max_epochs": 2, "eval_every": 5}},
            {"name": "tune", "use": ["chat"], "optim": {"per": "epoch"}, "train": {"max_epochs": 2}},
        ],
    )


def watch(seen: Callable[[str], None]) -> None:
    """Have this process call `seen` before every storage operation and before every step."""
    update = LOOP.train_step

    def watched_step(*args: object, **options: object) -> object:
        seen("step")
        return update(*args, **options)

    LOOP.train_step = watched_step
    disk.operation = lambda name, path: seen(name)


def at_event(number: int, action: Callable[[], object], kind: str = "") -> None:
    """Do `action` at the `number`-th event of this process (of one kind), 1 being the first."""
    left = number

    def count_down(name: str) -> None:
        nonlocal left
        left -= kind in ("", name)
        if left == 0 and kind in ("", name):
            action()

    watch(count_down)


def undisturbed(recipe: Path, folder: Path) -> int:
    """Run to the end without a kill; return the number of events."""
    tally = folder.with_name("tally")

    def action() -> None:
        seen: list[str] = []
        watch(seen.append)
        run(recipe, folder)
        tally.write_text(str(len(seen)))

    assert in_child(action) == 0
    return int(tally.read_text())


def killed(recipe: Path, folder: Path, at: int) -> bool:
    """Start or resume, and be killed at event `at`; False when the run ended before that."""

    def action() -> None:
        at_event(at, kill)
        run(recipe, folder, resume=True)

    code = in_child(action)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def assert_same_run(folder: Path, expected: Path) -> None:
    for name in ("metrics.jsonl", "metrics.csv"):
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name
    for name in ("best", "best-pretrain"):
        assert same_tensors(weights(folder, name), weights(expected, name)), name
    steps = [row["step"] for row in rows(folder, "train")]
    assert steps == list(range(1, len(steps) + 1))
    assert not [path for path in folder.rglob(".*") if path.name.startswith((".tmp-", ".old-"))]


# Heads of 32, which native kernels take, and matrices that several threads share.
NATIVE = {"width": 64, "heads": 2, "hidden": 256}


THREADS = int(os.environ.get("UNPAD_KILL_THREADS", "1"))
NUM_KILLS = 10 if THREADS == 1 else 3  # beside other work two threads wait for each other


@pytest.mark.promise("speed.resumed", "train.exponential", "run.resumed")
@pytest.mark.parametrize(("precision", "model"), [("fp32", {}), ("bf16", {}), ("bf16", NATIVE)])
def test_a_run_that_was_killed_again_and_again_equals_one_that_was_not(tmp_path, precision, model):
    recipe = two_stages(tmp_path, precision, THREADS, **model)
    num_events = undisturbed(recipe, tmp_path / "calm")
    assert {row["stage"]: row["step"] for row in rows(tmp_path / "calm", "train")} == {"pretrain": 18, "tune": 30}
    draw = random.Random(precision)
    num_kills = num_runs = 0
    while num_kills < NUM_KILLS:  # a run that ended before its next kill is compared, and another begins
        folder = tmp_path / f"run-{num_runs}"
        if killed(recipe, folder, draw.randint(1, num_events // 3)):
            num_kills += 1
        else:
            assert_same_run(folder, tmp_path / "calm")
            num_runs += 1
    assert in_child(lambda: run(recipe, folder, resume=True)) == 0
    assert_same_run(folder, tmp_path / "calm")


@pytest.mark.promise("cli.exit-codes")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_ends_with_its_code_and_resume_goes_on_identically(tmp_path, number, code):
    recipe = two_stages(tmp_path)
    undisturbed(recipe, tmp_path / "calm")
    folder = tmp_path / "run"

    def command(*more: str, signal_at: int = 0) -> int:
        def action() -> None:
            at_event(signal_at, lambda: os.kill(os.getpid(), number), kind="step")
            sys.argv = ["unpad", "train", str(recipe), "--out", str(folder), *more]
            main()

        return in_child(action)

    assert command(signal_at=8) == code
    assert checkpoint.load_newest(folder / "checkpoints")[0].step == 8  # no step is due to be saved but every third
    assert command("--resume", signal_at=15) == code  # step 23, in the second stage
    assert command("--resume") == 0
    assert_same_run(folder, tmp_path / "calm")
    assert [event["exit_code"] for event in events(folder, "stopped")] == [code, code]


@pytest.mark.promise("cli.exit-codes")
def test_a_closed_terminal_saves_though_its_shell_sends_a_second_signal_and_nothing_can_be_printed(tmp_path):
    recipe, folder = two_stages(tmp_path), tmp_path / "run"

    def close() -> None:
        terminal = os.open("/dev/full", os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(terminal, descriptor)
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGHUP):
            os.kill(os.getpid(), number)

    def action() -> None:
        at_event(5, close, kind="step")
        sys.argv = ["unpad", "train", str(recipe), "--out", str(folder)]
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        main()

    assert in_child(action) == 129
    assert checkpoint.load_newest(folder / "checkpoints")[0].step == 5


@pytest.mark.promise("cli.exit-codes")
def test_a_run_under_nohup_goes_on_when_the_terminal_is_closed(tmp_path):
    def action() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        at_event(5, lambda: os.kill(os.getpid(), signal.SIGHUP), kind="step")
        run(write_toy(tmp_path, train={"threads": 1, "max_steps": 6}), tmp_path / "run")

    assert in_child(action) == 0


def test_a_second_process_in_the_directory_is_refused_by_name_of_the_first(tmp_path):
    recipe = two_stages(tmp_path)
    folder, errors = tmp_path / "run", tmp_path / "errors"
    arrived, release = os.pipe(), os.pipe()

    def first() -> None:
        at_event(2, lambda: (os.write(arrived[1], b"."), os.read(release[0], 1)), kind="step")
        run(recipe, folder)

    def second(*more: str) -> int:
        def action() -> None:
            sys.stderr = errors.open("w", buffering=1)
            sys.argv = ["unpad", "train", str(recipe), "--out", str(folder), *more]
            main()

        return in_child(action)

    pid = os.fork()
    if pid == 0:
        os.close(release[1])  # else it would wait for ever for a parent that has failed
        os._exit(0 if in_child(first) == 0 else 1)
    os.close(arrived[1])
    assert os.read(arrived[0], 1) == b"."
    holder = json.loads((folder / "run.lock").read_text())
    for more in ([], ["--resume"]):
        assert second(*more) == 5
        assert f"pid {holder['pid']}" in errors.read_text()
    os.write(release[1], b".")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(rows(folder, "train")) == 30
