"""Run directories are found by path or by name, and a new one never takes the place of another."""

from pathlib import Path

import pytest

from unpad.errors import RecipeError
from unpad.run.folder import RECIPE, RUNS, as_run, find_run, free_folder, run_recipe


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(folder: Path, recipe: str = "train: {max_epochs: 1}\n") -> Path:
    folder.mkdir(parents=True)
    (folder / RECIPE).write_text(recipe)
    return folder


def test_a_run_is_found_by_its_path_first_and_then_by_its_name():
    with pytest.raises(RecipeError) as caught:
        find_run("mine")
    assert (caught.value.where, caught.value.fix) == (
        "neither mine nor runs/mine holds a recipe.yaml",
        "train one first: unpad train zh_chat",
    )
    named = make(RUNS / "mine")
    assert find_run("mine") == find_run(named) == named
    here = make(Path("mine"))
    assert find_run("mine") == here
    with pytest.raises(RecipeError) as caught:
        find_run("mime")
    assert "mine" in str(caught.value.fix)


def test_a_name_may_be_a_runs_or_a_recipes_and_a_mistyped_one_is_told_both():
    run = make(RUNS / "mine")
    assert (as_run("mine"), as_run("zh_chat"), as_run("folder/absent")) == (run, None, None)
    with pytest.raises(RecipeError, match='no run and no recipe "mien"') as caught:
        as_run("mien")
    assert caught.value.fix == "did you mean mine?"


def test_a_new_run_has_the_next_number_and_resuming_takes_the_newest_with_a_recipe():
    assert free_folder("zh_chat", False) == RUNS / "zh_chat-1"
    with pytest.raises(RecipeError, match="no run of zh_chat to resume"):
        free_folder("zh_chat", True)
    for name in ("zh_chat-2", "zh_chat-10", "zh_chat-x", "zh_chat", "zh_chatty-50", "zh_chat-3-4"):
        make(RUNS / name)
    assert free_folder("path/zh_chat.yaml", False) == RUNS / "zh_chat-11"
    assert free_folder("zh_chat", True) == RUNS / "zh_chat-10"
    (RUNS / "zh_chat-12").mkdir()  # begun, and not yet a run
    assert free_folder("zh_chat", False) == RUNS / "zh_chat-13"
    assert free_folder("zh_chat", True) == RUNS / "zh_chat-10"


@pytest.mark.parametrize(
    ("data", "expected"), [("{}", 1), ("{split_version: 1}", 1), ("{split_version: 2}", 2), ("{split_version: 3}", 3)]
)
def test_a_run_of_before_the_split_had_a_version_keeps_its_split(data, expected):
    recipe = run_recipe(make(Path("run"), f"train: {{max_epochs: 1}}\ndata: {data}\n"), ["optim.lr=0.5"])
    assert (recipe.data.split_version, recipe.optim.lr) == (expected, 0.5)
