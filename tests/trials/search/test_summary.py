"""The table at the end of a search: trials in the order of their worth, and what became of the others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

import optuna
from optuna.trial import TrialState

from tests.helpers.toy import quiet
from unpad.errors import RecipeError
from unpad.evaluation.metrics import HeldOut
from unpad.trials.search import search as module
from unpad.trials.search.search import Search
from unpad.trials.search.space import Choice, Range, Space

SPACE: Space = {"optim.lr": Range(1e-4, 1e-2, False, True), "model.blocks": Choice(("2", "4"))}
DISTRIBUTIONS = {
    "optim.lr": optuna.distributions.FloatDistribution(1e-4, 1e-2, log=True),
    "model.blocks": optuna.distributions.CategoricalDistribution(("2", "4")),
}


def search_of(folder: Path, sign: int = 1, metric: str = "loss") -> Search:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return Search("toy", folder, SPACE, [], metric, sign, "tune", 0, optuna.create_study(), quiet(), False)


def add(search: Search, state: TrialState, value: float | None, lr: float, blocks: str, **attributes: Any) -> None:
    params = {"optim.lr": lr, "model.blocks": blocks}
    checks = {1: 5.0, 2: value} if state == TrialState.PRUNED else {}
    search.study.add_trial(
        optuna.trial.create_trial(
            state=state, value=value, params=params, distributions=DISTRIBUTIONS, user_attrs=attributes,
            intermediate_values=checks,
        )
    )  # fmt: skip


@pytest.mark.parametrize("sign", [1, -1])
def test_the_best_come_first_and_the_others_are_counted(tmp_path: Path, sign: int) -> None:
    search = search_of(tmp_path / "found", sign)
    for number in range(12):  # the study minimises sign times the metric
        add(search, TrialState.COMPLETE, sign * 0.0 + (number * 5 % 12) / 4, 1e-4 * (number + 1), "4")
    add(search, TrialState.COMPLETE, 0.0, 2e-4, "2")
    add(search, TrialState.PRUNED, 9.0, 3e-4, "2")
    add(search, TrialState.PRUNED, 9.0, 3e-4, "2")
    add(search, TrialState.FAIL, None, 3e-4, "2", error="too long")
    order = [*sorted(range(12), key=lambda number: (number * 5 % 12, number))]
    order.insert(1, 12)  # of two alike the first comes first
    lines = module._summary(search)
    assert lines[0].split() == ["trial", "loss", "optim.lr", "model.blocks"]
    for line, number in zip(lines[1:11], order[:10], strict=True):
        value = sign * (number * 5 % 12) / 4 + 0.0 if number < 12 else 0.0
        lr, blocks = (1e-4 * (number + 1), "4") if number < 12 else (2e-4, "2")
        assert line.split() == [f"trial-{number + 1:04d}", f"{value:.4f}", f"{lr:.4g}", blocks]
    assert lines[11:] == [
        "16 trials: 13 judged, 2 stopped early, 1 failed", "",
        f"next:  unpad eval {tmp_path / 'found' / 'trial-0001'}",
        f"       unpad train {tmp_path / 'found' / 'best.yaml'}",
    ]  # fmt: skip


def test_each_end_of_a_trial_is_told(tmp_path: Path) -> None:
    search = search_of(tmp_path, -1, "auroc")
    add(search, TrialState.COMPLETE, -0.75, 1e-4, "4")
    add(search, TrialState.PRUNED, 0.512345, 1e-4, "4")
    add(search, TrialState.FAIL, None, 1e-4, "4", error="too long")
    endings = [module._ending(search, trial) for trial in search.study.get_trials()]
    assert endings == ["auroc 0.7500", "stopped at check 2, at 0.5123", "failed: too long"]


@pytest.mark.parametrize(
    ("errors", "said"), [([None, "too long", "late"], "too long"), ([None, None], "all were stopped")]
)
def test_without_a_judged_trial_the_first_reason_is_told(tmp_path: Path, errors: list[str | None], said: str) -> None:
    search = search_of(tmp_path)
    for error in errors:
        state = TrialState.FAIL if error else TrialState.PRUNED
        add(search, state, None if error else 1.0, 1e-4, "2", **({"error": error} if error else {}))
    with pytest.raises(RecipeError, match=f"no trial of {len(errors)} .* the first: {said}"):
        module._summary(search)


def test_the_best_recipe_names_its_trial_and_its_value(tmp_path: Path) -> None:
    search = search_of(tmp_path, -1, "auroc")
    for number, value in enumerate((-0.5, -0.75, -0.625)):
        add(search, TrialState.COMPLETE, value, 1e-4, "2")
        folder = tmp_path / f"trial-{number + 1:04d}"
        folder.mkdir()
        (folder / "recipe.yaml").write_text(f"number: {number}\n")
        module._write_best(search)
    assert (tmp_path / "best.yaml").read_text() == "# trial-0002 of a search for auroc: 0.75\nnumber: 1\n"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_trial_whose_evaluation_is_no_number_ends_as_failed(tmp_path: Path, loss: float) -> None:
    search = search_of(tmp_path)
    trial = search.study.ask()
    assert module._falls_behind(search, trial, "tune", 5, HeldOut(loss, {}, 1))
    module._end_early(search, trial)
    [frozen] = search.study.get_trials()
    assert (frozen.state, frozen.user_attrs["error"]) == (TrialState.FAIL, f"its held-out loss is {loss}")
    assert frozen.intermediate_values == {}


def test_checks_are_counted_in_the_last_stage_and_once_each(tmp_path: Path) -> None:
    search = search_of(tmp_path)
    trial = search.study.ask()
    for stage, step, loss in (("first", 3, 9.0), ("tune", 6, 5.0), ("tune", 6, 4.0), ("tune", 8, 3.0)):
        assert not module._falls_behind(search, trial, stage, step, HeldOut(loss, {"loss": loss + 1}, 1))
    [frozen] = search.study.get_trials()
    assert frozen.intermediate_values == {1: 6.0, 2: 4.0}, "a resumed run repeats a check"
    assert frozen.user_attrs["checks"] == [6, 8]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.5])
def test_a_trial_is_judged_by_a_number_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    from unpad.evaluation.metrics import Metric

    search = search_of(tmp_path)
    asked: list[Any] = []

    def train(name: str, folder: Path, overrides: list[str], **options: Any) -> None:
        asked.append((name, folder, overrides, options["resume"]))
        folder.mkdir(exist_ok=True)
        (folder / "recipe.yaml").write_text("a: 1\n")

    monkeypatch.setattr(module, "train", train)
    monkeypatch.setattr(module, "evaluate_run", lambda *_, part: ({"loss": Metric(value, value, value, 1)}, [part]))
    for _ in range(2):
        module._run_trial(search, search.study.ask())
    first, second = search.study.get_trials()
    fields = [f"optim.lr={first.params['optim.lr']}", f"model.blocks={first.params['model.blocks']}"]
    assert asked[0][:2] == ("toy", tmp_path / "trial-0001")
    assert asked[0][2][1] == fields[1]
    assert [one[3] for one in asked] == [False, False]
    expected = TrialState.COMPLETE if value == 1.5 else TrialState.FAIL
    assert (first.state, second.state) == (expected, expected)
    assert first.value == (1.5 if value == 1.5 else None)
    if value != 1.5:
        assert first.user_attrs["error"] == f"its loss is {value}"
    assert (tmp_path / "best.yaml").exists() == (value == 1.5)
