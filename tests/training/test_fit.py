"""Processes without work are named, and get some by a finer cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.toy import TWO_STAGES, write_toy
from unpad.models.cost import cells_per_token
from unpad.processes.group import Group
from unpad.recipes.file import load_recipe
from unpad.training.fit import advice, share_out
from unpad.training.setup import Setup, prepare_setup
from unpad.training.stage import epoch_plan

COARSE = "plan.tokens_per_micro=4096"
OWN = [{**stage, "plan": {"tokens_per_micro": size}} for stage, size in zip(TWO_STAGES, (90, 4096), strict=True)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("fit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNPAD_CACHE", str(folder / "cache"))
        yield write_toy(folder, plan={"tokens_per_step": 400})


def setup_of(recipe: Path, *overrides: str, processes: int = 2) -> Setup:
    settings = load_recipe(str(recipe), overrides)
    return replace(prepare_setup(settings, Path(), None, compare=False), group=Group(size=processes))


def without_work(setup: Setup) -> list[int]:
    """Processes without a micro-batch in most updates, of every stage."""
    counts = []
    for stage in setup.stages:
        made = epoch_plan(stage, 0)
        micros = [len(made.step(index)) for index in range(made.num_steps)]
        counts.append(sum(2 * sum(n > rank for n in micros) < len(micros) for rank in range(setup.group.size)))
    return counts


def test_one_process_and_busy_ones_get_no_advice(recipe: Path) -> None:
    alone = setup_of(recipe, COARSE, processes=1)
    assert share_out(alone, fit=True) == (alone, [], [])
    busy = setup_of(recipe, "plan.tokens_per_micro=90")
    assert share_out(busy, fit=True) == (busy, [], [])
    assert without_work(busy) == [0, 0]


def test_processes_without_work_are_named_with_two_remedies(recipe: Path) -> None:
    setup = setup_of(recipe, COARSE)
    assert without_work(setup) == [1, 1]
    same, changes, notes = share_out(setup, fit=False)
    assert same is setup
    assert changes == []
    found = advice(setup.stages, 2, cells_per_token(setup.model))
    assert [one.line() for one in found] == notes
    assert [one.stage for one in found] == ["pretrain", "tune"]
    for one, line in zip(found, notes, strict=True):
        assert one.cut is not None
        assert line.startswith(f"1 of 2 processes have no work in most updates of stage {one.stage}; plan.tokens_per_")
        assert f"plan.tokens_per_micro={one.cut.tokens_per_micro} would keep them" in line
        assert "--fit-processes" in line
        assert f"plan.tokens_per_step={one.tokens_per_step} would fill them" in line


def test_fitting_gives_every_process_work_and_is_an_override(recipe: Path) -> None:
    setup, changes, notes = share_out(setup_of(recipe, COARSE), fit=True)
    assert without_work(setup) == [0, 0]
    assert len(changes) == 1
    assert changes[0].startswith("plan.tokens_per_micro=")
    assert notes == [f"{changes[0]} for 2 processes (--fit-processes)"]
    given = setup_of(recipe, COARSE, *changes)
    assert setup.recipe.model_dump() == given.recipe.model_dump()
    assert [stage.recipe for stage in setup.stages] == [stage.recipe for stage in given.stages]
    again, changes, notes = share_out(setup, fit=True)
    assert (again, changes, notes) == (setup, [], []), "nothing is left to fit"


def test_a_stage_with_a_size_of_its_own_is_fitted_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    recipe = write_toy(tmp_path, plan={"tokens_per_step": 400}, stages=OWN)
    setup, changes, _ = share_out(setup_of(recipe), fit=True)
    assert [change.partition("=")[0] for change in changes] == ["stages.tune.plan.tokens_per_micro"]
    assert without_work(setup) == [0, 0]
    given = setup_of(recipe, *changes)
    assert setup.recipe.model_dump() == given.recipe.model_dump()


def test_what_no_cut_can_share_out_is_said(recipe: Path) -> None:
    setup = setup_of(recipe, COARSE, processes=64)
    same, changes, notes = share_out(setup, fit=True)
    assert (same, changes) == (setup, [])
    assert all("no plan.tokens_per_micro gives all of them some; plan.tokens_per_step=" in line for line in notes)
    assert len(notes) == 2
