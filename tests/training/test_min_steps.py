"""Runs with train.min_steps: longer on small data, unchanged on larger, and told of before they begin."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from tests.helpers.toy import quiet, rows, run, same_tensors, weights, write_toy
from unpad.errors import Stopped
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe
from unpad.run.folder import RECIPE, run_recipe
from unpad.training.loop import train
from unpad.training.progress import resumed_recipe

pytestmark = pytest.mark.promise("run.min-steps")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))


def one_stage(folder: Path, **settings: Any) -> Path:
    """A recipe of one stage, of two epochs."""
    train = {"threads": 1, "max_epochs": 2, **settings}
    return write_toy(folder, stages=[], data={"chat": []}, train=train, checkpoint={"every": None})


def same_run(a: Path, b: Path) -> bool:
    """Whether two runs have equal metrics and weights."""
    return rows(a) == rows(b) and same_tensors(weights(a), weights(b))


@pytest.mark.slow
def test_larger_data_keeps_its_bits_and_small_data_has_those_of_more_epochs(tmp_path: Path) -> None:
    plain = run(one_stage(tmp_path), tmp_path / "plain")
    assert run(one_stage(tmp_path, min_steps=plain.step), tmp_path / "enough").step == plain.step
    assert same_run(tmp_path / "enough", tmp_path / "plain")

    lengthened = one_stage(tmp_path, min_steps=2 * plain.step - 1)
    longer = run(lengthened, tmp_path / "longer")
    run(one_stage(tmp_path, max_epochs=4, eval_every=plain.step), tmp_path / "four")
    assert longer.step == 2 * plain.step
    assert rows(tmp_path / "longer", "train") == rows(tmp_path / "four", "train")  # the schedule with it
    assert [row["step"] for row in rows(tmp_path / "longer", "eval")] == [plain.step, 2 * plain.step]

    with pytest.raises(Stopped):
        train(str(lengthened), tmp_path / "resumed", [], console=quiet(), after_evaluation=lambda *_: True)
    assert run(lengthened, tmp_path / "resumed", resume=True).after_step == plain.step
    assert same_run(tmp_path / "resumed", tmp_path / "longer")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_steps": 4},
         ["train: 4 steps, then train.max_steps=4 ends it",
          "warning: train has few steps: there is not much to learn in so few; raise train.max_steps, or lower "
          "plan.tokens_per_step"]),
        ({"max_steps": 11, "min_steps": 12},
         ["train: 11 steps, then train.max_steps=11 ends it",
          "warning: train has few steps: fewer than train.min_steps=12; raise train.max_steps, or lower "
          "plan.tokens_per_step"]),
        ({"max_steps": 11}, ["train: 11 steps, then train.max_steps=11 ends it"]),
    ],
)  # fmt: skip
def test_a_run_tells_its_steps_and_where_they_are_few(
    settings: dict[str, int], expected: list[str], tmp_path: Path
) -> None:
    out = StringIO()
    train(str(one_stage(tmp_path, **settings)), tmp_path / "run", [], console=Console(file=out, width=300))
    assert [line for line in out.getvalue().splitlines() if line.startswith(("train: ", "warning: "))] == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [([], (250, None, None)), (["stages.soft.train.max_epochs=3"], (250, "dropped", None)),
     (["stages.soft.train.max_epochs=3", "stages.soft.train.min_steps=9"], (250, 9, None)),
     (["stages=[]", "train.max_epochs=3"], (None,)), (["stages=[]", "train.max_epochs=3", "train.min_steps=9"], (9,)),
     (["train.max_steps=3"], (250, None, None))],
)  # fmt: skip
def test_epochs_of_the_command_line_are_as_many_as_it_says(overrides: list[str], expected: tuple[object, ...]) -> None:
    recipe = load_recipe("vqa_prune", overrides)
    of_stages = ["dropped" if stage.train.get("min_steps", 0) is None else stage.train.get("min_steps")
                 for stage in recipe.stages]  # fmt: skip
    assert (recipe.train.min_steps, *of_stages) == expected


def test_a_run_that_began_without_the_field_goes_on_without_it(tmp_path: Path) -> None:
    earlier = Recipe(**yaml.safe_load(load_recipe("events").to_yaml()))
    values = earlier.model_dump(mode="json")
    assert values["train"].pop("min_steps") == 500
    (tmp_path / RECIPE).write_text(yaml.safe_dump(values), encoding="utf-8")
    (tmp_path / "run.json").write_text('{"recipe": "events", "overrides": []}', encoding="utf-8")
    assert run_recipe(tmp_path).train.min_steps is None
    for asked in ("events", None):
        assert resumed_recipe(asked, [], tmp_path)[1].train.min_steps is None
        assert resumed_recipe(asked, ["train.min_steps=40"], tmp_path)[1].train.min_steps == 40
