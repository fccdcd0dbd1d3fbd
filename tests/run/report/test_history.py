"""The log of a run has one place; runs of earlier versions keep theirs."""

import fcntl
import json
from itertools import pairwise
from typing import Any

import pytest

from tests.helpers.toy import run, write_toy
from unpad.run.report import history
from unpad.run.report.page import write_report
from unpad.storage import LOCK, RunLock


def test_a_run_is_killed_unless_its_process_holds_the_lock_whoever_else_looks(tmp_path):
    log = [{"kind": "started"}]
    assert history.run_state(tmp_path, log) == "killed", "before there is a lock"
    with RunLock(tmp_path):
        assert history.run_state(tmp_path, log) == "running"
        assert history.run_state(tmp_path, [*log, {"kind": "finished"}]) == "finished"
    limited = [*log, {"kind": "time_limit"}, {"kind": "finished"}]
    assert history.run_state(tmp_path, limited) == "stopped"
    assert history.run_state(tmp_path, [*limited, {"kind": "resumed"}, {"kind": "finished"}]) == "finished"
    with (tmp_path / LOCK).open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)  # another reader of the state
        assert history.run_state(tmp_path, log) == "killed"


def test_a_run_whose_recipe_is_of_another_version_still_has_a_report(tmp_path):
    folder = tmp_path / "run"
    run(write_toy(tmp_path / "toy"), folder, "train.max_steps=2")
    assert "Held-out perplexity" in write_report(folder).read_text()
    (folder / "evaluation.json").write_text(json.dumps({"family": "events", "counts": {}}))
    for text in ("model: {kind: of_the_future}", "no_such_section: 3", ": : :", ""):
        (folder / "recipe.yaml").write_text(text)
        page = write_report(folder).read_text()
        assert text in page
        assert "Held-out patients" not in page
    (folder / "recipe.yaml").unlink()
    assert "There is no recipe.yaml" in write_report(folder).read_text()


def test_five_gaps_are_named_and_the_others_counted():
    gaps = [(step, step + step % 2) for step in range(10, 70, 11)]
    five = "metrics.jsonl lacks steps 10, 21 to 22, 32, 43 to 44, 54"
    assert history.describe_gaps("metrics.jsonl", gaps[:5]).startswith(f"{five}: ")
    assert history.describe_gaps("metrics.jsonl", gaps).startswith(f"{five} and 1 more gap: ")


NUMBERS = dict.fromkeys(history.STEP_NUMBERS, 1.5) | {"step": 3}
FIELDS: dict[str, dict[str, Any]] = {
    "train": {**NUMBERS, "epoch": 1},
    "eval": {"values": {}, "epoch": None, "loss": 1.0, "perplexity": 2.0, "targets": 9, "best": True},
    "epoch": {},
    "latent": {"values": {}},
}


WRONG: dict[str, tuple[object, ...]] = {
    "step": (None, "3", 3.0, True), "stage": (None, 3), "kind": (None, 3), "values": (None, [], "text"),
    **{name: (None, [], "text") for name in history.STEP_NUMBERS[1:]},
}  # fmt: skip


@pytest.mark.parametrize("kind", FIELDS)
def test_a_row_of_the_metrics_has_every_field_that_its_kind_is_read_by(kind):
    row = {"step": 3, "stage": "tune", "kind": kind, **FIELDS[kind]}
    assert not history.metric_fault(row)
    assert not history.metric_fault({**row, "more": None})
    for name in row:
        assert history.metric_fault({key: value for key, value in row.items() if key != name}), name
    for name in row if kind == "train" else row.keys() & {"step", "stage", "kind", "values"}:
        assert all(history.metric_fault({**row, name: wrong}) for wrong in WRONG.get(name, ())), name
    if kind == "train":
        assert not any(history.metric_fault({**row, "loss": value}) for value in (3, "inf", "-inf", "nan"))


def test_a_row_of_the_times_has_every_number():
    row = dict.fromkeys(history.TIME_NUMBERS, 0.5) | {"step": 3}
    assert not history.timing_fault(row)
    assert all(history.timing_fault({key: value for key, value in row.items() if key != name}) for name in row)
    assert all(history.timing_fault({**row, name: "text"}) for name in row)
    assert history.timing_fault({**row, "step": 3.0})


def test_steps_that_are_missing_are_those_that_are_not_there():
    for bits in range(2**6):
        known = [step for step in range(1, 7) if bits >> (step - 1) & 1]
        for last in range(7):
            gaps = history.missing_steps([*known[::-1], *known], last)
            spread = [step for first, end in gaps for step in range(first, end + 1)]
            assert spread == [step for step in range(1, last + 1) if step not in known]
            assert all(end + 1 < first for (_, end), (first, _) in pairwise(gaps))
