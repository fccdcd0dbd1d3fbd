"""`unpad drill` as a whole: it measures every family, judges, leaves nothing behind and ends with its code."""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.families import images, patients, questions, text
from tests.helpers.shell import Shell
from tests.helpers.toy import write_toy
from unpad.drill import drill as drilling
from unpad.drill import files
from unpad.drill.drill import drill
from unpad.drill.findings import GAP, HEAD, WIDTHS, finding
from unpad.drill.measure import Probed, judge, measure
from unpad.drill.probe import Read, Repeated, Stepped
from unpad.errors import DRILL_FOUND_FAULT, DiskError, RecipeError, SourceError
from unpad.machine.memory import MemoryLimit
from unpad.processes import children
from unpad.storage import RunLock
from unpad.terminal.finding import Finding
from unpad.training.memory import return_freed_memory

torch.set_num_threads(1)  # a forked child must not wait for threads that did not come along

GIB = 1 << 30
PLENTY = MemoryLimit(1 << 50, "free")
READ = Read(1.0, "fp32", False, ("train",), 100, 4 * GIB, 12 * GIB, 17 * GIB, 0.5)
STEPPED = Stepped(20 * GIB, 0.1, 12 * GIB, 12, 21 * GIB)
REPEATED = Repeated(("a", "a", "a"), "cpu")


@pytest.fixture(autouse=True)
def _forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of this process, which has imported everything already."""
    monkeypatch.setattr(children, "CONTEXT", get_context("fork"))
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "BLOCK", 1 << 16)
    monkeypatch.setattr(files, "RENAMES", 60)


# --------------------------------------------------------------------------- measured


@pytest.mark.promise("drill.space")
@pytest.mark.slow
@pytest.mark.parametrize("family", [text, images, questions, patients], ids=["text", "images", "vqa", "events"])
def test_every_family_is_measured(tmp_path: Path, family: Callable[..., Path]) -> None:
    quick: dict[str, Any] = {"train": {"threads": 1, "max_epochs": 2}}
    if family is patients:
        quick["losses"] = None  # all heads are trained, and have a state of the optimizer
    gc.collect()
    return_freed_memory()  # of other tests, which children would begin with, and some of them without
    found = measure(family(tmp_path / "data", **quick), tmp_path, PLENTY, 120.0)
    assert (found.why, found.failed, found.fits) == ("", False, True)
    assert found.read is not None
    assert found.stepped is not None
    assert found.repeated is not None
    assert found.read.private is (family is patients)
    assert found.read.checkpoint_bytes == pytest.approx(found.stepped.checkpoint_bytes, rel=0.02)
    assert found.read.least_memory < found.stepped.peak_bytes < 4 * GIB
    assert found.stepped.predicted_bytes == pytest.approx(found.stepped.peak_bytes, rel=0.3)
    assert len(set(found.repeated.digests)) == 1
    verdicts = {one.code: one.severity for one in judge(found, tmp_path, 2, 0)}
    assert set(verdicts.values()) == {"ok"}, verdicts


@pytest.mark.slow
def test_a_recipe_that_cannot_be_trained_is_refused_as_training_does(tmp_path: Path) -> None:
    recipe = write_toy(tmp_path / "data")
    (tmp_path / "data" / "texts.jsonl").unlink()
    with pytest.raises(SourceError, match=r"texts\.jsonl"):
        measure(recipe, tmp_path, PLENTY, 120.0)


@pytest.mark.slow
def test_weights_that_do_not_fit_are_not_tried_and_slow_data_is_given_up(tmp_path: Path) -> None:
    recipe = write_toy(tmp_path / "data")
    found = measure(recipe, tmp_path, MemoryLimit(1000, "left to the container"), 120.0)
    assert (found.stepped, found.fits) == (None, False)
    memory = next(one for one in judge(found, tmp_path, 2, 0) if one.code == "memory")
    assert (memory.severity, "left to the container" in memory.values["measured"]) == ("fault", True)
    assert measure(recipe, tmp_path, PLENTY, 0.0).why == "it took longer than 0 s"


@pytest.mark.promise("drill.space")
@pytest.mark.parametrize(
    ("found", "check", "verdict", "says"),
    [
        (Probed(PLENTY, READ, STEPPED, Repeated(("a", "b", "a"), "cpu")), "same step", "fault", "2 results"),
        (Probed(PLENTY, READ, STEPPED, Repeated(("a", "b", "a"), "cuda")), "same step", "warning", "2 results"),
        (Probed(PLENTY, READ, STEPPED, None, "it took longer"), "same step", "warning", "it took longer"),
        (
            Probed(MemoryLimit(19 * GIB, "free"), READ, STEPPED, REPEATED),
            "memory",
            "fault",
            "a step and a checkpoint",
        ),
        (Probed(MemoryLimit(22 * GIB, "free"), READ, STEPPED, REPEATED), "memory", "warning", "22.0 GiB free"),
        (Probed(PLENTY, READ, STEPPED, REPEATED), "memory", "ok", "a step and a checkpoint, 21.0 GiB predicted"),
        (Probed(MemoryLimit(10 * GIB, "free"), READ), "memory", "fault", "weights and optimizer"),
        (Probed(PLENTY, READ, why="it took longer"), "memory", "warning", "17.0 GiB for weights and optimizer"),
        (Probed(PLENTY, READ, why="the system killed it", failed=True), "memory", "fault", "the system killed it"),
        (Probed(PLENTY, None, why="it took longer"), "memory", "warning", "not known"),
        (Probed(PLENTY, None, why="it took longer"), "space", "warning", "not known"),
    ],
)
def test_what_was_measured_is_judged(tmp_path: Path, found: Probed, check: str, verdict: str, says: str) -> None:
    judged = {one.code: one for one in judge(found, tmp_path, 2, 0)}
    assert judged[check].severity == verdict
    assert says in judged[check].values["measured"]


# --------------------------------------------------------------------------- the whole


def rows_of_the_page() -> list[list[str]]:
    """Cells of the table that docs/drill.md shows, row by row."""
    page = (Path(__file__).parents[2] / "docs" / "drill.md").read_text(encoding="utf-8")
    table = page.partition(
        "\n" + "  ".join(f"{name:{size}}" for name, size in zip(HEAD, WIDTHS, strict=True)).rstrip()
    )[2]
    starts, rows = [sum(WIDTHS[:i]) + GAP * i for i in range(len(WIDTHS))], list[list[str]]()
    for line in table.partition("\n\n")[0].splitlines()[1:]:
        parts = [line[at : at + size].strip() for at, size in zip(starts, WIDTHS, strict=True)]
        if parts[1]:
            rows.append(parts)
        else:
            rows[-1] = [f"{all_of_it} {more}".strip() for all_of_it, more in zip(rows[-1], parts, strict=True)]
    return rows


def without_figures(text: str) -> str:
    return re.sub(r"(?<=[a-z])s\b", "", re.sub(r"-?\d[\d.,:-]*|[KMG]iB", "~", text))


def assert_as_on_the_page(findings: Sequence[Finding]) -> None:
    """The page has the checks, and what it says of those that are sound; figures and plurals may differ."""
    shown = rows_of_the_page()
    assert [row[0] for row in shown] == [one.code for one in findings]
    for row, found in zip(shown, findings, strict=True):
        if (row[1], found.severity) == ("ok", "ok") and found.code != "file system":
            shown_words, words = " ".join(row[2:]), " ".join(map(str, found.values.values()))
            assert without_figures(shown_words) == without_figures(words)


@pytest.mark.promise("drill.check")
@pytest.mark.slow
def test_a_run_is_drilled_beside_itself_and_only_read(unpad: Shell, tmp_path: Path) -> None:
    recipe = write_toy(tmp_path / "data", train={"threads": 1})
    assert unpad("train", recipe, "train.max_steps=4", "--out", "runs/mine").code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    with RunLock(tmp_path / "runs" / "mine"):  # as while it trains
        told = drill("mine", minutes=2, most_stops=2)
    assert told.passed, told.lines()
    assert told.facts["kills"]["kills"] + told.facts["kills"]["stops"] == 2
    assert [one.code for one in told.findings][-3:] == ["kill, resume", "steady clock", "date"]
    assert told.notes == ("killed in its first 4 steps",)
    assert_as_on_the_page(told.findings)
    lock = tmp_path / "runs" / "mine" / "run.lock"
    assert {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()} == before | {
        lock: b""
    }


def with_parts(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    """Stand-ins for the checks that take time."""
    monkeypatch.setattr(drilling, "_disk", lambda work: iter(findings))
    monkeypatch.setattr(drilling, "measure", lambda *_: Probed(PLENTY, READ, STEPPED, REPEATED))
    monkeypatch.setattr(drilling, "judge", lambda *_: iter(()))
    monkeypatch.setattr(drilling, "_kill", lambda *_: None)


@pytest.mark.promise("drill.check")
@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("warning", 0), ("fault", DRILL_FOUND_FAULT)])
def test_the_exit_code_is_14_for_a_fault_and_0_for_a_warning(
    unpad: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: Any, code: int
) -> None:
    with_parts(monkeypatch, finding("lock", verdict, "given to a second process", "choose another disk"))
    told = unpad("drill", "zh_chat", "optim.lr=1e-3", "--out", tmp_path / "new" / "run")
    assert (told.code, told.err) == (code, "")
    assert "lock            " + verdict in told.out
    shown = unpad("drill", "zh_chat", "--json")
    assert shown.code == code
    assert json.loads(shown.out)["passed"] is (code == 0)
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "new").exists()


def test_a_subject_that_is_neither_run_nor_recipe_names_the_nearest(
    unpad: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_parts(monkeypatch)
    told = unpad("drill", "zh_chta")
    assert (told.code, "did you mean zh_chat or chat?" in told.err) == (RecipeError.exit_code, True)
    (tmp_path / "runs" / "zh_chta").mkdir(parents=True)
    (tmp_path / "runs" / "zh_chta" / "recipe.yaml").write_text("{}\n")
    assert unpad("drill", "zh_chta").code == 0
    assert os.listdir(tmp_path / "runs") == ["zh_chta"]


def test_a_training_that_fails_unkilled_is_a_fault_and_an_error_of_the_user_his(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = drilling.Calm(tmp_path, 1.0, 0.5, 1, "ValueError: odd", None)
    assert drilling._failed(calm).severity == "fault"
    slow = drilling.Calm(tmp_path, 50.0, 0.5, None, "", None)
    assert drilling._failed(slow).severity == "warning"
    full = drilling._failed(drilling.Calm(tmp_path, 1.0, 0.5, 6, "", DiskError("the disk has too little space")))
    assert (full.severity, full.values["measured"]) == ("fault", "the disk has too little space")
    with pytest.raises(SourceError):
        drilling._failed(drilling.Calm(tmp_path, 1.0, 0.5, 3, "", SourceError("gone")))
