import csv
import json
import math
import os
import re
from io import StringIO
from mmap import mmap
from pathlib import Path

import pytest
from rich.console import Console

from tests.helpers.run_folders import STEPS_PER_EPOCH, record
from unpad.errors import DiskError
from unpad.machine import peak_memory, process_memory
from unpad.run.monitor import COLUMNS, Monitor, perplexity
from unpad.run.report.history import load_metrics, read_rows
from unpad.run.timers import Timers
from unpad.storage import disk


def monitor(folder: Path, console: Console | None = None, **changes: object) -> Monitor:
    values = {"log_every": 5, "grad_norm_warning": 10.0, "total_steps": 20, "verbose": False} | changes
    return Monitor(folder, console=console or Console(quiet=True), **values)


def train(run: Monitor, first: int, last: int) -> None:
    for step in range(first, last + 1):
        row = record(step)
        run.step(row, seconds=0.1, waited=0.01, processor=0.09, memory_bytes=500_000_000)
        if step % STEPS_PER_EPOCH == 0:
            run.evaluation(step, row.stage, {"loss": row.loss + 0.1, "bits_per_char": 2.0}, 300, best=True)
            run.epoch(step, row.stage, row.epoch)


def lines(folder: Path, name: str) -> list[dict]:
    return list(read_rows(folder / name))


def test_killed_and_resumed_leaves_the_same_bytes(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    run = monitor(whole)
    train(run, 1, 20)
    run.close()

    train(monitor(killed), 1, 14)  # dies without closing, behind its checkpoint of step 8
    with (killed / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 15, "st')
    again = monitor(killed)
    again.resume(8)
    train(again, 9, 20)
    again.close()
    for name in ("metrics.jsonl", "metrics.csv"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    assert [row["step"] for row in lines(killed, "timing.jsonl")] == list(range(1, 21))


@pytest.mark.parametrize("done", ["nothing", "evaluation", "both"])
def test_rows_of_the_checkpoint_step_are_written_once(tmp_path, done):
    run = monitor(tmp_path)
    run.step(record(1), seconds=0.1, waited=0, processor=0.1, memory_bytes=1)
    if done != "nothing":
        run.evaluation(1, "pretrain", {"loss": 2.0}, 10, best=True)
    if done == "both":
        run.epoch(1, "pretrain", 0)
    again = monitor(tmp_path)
    again.resume(1)
    again.evaluation(1, "pretrain", {"loss": 2.0}, 10, best=True)
    again.epoch(1, "pretrain", 0)
    again.close()
    assert [row["kind"] for row in load_metrics(tmp_path)] == ["train", "eval", "epoch"]


@pytest.mark.promise("run.metrics")
def test_epoch_row_weighs_steps_by_their_targets(tmp_path):
    run = monitor(tmp_path)
    run.step(record(1, loss=1.0, targets=100), seconds=1, waited=0, processor=1, memory_bytes=1)
    run.step(record(2, loss=math.nan, targets=100, skipped=True), seconds=1, waited=0, processor=1, memory_bytes=1)
    run.step(record(3, loss=3.0, targets=300), seconds=1, waited=0, processor=1, memory_bytes=1)
    run.evaluation(3, "pretrain", {"loss": 1.5}, 50, best=False)
    run.epoch(3, "pretrain", 0)
    run.close()
    epoch = load_metrics(tmp_path)[-1]
    assert epoch["kind"] == "epoch"
    assert epoch["loss"] == 2.5
    assert epoch["perplexity"] == pytest.approx(math.exp(2.5))
    assert epoch["heldout_loss"] == 1.5
    assert epoch["targets"] == 400


@pytest.mark.promise("run.metrics")
def test_columns_are_the_same_in_every_row_of_both_files(tmp_path):
    run = monitor(tmp_path)
    train(run, 1, 10)
    run.close()
    assert {tuple(row) for row in lines(tmp_path, "metrics.jsonl")} == {COLUMNS}
    with (tmp_path / "metrics.csv").open(newline="") as file:
        header, *table = csv.reader(file)
    assert tuple(header) == COLUMNS
    rows = load_metrics(tmp_path)
    assert len(table) == len(rows) == 14
    for cells, row in zip(table, rows, strict=True):
        shown = dict(zip(header, cells, strict=True))
        assert float(shown["loss"]) == row["loss"]
        assert json.loads(shown["values"]) == row["values"]
    first = rows[0]
    assert first["pad_share"] == 1 - first["tokens"] / first["padded_tokens"]
    assert first["perplexity"] == math.exp(first["loss"])


def test_overflow_and_nan_are_written_not_raised(tmp_path):
    run = monitor(tmp_path)
    run.step(record(1, loss=1e4), seconds=0.1, waited=0, processor=0.1, memory_bytes=1)
    lost = record(2, loss=math.nan, grad_norm=math.inf, skipped=True)
    run.step(lost, seconds=0.0, waited=0, processor=0.0, memory_bytes=1)
    run.evaluation(2, "pretrain", {"loss": 1e5}, 10, best=False)
    run.close()
    assert '"perplexity": "inf"' in (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    rows = load_metrics(tmp_path)
    assert rows[0]["perplexity"] == math.inf
    assert math.isnan(rows[1]["loss"])
    assert (tmp_path / "report.html").is_file()
    assert perplexity(math.log(7)) == pytest.approx(7)


def test_times_stay_out_of_the_metrics_and_waiting_has_its_share_of_all_seconds(tmp_path):
    run = monitor(tmp_path)
    assert run.waited_share == 0
    run.step(record(1), seconds=0.5, waited=0.125, processor=0.5, memory_bytes=123)
    run.step(record(2), seconds=1.5, waited=0.0, processor=1.5, memory_bytes=1)
    run.close()
    assert run.waited_share == 0.0625
    row = lines(tmp_path, "timing.jsonl")[0]
    assert (row["seconds"], row["waited"], row["memory_bytes"]) == (0.5, 0.125, 123)
    assert row["waited_share"] == 0.25
    assert row["tokens_per_second"] == 2001 / 0.5
    assert not set(row) & set(COLUMNS) - {"step", "stage"}


@pytest.mark.promise("run.lines")
def test_plain_line_holds_recomputable_numbers(tmp_path):
    with (tmp_path / "out").open("w") as out:
        run = monitor(tmp_path, Console(file=out))
        run.start(["训练 2 stages", "escape \x1b[31m and [bold]markup[/bold]"])
        run.stage("tune", 400)
        for step in range(116, 121):
            changes = {
                "loss": 2.345, "lr": 9.1e-4, "grad_norm": 0.83, "tokens": 1234, "padded_tokens": 1234, "sequences": 61,
            }  # fmt: skip
            now = record(step, stage="tune", epoch=3, **changes)
            run.step(now, seconds=0.1, waited=0.002, processor=0.1, memory_bytes=610_000_000)
        run.evaluation(120, "tune", {"loss": math.log(8)}, 10, best=True, mode="hard removal; in training soft")
        run.close()
    assert (tmp_path / "out").read_text().splitlines() == [
        "训练 2 stages",
        "escape \\x1b[31m and [bold]markup[/bold]",
        "step 120/400  tune epoch 3  loss 2.345  ppl 10.43  lr 9.1e-04  grad 0.83  12,340 tok/s  610 seq/s  "
        "pad 0.0%  wait 2.0%  mem 0.61 GB, peak 0.61  left 28s",
        "held out at step 120  tune  loss 2.079  perplexity 8  (hard removal; in training soft)  best so far",
    ]


@pytest.mark.promise("memory.peak")
def test_the_peak_of_memory_runs_along(tmp_path):
    with (tmp_path / "out").open("w") as out:
        run = monitor(tmp_path, Console(file=out), log_every=1)
        for step, (memory, peak) in enumerate([(5, 0), (3, 9), (4, 6)], start=1):
            used = {"memory_bytes": memory * 10**9, "peak_bytes": peak * 10**9}
            run.step(record(step), seconds=1, waited=0, processor=1, **used)
        run.close()
    assert [row["peak_bytes"] // 10**9 for row in lines(tmp_path, "timing.jsonl")] == [5, 9, 9]
    assert "mem 4.00 GB, peak 9.00" in (tmp_path / "out").read_text()
    assert "9.00 GB" in (tmp_path / "report.html").read_text()


@pytest.mark.promise("run.lines")
def test_time_left_counts_what_evaluations_add(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("unpad.run.screen.perf_counter", lambda: clock[0])
    with (tmp_path / "out").open("w") as out:
        run = monitor(tmp_path, Console(file=out), log_every=1, total_steps=1001)
        run.stage("pretrain", 1001)
        clock[0] += 0.5  # nine tenths of the time so far are not steps
        run.step(record(1), seconds=0.05, waited=0, processor=0.05, memory_bytes=1)
        run.close()
    line = (tmp_path / "out").read_text()
    minutes, seconds = line.split("left ")[1].split()[0].rstrip("s").split("m")
    assert int(minutes) * 60 + int(seconds) >= 500  # 1000 steps of 0.5 s, though a step itself takes 0.05 s
    assert "40,020 tok/s" in line  # speed leaves it out


@pytest.mark.promise("train.gradient-norm")
def test_large_gradient_norm_is_marked_and_warned_of_once_in_100_steps(tmp_path):
    with (tmp_path / "out").open("w") as out:
        run = monitor(tmp_path, Console(file=out), log_every=1, total_steps=None)
        for step in range(1, 151):
            run.step(record(step, grad_norm=11.0), seconds=0.1, waited=0, processor=0.1, memory_bytes=1)
        run.close()
    warnings = [event for event in lines(tmp_path, "log.jsonl") if event["kind"] == "warning"]
    assert [(event["step"], event["num_steps_so_far"]) for event in warnings] == [(1, 1), (101, 101)]
    text = (tmp_path / "out").read_text()
    assert text.count("grad 11.00!") == 150
    assert "left" not in text


def test_live_bar_shows_the_step_and_gives_the_terminal_back(tmp_path):
    with (tmp_path / "out").open("w") as out:
        run = monitor(tmp_path, Console(file=out, force_terminal=True, width=80))
        run.start([])
        train(run, 1, 20)
        run.log("checkpoint", step=20)
        run.close()
        run.close()
    text = (tmp_path / "out").read_text()
    assert "20/20" in text
    figures = [line for line in re.split(r"[\r\n]|\x1b\[[^m]*[A-Zl]", text) if "tok/s" in line]
    assert re.search(r"wait \d+\.\d%$", figures[-1]), "whole figures at 80 columns"
    assert "held out at step 20" in text
    assert "checkpoint  step 20" in text
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is back
    assert [event["kind"] for event in lines(tmp_path, "log.jsonl")] == ["checkpoint"]


@pytest.mark.parametrize("terminal", [True, False])
def test_training_goes_on_when_stdout_is_closed(tmp_path, monkeypatch, terminal):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        run = monitor(tmp_path, Console(force_terminal=terminal), log_every=1)
        run.start(["begin"])
        train(run, 1, 20)
        run.close()
    assert [row["step"] for row in lines(tmp_path, "timing.jsonl")] == list(range(1, 21))


def test_full_screen_device_does_not_stop_training(tmp_path):
    with open("/dev/full", "w", buffering=1) as full:
        run = monitor(tmp_path, Console(file=full), log_every=1)
        run.start(["begin"])
        train(run, 1, 5)
        run.close()
        assert len(load_metrics(tmp_path)) == 7
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


@pytest.mark.promise("input.tensorboard")
def test_tensorboard_hides_what_a_kill_lost(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(monitor(tmp_path), 1, 14)
    again = monitor(tmp_path)
    again.resume(8)
    train(again, 9, 20)
    again.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [event.step for event in read.Scalars("train/loss")] == list(range(1, 21))
    assert [event.value for event in read.Scalars("train/loss")] == pytest.approx(
        [row["loss"] for row in load_metrics(tmp_path) if row["kind"] == "train"]
    )
    assert {"train/lr", "train/grad_norm", "train/tokens_per_second", "heldout/loss"} <= set(read.Tags()["scalars"])


@pytest.mark.promise("input.run-directory")
def test_a_report_that_cannot_be_written_at_the_end_leaves_the_log_open(tmp_path, monkeypatch):
    run = monitor(tmp_path)
    train(run, 1, 3)

    def full(*_: object) -> None:
        raise DiskError("the disk is full")

    monkeypatch.setattr("unpad.run.report.page.write_report", full)
    with pytest.raises(DiskError, match="the disk is full"):
        run.close()
    run.log("stopped", message="the disk is full")
    for _ in range(2):
        run.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        run.log("stopped")


@pytest.mark.promise("run.timers")
def test_timers_sum_to_the_wall_time_and_nested_parts_count_once(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("unpad.run.timers.perf_counter", lambda: clock[0])
    timers = Timers()
    with timers("train"):
        clock[0] += 5
        with timers("validate"):
            clock[0] += 3
    clock[0] += 2
    with timers("train"):
        clock[0] += 1
    rows = timers.summary(clock[0] - 100)
    assert [(row["name"], row["seconds"]) for row in rows] == [("train", 6), ("validate", 3), ("other", 2)]
    assert [row["share"] for row in rows] == pytest.approx([6 / 11, 3 / 11, 2 / 11])


@pytest.mark.promise("memory.peak")
def test_memory_follows_what_is_allocated():
    before = process_memory()
    block = mmap(-1, 64_000_000)  # not of the heap, which may have as much to spare
    block[::4096] = bytes(len(block[::4096]))
    assert process_memory() - before > 50_000_000
    block.close()
    assert peak_memory() >= before + 50_000_000


@pytest.mark.promise("run.verbose")
def test_verbose_shows_shapes_and_events(tmp_path):
    screen = StringIO()
    run = monitor(tmp_path, verbose=True, log_every=100, console=Console(file=screen, width=200))
    run.step(record(1), seconds=0.1, waited=0, processor=0.1, memory_bytes=1)
    run.log("checkpoint", step=1, path="step-00000001")
    run.close()
    assert "micros 1  tokens 2001/2100" in screen.getvalue()
    assert "step-00000001" in screen.getvalue()


def test_a_run_that_is_over_has_flushed_its_logs(tmp_path, monkeypatch):
    """No resume mends what a power cut leaves of them."""
    last: dict[str, str] = {}
    monkeypatch.setattr(disk, "operation", lambda name, path: last.update({path.name: name}))
    run = monitor(tmp_path)
    train(run, 1, 2)
    run.log("note", message="the last entry")
    assert last["log.jsonl"] == "write"
    run.close()
    assert {last[name] for name in ("metrics.jsonl", "timing.jsonl", "log.jsonl")} == {"fsync"}


@pytest.mark.promise("run.power-cut")
def test_lines_of_the_log_that_a_power_cut_has_damaged_are_left_out_and_named(tmp_path):
    run = monitor(tmp_path)
    run.log("started")
    run.close()
    log = tmp_path / "log.jsonl"
    log.write_bytes(log.read_bytes() + b"\0" * 40 + b"\n" + log.read_bytes().splitlines(keepends=True)[0])
    run = monitor(tmp_path)
    run.close()
    entries = lines(tmp_path, "log.jsonl")
    assert [entry["kind"] for entry in entries if entry["kind"] != "report_skipped"] == ["started"] * 2 + ["warning"]
    assert "log.jsonl was damaged in line 3" in next(e["message"] for e in entries if e["kind"] == "warning")


@pytest.mark.promise("vqa.discriminator")
@pytest.mark.parametrize(("loss", "warnings"), [(1.386, 1), (1.2, 0)])
def test_a_discriminator_at_chance_is_said(tmp_path, loss, warnings):
    run = monitor(tmp_path)
    for step in range(1, 151):
        row = record(step, terms={"nll": 1.0, "discriminator": loss})
        run.step(row, seconds=0.1, waited=0.01, processor=0.09, memory_bytes=500_000_000)
    run.close()
    assert sum("at chance" in row.get("message", "") for row in lines(tmp_path, "log.jsonl")) == warnings
