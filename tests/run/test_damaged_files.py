"""Damaged files of a run are told of by name, and never end in another exception or in waiting."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from tests.helpers.damage import DEEP, damage, damages, mutations
from tests.helpers.families import STEPS, Family, Finished
from tests.helpers.toy import LOOP, events, run
from unpad import storage
from unpad.data.pictures.album import seen_pictures
from unpad.data.tokens.tokenizer import TOKENIZER
from unpad.errors import CheckpointError, DiskError, SourceError, UnpadError
from unpad.inference.loaded import load
from unpad.run import checkpoint
from unpad.run.checkpoint import State
from unpad.run.compare import compare, summarize
from unpad.run.folder import read_command
from unpad.run.report.page import write_report
from unpad.run.report.section import POLICY
from unpad.training import progress


@pytest.fixture(scope="module")
def text(finished: Finished) -> Family:
    return finished("text")


@pytest.fixture
def copy(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A copy of the finished run of a family, with evaluations."""

    def made(family: str) -> Path:
        shutil.rmtree(tmp_path / family, ignore_errors=True)
        folder = shutil.copytree(finished(family).run, tmp_path / family)
        monkeypatch.setenv("UNPAD_CACHE", str(finished(family).cache))
        if family == "images":
            evaluation = {"family": "images", "classes": ["a", "b"], "confusion": [[1, 2], [3, 4]], "part": "valid"}
            bins = [{"confidence": 0.5, "accuracy": 0.5}]
            kept = json.dumps({**evaluation, "calibration": bins, "best_of": 2})
            (folder / "evaluation.json").write_text(kept)
        if family == "text":
            metrics = {"loss": {"value": 1.0, "low": 0.5, "high": None, "num": 3, "reason": "few", "part": "valid"}}
            line = json.dumps({"time": "2026-01-01T00:00:00", "step": STEPS, "metrics": metrics, "lines": ["a"]})
            (folder / "evaluations.jsonl").write_text(line + "\n")
        return folder

    return made


def use(folder: Path) -> None:
    """Open a run, and read what it keeps of its data."""
    loaded = load(folder)
    seen_pictures(loaded.files)
    if TOKENIZER in loaded.files:
        assert loaded.tokenizer.vocab_size
        assert loaded.num_system is None or loaded.num_system >= 0


READERS: dict[str, tuple[Callable[[Path], object], ...]] = {
    "metrics.jsonl": (summarize, write_report), "timing.jsonl": (write_report,), "log.jsonl": (summarize, write_report),
    "run.json": (summarize, read_command), "samples.jsonl": (write_report,),
    "evaluation.json": (write_report,), "evaluations.jsonl": (write_report,), "classes.json": (use,),
    "pictures.json": (use,), "events.json": (use,), "tokenizer.json": (use,), "run.lock": (summarize,),
}  # fmt: skip
FAMILIES = {
    "text": ("metrics.jsonl", "timing.jsonl", "log.jsonl", "run.json", "samples.jsonl", "evaluations.jsonl",
             "tokenizer.json", "run.lock"),
    "images": ("classes.json", "pictures.json", "evaluation.json"),
    "patients": ("metrics.jsonl", "events.json"),
}  # fmt: skip


OPTIONAL = ("samples.jsonl", "evaluation.json", "evaluations.jsonl", "run.lock")
# A file may lose rows or entries, and be sound.
OF_OTHERS = ("has not taken a step yet", "in the model")


def ending(reader: Callable[[Path], object], folder: Path) -> str:
    """Words of the error that a reader ends with, "" without one."""
    try:
        reader(folder)
    except UnpadError as error:
        return str(error)
    return ""


@pytest.mark.promise("input.run-files")
@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in FAMILIES.items() for name in names])
def test_a_damaged_file_is_used_or_named(copy, family, name):
    folder = copy(family)
    said = set[str]()
    for what, content in damages(folder / name):
        damage(folder / name, content)
        for reader in READERS[name]:
            told = ending(reader, folder)
            assert not told or name in told or any(words in told for words in OF_OTHERS), f"{name} {what}: {told}"
            said.add(told)
    assert len(said) > (0 if name in OPTIONAL else 5)


@pytest.mark.promise("input.run-files")
@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("run.json", {"recipe": "x", "overrides": ["a", 3]}, '"overrides[1]": 3 is not a text'),
        ("classes.json", {"classes": ["a", "a"]}, "names a class twice"),
        ("classes.json", {}, '"classes" is missing'),
        ("pictures.json", {"modes": {"RGB": -1}, "width": [1, 2], "height": [1, 2]}, '"modes.RGB": must be greater'),
    ],
)
def test_the_file_the_field_and_the_place_are_named(copy, name, wrong, said):
    folder = copy("images")
    (folder / name).write_text(json.dumps(wrong))
    with pytest.raises(CheckpointError) as caught:
        read_command(folder) if name == "run.json" else use(folder)
    assert caught.value.what.startswith(f"{name} cannot be read: ")
    assert said in caught.value.what
    assert caught.value.where.endswith(name)
    assert caught.value.fix


@pytest.mark.promise("input.run-files")
def test_a_damaged_line_is_named_with_its_field(copy):
    folder = copy("text")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), "loss": [1]})
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(SourceError) as caught:
        write_report(folder)
    assert caught.value.what == 'this line is damaged: "loss" should be a number, got a list'
    assert caught.value.where == f"{folder / 'metrics.jsonl'}:2"


@pytest.mark.promise("input.run-files")
def test_runs_and_compare_go_on_beside_a_damaged_run(copy):
    folder, other = copy("text"), copy("images")
    for path in (folder / "checkpoints").glob("*/state.json"):
        path.write_bytes(DEEP)
    assert compare([str(folder), str(other)], folder / "page.html").measures
    (folder / "log.jsonl").write_text('{"time": "never", "kind": "started"}\n')
    shown = summarize(folder)
    assert (shown.state, shown.step) == ("damaged", 0)
    assert shown.command.startswith("log.jsonl:1: this line is damaged: ")


MARK = '<q a="1">&\'x'


def marked(value: Any, name: str = "") -> Any:
    """A value with markup in place of every text in it and in every name that the run chose."""
    if isinstance(value, str):
        return value if name in ("time", "kind", "light", "picture") else MARK
    if isinstance(value, dict):
        chosen = name in ("values", "metrics", "counts")
        return {f"{MARK}{key}" if chosen else key: marked(one, key) for key, one in value.items()}
    return [marked(one, name) for one in value] if isinstance(value, list) else value


@pytest.mark.promise("input.pages")
@pytest.mark.parametrize(("family", "names"), FAMILIES.items())
def test_no_text_of_any_file_reaches_the_page_as_markup(copy, family, names):
    folder = copy(family)
    num_drawn = 0
    for name in ("recipe.yaml", *names):
        before = (folder / name).read_text()
        if name.endswith(".jsonl"):
            lines = [json.dumps(marked(json.loads(line))) for line in before.splitlines()]
            (folder / name).write_text("\n".join(lines) + "\n")
        elif name.endswith(".json"):
            (folder / name).write_text(json.dumps(marked(json.loads(before))))
        else:
            (folder / name).write_text(f"{before}# {MARK}\n")
        try:
            page = write_report(folder).read_text()
        except SourceError:  # of readings whose names are others now
            continue
        finally:
            (folder / name).write_text(before)
        assert MARK not in page, name
        assert "<q" not in page, name
        assert POLICY in page
        num_drawn += "&lt;q a=&quot;1&quot;&gt;&amp;&#x27;x" in page
    assert num_drawn >= {"text": 5, "images": 2, "patients": 1}[family]


# --------------------------------------------------------------------------- resume


@pytest.mark.promise("input.run-files")
def test_files_that_training_can_do_without_do_not_end_it(text, copy):
    folder = copy("text")
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"time": 5}\n[\n')
    timing = (folder / "timing.jsonl").read_text().splitlines()
    (folder / "timing.jsonl").write_text("\n".join([timing[0], "{}", *timing[1:]]) + "\n")
    for name in ("samples.jsonl", "evaluations.jsonl"):
        (folder / name).write_text("[")
    (folder / "report.html").unlink()
    assert run(text.recipe, folder, "train.max_steps=4", resume=True).step == 4
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines() if line.endswith("}")]
    messages = [entry["message"] for entry in entries if entry.get("kind") in ("warning", "report_skipped")]
    assert "timing.jsonl was damaged in line 2, which is left out" in messages
    assert any('"kind" is missing' in message or '"time"' in message for message in messages)
    assert any("log.jsonl" in message and "delete the line" in message for message in messages)


@pytest.mark.promise("input.run-files")
@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "tokenizer.json", "recipe.yaml"])
def test_files_that_training_needs_end_a_resume_by_name(text, copy, name):
    folder = copy("text")
    (folder / name).write_text("{}\n" + (folder / name).read_text() if name == "metrics.jsonl" else "[")
    with pytest.raises(UnpadError, match=name):
        run(text.recipe, folder, "train.max_steps=4", resume=True)


@pytest.mark.promise("input.run-files")
def test_a_checkpoint_of_somebody_else_is_refused_by_its_field(text, copy):
    folder = copy("text")
    found = checkpoint.load_newest(folder / "checkpoints")
    refused = 0
    for name, values in mutations(found[0].values):
        told = ending(lambda _, values=values: progress.check_values(State(3, {}, values), "a copy"), folder)
        assert not told or "state.json is not that of a training" in told, name
        refused += bool(told)
        if not told:
            progress.Progress.from_values(values["progress"])
    assert refused > 20
    with pytest.raises(CheckpointError, match=r'progress: "step" is 3, and the checkpoint is of step 4'):
        progress.check_values(State(4, {}, found[0].values), "a copy")
    [newest] = sorted((folder / "checkpoints").glob("step-*"))[-1:]
    files = dict(storage.read_folder(newest))
    state: dict[str, Any] = json.loads(files["state.json"])
    held = dict(state["values"]["progress"])
    for field, value, says in [
        ("epoch", "two", r'progress: "epoch": "two" is not a whole number'),
        ("epoch_step", 1000, r'progress: "epoch_step" is 1000 of \d+'),
    ]:
        state["values"]["progress"] = {**held, field: value}
        storage.remove_folder(newest)
        storage.write_folder(newest, {**files, "state.json": json.dumps(state).encode()})
        with pytest.raises(CheckpointError, match=says):
            run(text.recipe, folder, "train.max_steps=4", resume=True)


@pytest.mark.promise("input.run-files")
def test_a_folder_of_checkpoints_that_cannot_be_listed_is_named(copy, monkeypatch):
    folder = copy("text") / "checkpoints"

    def fails(path: Path) -> list[str]:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(checkpoint.os, "listdir", fails)
    with pytest.raises(CheckpointError, match="Input/output error"):
        checkpoint.load_newest(folder)
    with pytest.raises(DiskError, match="Input/output error"):
        checkpoint.remove_old(folder, 3, 1)


@pytest.mark.promise("input.run-files")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread of TensorBoard
def test_a_run_directory_that_is_removed_while_it_trains_ends_the_run(text, tmp_path, monkeypatch):
    monkeypatch.setenv("UNPAD_CACHE", str(text.cache))
    update, num_steps = LOOP.train_step, 0

    def step(*args: object, **options: object) -> object:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2:
            shutil.rmtree(tmp_path / "run")
        return update(*args, **options)

    monkeypatch.setattr(LOOP, "train_step", step)
    with pytest.raises(DiskError, match=r"the folder was renamed, replaced or deleted while") as caught:
        run(text.recipe, tmp_path / "run")
    assert "--resume" in caught.value.fix
    assert num_steps == 2
    assert not (tmp_path / "run").exists(), "nothing comes back in its place"


@pytest.mark.promise("input.tensorboard")
def test_what_tensorboard_cannot_write_does_not_end_a_run(text, tmp_path, monkeypatch):
    """Half of a record is written, and then nothing."""
    real = os.write

    def full(descriptor: int, data: memoryview) -> int:
        if "tfevents" not in os.readlink(f"/proc/self/fd/{descriptor}") or os.fstat(descriptor).st_size < 100:
            return real(descriptor, data)
        if len(data) > 40:
            return real(descriptor, data[:40])
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("UNPAD_CACHE", str(text.cache))
    monkeypatch.setattr(os, "write", full)
    assert run(text.recipe, tmp_path / "run", "train.max_steps=2").step == 2
    [warning] = events(tmp_path / "run", "warning")
    assert warning["message"] == ("TensorBoard's files end here and are incomplete: No space left on device")
    [board] = (tmp_path / "run" / "tensorboard").iterdir()
    assert [event.step for event in EventFileLoader(str(board)).Load()] == [0, 1]
