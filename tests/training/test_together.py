"""Processes that train together take the same branches: whatever one of them meets, none waits for ever."""

import signal
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.equal_processes import digests
from tests.helpers.toy import LOOP, events, quiet, rows, write_toy
from tests.helpers.turns import DivergenceError, in_turns, outcomes_in_turns
from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Plan
from unpad.errors import DiskError, OutOfMemoryError, Stopped, Terminated, UnlikeProcessesError, UnpadError
from unpad.evaluation.metrics import HeldOut
from unpad.models.decoder import Decoder
from unpad.nn.losses import Terms
from unpad.processes.group import Group
from unpad.run import checkpoint
from unpad.run.checkpoint import State
from unpad.run.monitor import Monitor, StepRecord
from unpad.training import consistency, progress
from unpad.training.context import Signals
from unpad.training.loop import Result, train
from unpad.training.progress import Progress
from unpad.training.setup import Setup
from unpad.training.stage import StageSetup

STEP = import_module("unpad.training.step")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Texts alone, of one stage and two evaluations."""
    train = {"threads": 1, "max_steps": 6, "eval_every": 3}
    return write_toy(tmp_path, stages=[], data={"chat": []}, train=train, checkpoint={"every": 2})


def run(recipe: Path, folder: Path, group: Group, *overrides: str, resume: bool = False) -> Result:
    return train(str(recipe), folder, list(overrides), resume=resume, console=quiet(), group=group)


def errors_of(outcomes: list[Any], kind: type[UnpadError]) -> list[str]:
    """Messages of errors that every process must have, all of one kind and known to be of all."""
    for outcome in outcomes:
        assert type(outcome) is kind, outcome
        assert outcome.is_agreed
    return [outcome.what for outcome in outcomes]


def test_processes_that_wait_for_different_things_are_found_at_once():
    """By the group of these tests, where real processes would hang."""

    def work(group: Group) -> None:
        if group.rank == 0:
            group.add(torch.ones(1))
        else:
            group.exchange(1)

    found = outcomes_in_turns(3, work)
    assert any(isinstance(one, DivergenceError) for one in found)
    with pytest.raises(DivergenceError, match="process 0 has ended"):
        in_turns(2, lambda group: group.exchange(1) if group.rank else None)


# --------------------------------------------------------------------------- what one process alone meets


def test_a_disk_that_is_full_for_the_first_process_ends_all(recipe, tmp_path, monkeypatch):
    """It alone writes rows of metrics, which the others are not told of."""
    write = Monitor.step

    def full(self: Monitor, record: StepRecord, **options: Any) -> None:
        if record.step == 3:
            raise DiskError("no space left")
        write(self, record, **options)

    monkeypatch.setattr(Monitor, "step", full)
    found = outcomes_in_turns(3, lambda group: run(recipe, tmp_path / "run", group))
    assert errors_of(found, DiskError) == ["no space left", *["no space left (process 0)"] * 2]


@pytest.mark.parametrize("sums", ["exact", "fast"])
def test_memory_that_one_process_lacks_for_its_optimizer_ends_all(recipe, tmp_path, monkeypatch, sums):
    update, calls = STEP.update, list[int]()

    def lacking(*given: object) -> None:
        calls.append(0)
        if len(calls) == 5:  # of the second of three processes, as they take turns
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        update(*given)

    monkeypatch.setattr(STEP, "update", lacking)
    found = outcomes_in_turns(3, lambda group: run(recipe, tmp_path / "run", group, f"train.sums={sums}"))
    assert sum("(process " in what for what in errors_of(found, OutOfMemoryError)) == 2


# --------------------------------------------------------------------------- what they see of the disk


def test_a_run_directory_that_hosts_do_not_share_is_named_before_the_first_update(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(consistency, "SEEN_S", 0.0)
    found = outcomes_in_turns(2, lambda group: run(recipe, tmp_path / f"host-{group.rank}" / "run", group))
    assert errors_of(found, UnlikeProcessesError) == ["process 1 has another run directory than process 0"] * 2
    assert not (tmp_path / "host-0" / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("seen", ["an older one", "none"])
def test_processes_that_find_different_checkpoints_do_not_go_on(recipe, tmp_path, monkeypatch, seen):
    in_turns(1, lambda group: run(recipe, tmp_path / "run", group))
    restore = progress._restore

    def elsewhere(setup: Setup) -> tuple[Progress, State | None, list[str]]:
        found = restore(setup)
        if setup.group.rank == 1 and found[1] is not None:
            found[1].step = 4
            return (Progress(), None, []) if seen == "none" else found
        return found

    monkeypatch.setattr(progress, "_restore", elsewhere)
    found = outcomes_in_turns(2, lambda group: run(recipe, tmp_path / "run", group, "train.max_steps=8", resume=True))
    steps = "6, none" if seen == "none" else "6, 4"
    what = f"the processes read different checkpoints, of the steps {steps}"
    assert errors_of(found, UnlikeProcessesError) == [what] * 2


# --------------------------------------------------------------------------- what bits depend on


def test_weights_that_drift_apart_are_named_at_the_next_checkpoint(recipe, tmp_path, monkeypatch):
    """As of a processor that computes wrongly; the checkpoint is not written."""
    update, calls = STEP.update, list[int]()

    def drifting(optimizer: torch.optim.Optimizer, *given: Any) -> None:
        update(optimizer, *given)
        calls.append(0)
        if len(calls) == 5:  # in the third update of one of them
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].view(-1)[0] += 1e-6

    monkeypatch.setattr(STEP, "update", drifting)
    found = outcomes_in_turns(2, lambda group: run(recipe, tmp_path / "run", group))
    errors_of(found, UnlikeProcessesError)
    assert found[0].where == "step 3"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step*")] == ["step-00000002"]


# --------------------------------------------------------------------------- updates that are left out


def test_an_update_that_is_not_finite_in_one_process_is_left_out_in_all(recipe, tmp_path, monkeypatch):
    losses, faulty = Decoder.losses, {5, 18, 40}

    def broken(self: Decoder, batch: RaggedBatch) -> Terms:
        terms = losses(self, batch)
        if not self.training or batch.seq_ids is None or not faulty.intersection(batch.seq_ids.tolist()):
            return terms
        return {name: (total * torch.nan, count) for name, (total, count) in terms.items()}

    monkeypatch.setattr(Decoder, "losses", broken)
    for size in (1, 3):
        folder = tmp_path / str(size)
        in_turns(size, lambda group, folder=folder: run(recipe, folder, group, "train.on_nonfinite=skip"))
    assert 0 < len(events(tmp_path / "3", "skipped_step")) < 6
    assert digests(tmp_path / "1") == digests(tmp_path / "3")


# --------------------------------------------------------------------------- stages, epochs and resumes


@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_in_an_epoch_without_steps_saves_and_ends_all(recipe, tmp_path, monkeypatch, size):
    """One process receives it, and no update follows at which it would be agreed."""
    made, plan, planned = list[Signals](), LOOP.epoch_plan, list[int]()

    class Noted(Signals):
        def __init__(self, group: Group) -> None:
            super().__init__(group)
            made.append(self)

    def with_empty_epoch(stage: StageSetup, epoch: int, window: int = 0) -> Plan:
        whole: Plan = plan(stage, epoch, window)
        planned.append(epoch)
        if epoch == 0 or not made:
            return whole
        made[-1].received = signal.SIGTERM
        return replace(whole, step_offsets=whole.step_offsets[:1])

    monkeypatch.setattr("unpad.training.loop.Signals", Noted)
    monkeypatch.setattr(LOOP, "epoch_plan", with_empty_epoch)
    overrides = ("train.max_steps=null", "train.max_epochs=9", "checkpoint.every=1000", "train.eval_every=1000")
    found = outcomes_in_turns(size, lambda group: run(recipe, tmp_path / "run", group, *overrides))
    errors_of(found, Terminated)
    last = rows(tmp_path / "run", "train")[-1]["step"]
    assert planned.count(1) == size
    assert 2 not in planned
    assert checkpoint.load_newest(tmp_path / "run" / "checkpoints")[0].step == last


@pytest.mark.nightly
def test_a_run_goes_on_with_any_number_of_processes(tmp_path):
    """Over the end of a stage and an early stop, from checkpoints of 3, 1 and 2 processes."""
    recipe = write_toy(tmp_path, train={"threads": 1, "patience": 2, "min_delta": 2.0, "eval_every": 4})
    in_turns(1, lambda group: run(recipe, tmp_path / "whole", group))
    assert events(tmp_path / "whole", "early_stop")

    def part(group: Group, last: int) -> Result:
        def ends(stage: str, step: int, result: HeldOut) -> bool:
            return step == last

        folder = tmp_path / "parts"
        return train(str(recipe), folder, resume=True, console=quiet(), after_evaluation=ends, group=group)

    for size, last in ((3, 8), (1, 12), (2, 20), (4, 0)):
        found = outcomes_in_turns(size, lambda group, last=last: part(group, last))
        assert {type(outcome) for outcome in found} == {Stopped if last else Result}, last
    assert digests(tmp_path / "parts") == digests(tmp_path / "whole")
    stages = [row["stage"] for row in rows(tmp_path / "parts", "train")]
    assert 8 < stages.index("tune") <= 12
