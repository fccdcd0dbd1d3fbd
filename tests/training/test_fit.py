"""Processes without work are named, and get some by a finer cut."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.toy import TWO_STAGES, quiet, write_toy
from unpad.models.cost import cells_per_token
from unpad.processes.group import Group
from unpad.recipes.file import load_recipe
from unpad.run.folder import run_recipe
from unpad.run.report.history import read_log
from unpad.training.fit import advice, share_out
from unpad.training.loop import train
from unpad.training.parallel.parallelism import Replicas
from unpad.training.setup import Setup, prepare_setup
from unpad.training.stage import epoch_plan

OWN = [{**stage, "plan": {"tokens_per_micro": size}} for stage, size in zip(TWO_STAGES, (90, 4096), strict=True)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("fit"), plan={"tokens_per_step": 400, "tokens_per_micro": 4096})


def setup_of(recipe: Path, *overrides: str, processes: int = 2) -> Setup:
    settings = load_recipe(str(recipe), overrides)
    return replace(prepare_setup(settings, Path(), None, compare=False), parallelism=Replicas(Group(size=processes)))


def without_work(setup: Setup) -> list[int]:
    """Processes without a micro-batch in most updates, of every stage."""
    counts = []
    for stage in setup.stages:
        made = epoch_plan(stage, 0)
        micros = [len(made.step(index)) for index in range(made.num_steps)]
        counts.append(sum(2 * sum(n > rank for n in micros) < len(micros) for rank in range(setup.group.size)))
    return counts


def test_processes_without_work_are_named_with_two_remedies(recipe):
    setup = setup_of(recipe)
    assert without_work(setup) == [1, 1]
    same, changes, notes = share_out(setup, [], fit=False)
    assert same is setup
    assert changes == []
    found = advice(setup.stages, 2, cells_per_token(setup.model))
    assert [one.stage for one in found] == ["pretrain", "tune"]
    cuts = [one.cut.tokens_per_micro for one in found if one.cut is not None]
    fills = [one.tokens_per_step for one in found if one.tokens_per_step is not None]
    assert len(cuts) == len(fills) == 2
    assert notes == [
        "1 of 2 processes have no work in most updates of stages pretrain and tune: "
        f"plan.tokens_per_micro={min(cuts)} gives them some (--fit-processes sets it for a new run); "
        f"updates of plan.tokens_per_step={max(fills)} would fill all"
    ]


def test_fitting_gives_every_process_work_and_is_an_override(recipe):
    setup, changes, notes = share_out(setup_of(recipe), [], fit=True)
    assert without_work(setup) == [0, 0]
    assert len(changes) == 1
    assert changes[0].startswith("plan.tokens_per_micro=")
    assert notes == [f"{changes[0]}, so that all of 2 processes have work (--fit-processes)"]
    given = setup_of(recipe, *changes)
    assert setup.recipe.model_dump() == given.recipe.model_dump()
    assert [stage.recipe for stage in setup.stages] == [stage.recipe for stage in given.stages]
    again, changes, notes = share_out(setup, [], fit=True)
    assert (again, changes, notes) == (setup, [], []), "nothing is left to fit"


def test_a_stage_with_a_size_of_its_own_is_fitted_by_itself(tmp_path):
    recipe = write_toy(tmp_path, plan={"tokens_per_step": 400}, stages=OWN)
    setup, changes, _ = share_out(setup_of(recipe), [], fit=True)
    assert [change.partition("=")[0] for change in changes] == ["stages.tune.plan.tokens_per_micro"]
    assert without_work(setup) == [0, 0]
    given = setup_of(recipe, *changes)
    assert setup.recipe.model_dump() == given.recipe.model_dump()


@pytest.mark.promise("processes.shares")
def test_a_new_run_keeps_the_cut_and_goes_on_with_it(recipe, tmp_path, monkeypatch):
    folder = tmp_path / "run"

    def as_one_of_two(setup: Setup, overrides: Sequence[str], *, fit: bool) -> tuple[Setup, list[str], list[str]]:
        shared, changes, notes = share_out(replace(setup, parallelism=Replicas(Group(size=2))), overrides, fit=fit)
        return replace(shared, parallelism=setup.parallelism), changes, notes

    monkeypatch.setattr("unpad.training.fit.share_out", as_one_of_two)

    def go_on(steps: int, *, resume: bool, fit_processes: bool) -> tuple[int, list[str]]:
        """Train up to a step; return the run's cut and its notes so far."""
        overrides = [f"train.max_steps={steps}"]
        train(str(recipe), folder, overrides, resume=resume, console=quiet(), fit_processes=fit_processes)
        cut = run_recipe(folder).plan.tokens_per_micro
        return cut, [row["message"] for row in read_log(folder) if row["kind"] == "note"]

    cut, notes = go_on(2, resume=False, fit_processes=True)
    assert cut < 400
    assert notes == [f"plan.tokens_per_micro={cut}, so that all of 2 processes have work (--fit-processes)"]
    assert go_on(3, resume=True, fit_processes=False) == (cut, notes)
    notes.append("--fit-processes is for new runs; this one keeps its micro-batches")
    assert go_on(4, resume=True, fit_processes=True) == (cut, notes)
