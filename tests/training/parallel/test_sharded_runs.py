"""Runs of models that are divided among processes: whole, stopped, resumed by fewer and more, and ended by a fault."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.ranks import run_ranks
from tests.helpers.toy import quiet, rows, run, write_toy
from unpad.errors import RecipeError, SourceError, Stopped
from unpad.evaluation.run import evaluate_run
from unpad.models.decoder import Decoder
from unpad.processes.group import Group
from unpad.run import checkpoint
from unpad.training.loop import train

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

torch.set_num_threads(1)  # a forked child must not wait for threads that did not come along

FILES = ("metrics.jsonl", "metrics.csv", "checkpoints/best/model.safetensors")


def divided(recipe: Path, folder: Path, group: Group, *given: str, resume: bool = False, stop: bool = False) -> None:
    """Train with a divided model; `stop` ends the run after its first evaluation."""
    console = quiet()
    try:
        train(str(recipe), folder, given, resume=resume, console=console, group=group, after_evaluation=lambda *_: stop)
    except Stopped:
        assert stop
    if group.leads:
        folder.with_suffix(".txt").write_text(console.file.getvalue(), encoding="utf-8")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one`, of one process; `whole`, of two; `again`, stopped after an evaluation and resumed; copies of the stopped
    one, which three processes and one have resumed, and `failing`, which none has; and `joined`, which one began and
    two continued."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = write_toy(
        folder / "toy",
        stages=[],
        train={"max_steps": 9, "eval_every": 3, "threads": 1, "sums": "fast"},
        checkpoint={"every": 3, "keep": 9},
    )
    run(recipe, folder / "one")
    with pytest.raises(Stopped):
        train(str(recipe), folder / "joined", console=quiet(), after_evaluation=lambda *_: True)

    def two(group: Group) -> None:
        divided(recipe, folder / "whole", group, "train.shard=full")
        divided(recipe, folder / "again", group, "train.shard=full", stop=True)
        with group.together():
            if group.leads:
                for name in ("by_three", "by_one", "failing"):
                    shutil.copytree(folder / "again", folder / name)
        divided(recipe, folder / "again", group, resume=True)
        divided(recipe, folder / "joined", group, "train.shard=full", resume=True)

    run_ranks(folder / "two", 2, two)
    run_ranks(folder / "three", 3, lambda group: divided(recipe, folder / "by_three", group, resume=True))
    run(recipe, folder / "by_one", resume=True)
    return folder


def values(folder: Path) -> list[float]:
    return [row["loss"] for kind in ("train", "eval") for row in rows(folder, kind)]


@pytest.mark.parametrize("name", ["whole", "by_three", "by_one", "joined"])
def test_losses_are_those_of_one_process_but_for_rounding(runs, name):
    assert len(values(runs / name)) > 9
    assert values(runs / name) == pytest.approx(values(runs / "one"), rel=1e-5)


@pytest.mark.promise("processes.shard")
def test_a_resumed_run_of_as_many_processes_has_the_bytes_of_the_whole(runs):
    for file in FILES:
        assert (runs / "again" / file).read_bytes() == (runs / "whole" / file).read_bytes(), file
    again, whole = (checkpoint.load_newest(runs / name / "checkpoints") for name in ("again", "whole"))
    assert again[0].tensors.keys() == whole[0].tensors.keys()
    assert all(torch.equal(again[0].tensors[name], tensor) for name, tensor in whole[0].tensors.items())


def test_readers_open_the_weights_of_a_divided_run(runs):
    shards = runs / "whole" / "checkpoints" / "step-00000009"
    assert (shards / "model-00002-of-00002.safetensors").is_file()
    state = checkpoint.load(runs / "whole" / "checkpoints" / "best")
    assert (runs / "whole" / "checkpoints" / "best" / "model.safetensors").is_file()
    assert state.values["sharded_among"] == 2
    assert evaluate_run(str(runs / "whole"), 0)


def test_a_new_run_of_one_process_is_refused_and_a_resumed_one_goes_on(runs, tmp_path):
    with pytest.raises(RecipeError, match="one process"):
        run(runs / "toy" / "toy.yaml", tmp_path / "new", "train.shard=full")
    assert rows(runs / "by_one", "train")[-1]["step"] == 9


@pytest.mark.promise("processes.failing")
def test_a_process_of_a_resumed_run_that_fails_in_an_evaluation_does_not_wait_for_the_others(runs):
    """Nor if the command does not repeat `train.shard`, which the run keeps: the others wait within a pass."""

    def work(group: Group) -> None:
        if group.rank == 1:
            Decoder.token_nll = changed
        divided(runs / "toy" / "toy.yaml", runs / "failing", group, "train.timeout=45", resume=True)

    (lost, text), (failed, _) = run_ranks(runs / "two that fail", 2, work)
    assert (lost, failed) == ("LostProcessError", "SourceError")
    assert "Timed out" not in text


def changed(*_: object) -> Tensor:
    raise SourceError("it has changed", where="texts.jsonl")
