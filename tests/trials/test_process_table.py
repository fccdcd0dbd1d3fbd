"""`unpad plan --processes`: its percentages are a recount of the shares that training would give."""

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.helpers.toy import write_toy
from unpad.batching.balance import assign, micro_cost
from unpad.models.cost import cells_per_token
from unpad.recipes.file import load_recipe
from unpad.recipes.training import strategy_names
from unpad.training.rehearsal import StepCost
from unpad.training.setup import prepare_setup
from unpad.training.stage import epoch_plan
from unpad.trials.preview import Preview, preview

COUNTS = (2, 5, 64)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Preview, str, str]]:
    """A preview on several processes, its screen, and its recipe."""
    folder, out = tmp_path_factory.mktemp("processes"), StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unpad.trials.preview._try", lambda *_: StepCost(1, 1.0, 1, 0))
        recipe = str(write_toy(folder, plan={"row_tokens": 64}))
        yield preview(recipe, [], console=Console(file=out, width=80), processes=COUNTS), out.getvalue(), recipe


@pytest.mark.promise("processes.shares")
def test_efficiency_of_every_strategy_equals_a_recount_of_its_shares(made):
    stages = made[0].to_json()["stages"]
    for name in strategy_names():
        setup = prepare_setup(load_recipe(made[2], [f"plan.strategy={name}"]), Path(), None, compare=False)
        ratio = cells_per_token(setup.model)
        for stage, part in zip(setup.stages, stages, strict=True):
            assert part["processes"]["cells_per_token"] == ratio
            row = next(row for row in part["processes"]["strategies"] if row["name"] == name)
            steps = [epoch_plan(stage, 0).step(index) for index in range(epoch_plan(stage, 0).num_steps)]
            lengths = [(micro.stops - micro.starts).tolist() for step in steps for micro in step]
            costs = [length + length**2 / ratio for micro in lengths for length in micro]
            assert row["longest"] == max(length for micro in lengths for length in micro)
            assert row["longest_cost"] == pytest.approx(max(costs))
            total = sum(micro_cost(micro, ratio) for step in steps for micro in step)
            assert row["mean_cost"] == pytest.approx(total / len(steps))
            assert [one["processes"] for one in row["processes"]] == list(COUNTS)
            for one in row["processes"]:
                spent = 0.0
                for step in steps:
                    each = [micro_cost(micro, ratio) for micro in step]
                    spent += max(sum(each[i] for i in share) for share in assign(each, one["processes"]))
                assert one["efficiency"] == pytest.approx(sum(costs) / spent / one["processes"])


def test_json_has_the_bound_the_idle_the_update_and_the_cut(made):
    for stage in json.loads(json.dumps(made[0].to_json(), allow_nan=False))["stages"]:
        shared = stage["processes"]
        assert set(shared) == {"cells_per_token", "strategies", "cuts", "epoch_tokens"}
        for row in shared["strategies"]:
            for one in row["processes"]:
                assert set(one) == {"processes", "efficiency", "bound", "idle", "fill_tokens"}
                assert 0 < one["efficiency"] <= one["bound"] + 1e-9 <= 1 + 2e-9
        idle = [one["idle"] for row in shared["strategies"] if row["name"] == "pack" for one in row["processes"]]
        assert [cut is None for cut in shared["cuts"]] == [True, idle[1] == 0, True], "idle, or beyond any cut"
    assert "processes" not in preview_json_without(made)


def preview_json_without(made: tuple[Preview, str, str]) -> dict[str, object]:
    return {key: value for key, value in made[0].to_json()["stages"][0].items() if key != "processes"}
