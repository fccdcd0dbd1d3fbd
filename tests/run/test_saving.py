"""Checkpoints that a thread writes while training goes on."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.equal_processes import digests
from tests.helpers.faults import fail_full, names_in
from tests.helpers.toy import LOOP, events, run, same_tensors, weights, write_toy
from unpad.errors import DiskError, SourceError
from unpad.run import checkpoint, saving
from unpad.storage import disk

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(tmp_path):
    return write_toy(tmp_path, stages=[], train={"threads": 1, "max_steps": 6, "eval_every": 99})


def arrange(patch: pytest.MonkeyPatch, before_step: Callable[[int], object], on_writing: Callable[[], object]) -> None:
    """Call the one before every step with its number from 1, the other before every operation on a checkpoint."""
    step, numbers = LOOP.train_step, iter(range(1, 99))

    def watched(*given: object, **options: object) -> object:
        before_step(next(numbers))
        return step(*given, **options)

    def operation(name: str, path: Path) -> None:
        if "checkpoints" in path.parts[:-1]:
            on_writing()

    patch.setattr(LOOP, "train_step", watched)
    patch.setattr(disk, "operation", operation)


@pytest.mark.promise("run.background")
def test_training_goes_on_while_a_checkpoint_is_written_and_leaves_the_same_bytes(recipe, tmp_path, monkeypatch):
    run(recipe, tmp_path / "calm")
    went_on, save = threading.Event(), checkpoint.save
    arrange(monkeypatch, lambda number: number == 5 and went_on.set(), lambda: None)
    monkeypatch.setattr(checkpoint, "save", lambda *given: went_on.wait(9) and save(*given))
    run(recipe, tmp_path / "run")
    assert [event["step"] for event in events(tmp_path / "run", "checkpoint")] == [3, 6]
    assert digests(tmp_path / "run") == digests(tmp_path / "calm")
    assert same_tensors(*(weights(tmp_path / name, "step-00000003") for name in ("run", "calm")))


def test_a_disk_that_is_full_ends_the_run_at_a_later_step(recipe, tmp_path, monkeypatch):
    steps, left = list[int](), [fail_full]
    arrange(monkeypatch, steps.append, lambda: len(steps) >= 3 and left and left.pop()())
    with pytest.raises(DiskError, match="No space left"):
        run(recipe, tmp_path / "run")
    assert 3 <= len(steps) <= 6
    assert names_in(tmp_path / "run" / "checkpoints") == []


def test_a_signal_while_a_checkpoint_begins_hides_no_error_of_its_writing(recipe, tmp_path, monkeypatch):
    left, copied = [fail_full], saving.copied
    arrange(monkeypatch, lambda number: None, lambda: left and left.pop()())
    monkeypatch.setattr(saving, "copied", lambda state: (signal.raise_signal(signal.SIGTERM), copied(state))[1])
    with pytest.raises(DiskError, match="No space left"):
        run(recipe, tmp_path / "run")


def test_a_run_that_fails_keeps_the_checkpoint_that_was_being_written(recipe, tmp_path, monkeypatch):
    failed = threading.Event()

    def fail(number: int) -> None:
        if number == 5:
            failed.set()
            raise SourceError("it has changed", where="texts.jsonl")

    arrange(monkeypatch, fail, lambda: failed.wait(9) and time.sleep(0.02))
    with pytest.raises(SourceError):
        run(recipe, tmp_path / "run")
    assert names_in(tmp_path / "run" / "checkpoints") == ["step-00000003"]


def test_without_memory_for_a_copy_a_checkpoint_is_written_before_training_goes_on(recipe, tmp_path, monkeypatch):
    names: set[str] = set()
    monkeypatch.setattr(saving, "available_memory", lambda: 0)
    arrange(monkeypatch, lambda number: None, lambda: names.add(threading.current_thread().name))
    run(recipe, tmp_path / "run")
    assert names == {"MainThread"}


def test_an_epoch_that_ends_in_a_window_without_steps_is_evaluated_and_saved(tmp_path):
    plan = {"window": 16, "drop_last": True, "tokens_per_step": 300, "tokens_per_micro": 300}
    run(write_toy(tmp_path, stages=[], plan=plan, train={"max_epochs": 1, "threads": 1}), tmp_path / "run")
    assert names_in(tmp_path / "run" / "checkpoints") == ["best", "step-00000001"]
