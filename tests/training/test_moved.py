"""Runs whose directory is renamed, replaced or mixed with another while they train, and between two trainings."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.toy import LOOP, events, rows, run, write_toy
from unpad.errors import DiskError, ForeignCheckpointError
from unpad.evaluation import run as evaluation
from unpad.run import checkpoint
from unpad.run.folder import COMMAND

pytestmark = pytest.mark.promise("input.run-directory")

STEPS = "train.max_steps=6"
Two = tuple[Path, Path, Path]  # a recipe, and two runs of it


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    place = tmp_path_factory.mktemp("two")
    recipe = write_toy(place, stages=[], checkpoint={"every": 2}, train={"threads": 1, "max_epochs": 3})
    run(recipe, place / "one", STEPS)
    run(recipe, place / "other", STEPS, "optim.lr=0.05")
    return recipe, place / "one", place / "other"


def contents(folder: Path) -> dict[str, str]:
    """sha256 of all files below a folder, and names of its folders."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def before_step(number: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    update, done = LOOP.train_step, 0

    def step(*args: object, **options: object) -> object:
        nonlocal done
        done += 1
        if done == number:
            act()
        return update(*args, **options)

    monkeypatch.setattr(LOOP, "train_step", step)


@pytest.mark.parametrize("then", ["nothing", "another run", "a link to another run", "a lock file alone"])
def test_a_run_that_is_renamed_in_training_ends_and_writes_nothing_at_its_old_name(two, tmp_path, monkeypatch, then):
    recipe, calm, other = two
    folder, moved = tmp_path / "a", tmp_path / "a-old"

    def rename() -> None:
        folder.rename(moved)
        if then == "another run":
            shutil.copytree(other, folder)
        elif then == "a link to another run":
            shutil.copytree(other, tmp_path / "there")
            folder.symlink_to(tmp_path / "there")
        elif then == "a lock file alone":
            folder.mkdir()
            (folder / "run.lock").touch()

    before_step(4, rename, monkeypatch)
    with pytest.raises(DiskError, match="the folder was renamed, replaced or deleted while it was written") as end:
        run(recipe, folder, STEPS)
    assert end.value.exit_code == 6
    assert (end.value.where, "rename it back to a" in end.value.fix) == (str(folder), True)
    assert folder.exists() == (then != "nothing")
    if then == "a lock file alone":
        assert [path.name for path in folder.iterdir()] == ["run.lock"]
    elif then != "nothing":
        assert contents(folder.resolve()) == contents(other)
    monkeypatch.undo()
    run(recipe, moved, STEPS, resume=True)  # what it had saved is where its directory is
    assert (moved / "metrics.jsonl").read_bytes() == (calm / "metrics.jsonl").read_bytes()


def test_a_run_goes_on_through_a_link_at_its_old_name_that_leads_to_it(two, tmp_path, monkeypatch):
    folder, moved = tmp_path / "a", tmp_path / "disk"

    def move() -> None:
        folder.rename(moved)
        folder.symlink_to(moved)

    before_step(3, move, monkeypatch)
    assert run(two[0], folder, STEPS).step == 6
    assert (moved / "metrics.jsonl").read_bytes() == (two[1] / "metrics.jsonl").read_bytes()


def test_a_run_without_its_lock_file_ends(two, tmp_path, monkeypatch):
    before_step(2, (tmp_path / "a" / "run.lock").unlink, monkeypatch)
    with pytest.raises(DiskError, match="it is gone from there"):
        run(two[0], tmp_path / "a", STEPS)
    assert len(rows(tmp_path / "a", "train")) == 1


def test_the_checkpoint_of_another_run_is_refused_with_both_ids(two, tmp_path):
    recipe, one, other = two
    folder = tmp_path / "a"
    shutil.copytree(one, folder)
    ids = [json.loads((place / COMMAND).read_text())["id"] for place in (one, other)]
    assert len(set(ids)) == 2
    for place, own in zip((one, other), ids, strict=True):
        states = [json.loads(path.read_text()) for path in place.glob("checkpoints/*/state.json")]
        assert {state["values"]["run"] for state in states} == {own}
    newest = "checkpoints/step-00000006"
    shutil.rmtree(folder / newest)
    shutil.copytree(other / newest, folder / newest)
    before = contents(folder / "checkpoints")
    with pytest.raises(ForeignCheckpointError, match=rf"of the run {ids[1]}, and this is the run {ids[0]}") as caught:
        run(recipe, folder, "train.max_steps=8", resume=True)
    assert (caught.value.exit_code, caught.value.where) == (4, str(folder / newest))
    assert contents(folder / "checkpoints") == before
    shutil.rmtree(folder / "checkpoints/best")
    shutil.copytree(other / "checkpoints/best", folder / "checkpoints/best")
    with pytest.raises(ForeignCheckpointError, match="best is a checkpoint of the run"):
        checkpoint.newest_weights(folder)


def test_a_copy_of_a_run_goes_on_and_so_does_a_run_of_an_earlier_version(two, tmp_path):
    recipe, one, _ = two
    shutil.copytree(one, tmp_path / "copy")
    run(recipe, tmp_path / "copy", "train.max_steps=7", resume=True)
    assert json.loads((tmp_path / "copy" / COMMAND).read_text())["id"] == json.loads((one / COMMAND).read_text())["id"]
    command = json.loads((tmp_path / "copy" / COMMAND).read_text())
    del command["id"]  # as runs of earlier versions
    (tmp_path / "copy" / COMMAND).write_text(json.dumps(command))
    run(recipe, tmp_path / "copy", "train.max_steps=8", resume=True)
    assert [event["step"] for event in events(tmp_path / "copy", "resumed")] == [6, 7]


def test_an_evaluation_is_not_kept_in_another_run(two, tmp_path, monkeypatch):
    shutil.copytree(two[1], tmp_path / "a")
    measure = evaluation._measure

    def slow(*args: object) -> object:
        (tmp_path / "a").rename(tmp_path / "a-old")
        shutil.copytree(two[2], tmp_path / "a")
        return measure(*args)

    monkeypatch.setattr(evaluation, "_measure", slow)
    metrics, lines = evaluation.evaluate_run(str(tmp_path / "a"))
    assert metrics
    assert lines[-1] == "not kept: the directory holds another run by now, or none"
    assert contents(tmp_path / "a") == contents(two[2])
