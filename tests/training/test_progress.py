"""Counters of a run: what a stage hands on, what a checkpoint brings back, and what is on the device before it."""

import json
import os
from pathlib import Path

import pytest

from tests.helpers.toy import LOOP, events, rows, run, same_tensors, scripted_heldout, weights, write_toy
from unpad.run import checkpoint
from unpad.storage import disk
from unpad.training.progress import Progress
from unpad.training.step import LossScaler

pytestmark = pytest.mark.slow


def test_the_best_of_a_stage_does_not_count_for_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(LOOP, "held_out", scripted_heldout([1.0, 2.0, 9.0, 7.0, 8.0]))  # the second is worse throughout
    result = run(write_toy(tmp_path), tmp_path / "run")
    assert [row["best"] for row in rows(tmp_path / "run", "eval")] == [True, False, True, True, False]
    assert checkpoint.load(tmp_path / "run/checkpoints/best").step == 20
    assert result.heldout_loss == 7.0


def test_a_checkpoint_brings_every_counter_back():
    before = Progress(
        step=31, stage=1, stage_step=7, epoch=2, epoch_step=3, best=1.25, best_step=28, checks_without_progress=2,
        num_skipped=4, scaler=LossScaler(512.0, 17, 100), watches={"collapse": {"kl_factor": 0.25}},
    )  # fmt: skip
    assert Progress.from_values(json.loads(json.dumps(before.to_values()))) == before


def test_the_scale_of_fp16_goes_on_where_it_was(tmp_path, monkeypatch):
    """A scale that starts too high halves in the first steps; a resumed run does not begin with it again."""
    scales, step = list[float](), LOOP.train_step

    def watched(*given: object, **options: object) -> object:
        result = step(*given, **options)
        scaler = options["scaler"]
        if scaler.good_steps == 1:
            scaler.scale /= 2  # as an overflow would
        scales.append(scaler.scale)
        return result

    monkeypatch.setattr(LOOP, "train_step", watched)
    recipe = write_toy(tmp_path, stages=[], precision="fp16", optim={"lr": 0.01, "schedule": "constant"})
    run(recipe, tmp_path / "run", "train.max_steps=3")
    run(recipe, tmp_path / "run", "train.max_steps=6", resume=True)
    assert scales == [2.0**15] * 6


def test_the_old_end_of_a_run_is_not_its_best_when_it_goes_on(tmp_path, monkeypatch):
    recipe = write_toy(
        tmp_path, stages=[], optim={"lr": 0.01, "schedule": "constant"}, train={"weights": "last", "max_epochs": 9}
    )
    run(recipe, tmp_path / "run", "train.max_steps=3")
    best, seen, save = tmp_path / "run/checkpoints/best", list[bool](), LOOP.save_checkpoint

    def watched(*given: object, **options: object) -> object:
        seen.append(best.exists())
        return save(*given, **options)

    monkeypatch.setattr(LOOP, "save_checkpoint", watched)
    run(recipe, tmp_path / "run", "train.max_steps=6", resume=True)
    assert seen == [False] * len(seen)
    assert seen
    assert same_tensors(weights(tmp_path / "run"), weights(tmp_path / "run", "step-00000006"))


def test_rows_are_on_the_device_before_the_checkpoint_that_counts_on_them(tmp_path, monkeypatch):
    recipe, done, flush = write_toy(tmp_path, stages=[]), list[tuple[str, str]](), os.fsync

    def fsync(descriptor: int) -> None:
        flush(descriptor)
        done.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(disk, "operation", lambda name, path: done.append((name, path.name)))
    run(recipe, tmp_path / "run", "train.max_steps=6")
    saved = [at for at, entry in enumerate(done) if entry[0] == "rename" and entry[1].startswith("step-")]
    assert len(saved) == len(events(tmp_path / "run", "checkpoint")) == 2
    for at in saved:
        for file in ("metrics.jsonl", "timing.jsonl"):
            written = max(i for i in range(at) if done[i] == ("write", file))
            assert done[written:at].count(("fsync", file)) >= 2  # announced to the hook, and done
