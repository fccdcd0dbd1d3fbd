"""A search draws within its ranges, repeats itself, resumes, ends bad trials early and leaves a recipe that trains."""

from __future__ import annotations

import json
import math
import shutil
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optuna")

import optuna
from optuna.trial import FrozenTrial, TrialState

from tests.helpers.shell import Shell
from tests.helpers.toy import LOOP, events, quiet, rows, run, write_toy
from unpad.errors import Interrupted, RecipeError, ResumeError, Stopped
from unpad.evaluation.metrics import HeldOut, Metric
from unpad.recipes.file import load_recipe
from unpad.run.report.history import read_rows
from unpad.training.loop import train
from unpad.trials.search.journal import Journal, open_study
from unpad.trials.search.search import JOURNAL, Search, direction, judge, prune_score, search
from unpad.trials.search.space import Choice, Range, split_fields, written

pytestmark = pytest.mark.slow

FIELDS = ["optim.lr=1e-6..1e-1:log", "model.hidden=16..32", "optim.schedule=constant,cosine", "optim.clip=0.5..2"]
TRIALS = 4
SEARCH = import_module("unpad.trials.search.search")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three held-out checks, one per epoch."""
    return write_toy(
        tmp_path_factory.mktemp("toy"), stages=[], data={"chat": None, "holdout": 0.2},
        train={"threads": 1, "max_epochs": 3},
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Path:
    """A search in one go."""
    folder = recipe.parent / "whole"
    look(recipe, folder)
    return folder


def look(recipe: Path, folder: Path, *fields: str, trials: int = TRIALS, **options: Any) -> list[str]:
    return search(str(recipe), folder, list(fields) or FIELDS, trials=trials, console=quiet(), **options)


def trials_of(folder: Path) -> list[FrozenTrial]:
    journal = Journal(folder / JOURNAL)
    try:
        return open_study(journal).get_trials()
    finally:
        journal.close()


def facts(folder: Path) -> list[Any]:
    """All of the trials that does not depend on the clock."""
    return [
        (t.number, t.state, t.params, t.values, t.intermediate_values, t.user_attrs, t.system_attrs)
        for t in trials_of(folder)
    ]


@pytest.mark.promise("vqa.search")
def test_values_lie_in_their_ranges_and_are_those_of_the_runs(whole: Path) -> None:
    assert len(trials_of(whole)) == TRIALS
    for trial in trials_of(whole):
        used = load_recipe(str(whole / f"trial-{trial.number + 1:04d}" / "recipe.yaml"))
        assert 1e-6 <= used.optim.lr <= 1e-1
        assert 16 <= used.model["hidden"] <= 32
        assert used.optim.clip is not None
        assert 0.5 <= used.optim.clip <= 2
        drawn = (used.optim.lr, used.model["hidden"], used.optim.schedule, used.optim.clip)
        assert list(trial.params.values()) == list(drawn)
    assert len({trial.params["optim.lr"] for trial in trials_of(whole)}) == TRIALS


@pytest.mark.promise("vqa.search")
def test_an_interrupted_and_resumed_search_equals_one_in_one_go(
    recipe: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "parts"
    look(recipe, folder, trials=2)
    with monkeypatch.context() as patch:
        patch.setattr(LOOP, "train_step", interrupted_at(5))
        with pytest.raises(Interrupted, match="the search was stopped by Ctrl-C") as caught:
            look(recipe, folder, resume=True)
    assert caught.value.where == str(folder)
    assert [t.state for t in trials_of(folder)][2:] == [TrialState.RUNNING]
    with (folder / JOURNAL).open("ab") as journal:
        journal.write(b'{"op_code": 8, "wor')  # cut short by a kill
    search(str(recipe), folder, [], trials=TRIALS, resume=True, console=quiet())
    assert facts(folder) == facts(whole)
    for name in ("best.yaml", "trial-0003/metrics.jsonl"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


def interrupted_at(number: int) -> Callable[..., Any]:
    """The real step, with a Ctrl-C during one of them."""
    real, count = LOOP.train_step, 0

    def step(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            signal.raise_signal(signal.SIGINT)
        return real(*args, **options)

    return step


def test_another_seed_draws_other_values(recipe: Path, whole: Path, tmp_path: Path) -> None:
    look(recipe, tmp_path / "other", *FIELDS, "train.seed=1", "train.max_steps=1", trials=1)
    assert trials_of(tmp_path / "other")[0].params != trials_of(whole)[0].params


@pytest.mark.promise("vqa.search")
def test_trials_that_fall_behind_end_early(whole: Path) -> None:
    trials = trials_of(whole)
    behind = [t for t in trials if t.state == TrialState.PRUNED]
    judged = [t for t in trials if t.state == TrialState.COMPLETE]
    assert behind
    assert judged
    for trial in behind:
        folder = whole / f"trial-{trial.number + 1:04d}"
        assert sorted(trial.intermediate_values) == [1, 2]
        assert trial.intermediate_values[2] > min(t.intermediate_values[2] for t in trials[: trial.number])
        assert len(rows(folder, "eval")) == 2
        assert events(folder, "stopped")[0]["message"].startswith("stopped after an evaluation")
    assert all(len(t.intermediate_values) == 3 for t in judged)


@pytest.mark.parametrize("saved", [True, False])
def test_a_trial_that_fell_behind_as_the_power_went_ends_at_the_same_step(
    recipe: Path, whole: Path, tmp_path: Path, saved: bool
) -> None:
    """Between its comparison and the record of its end, with and without the checkpoint of that step."""
    behind = next(t for t in trials_of(whole) if t.state == TrialState.PRUNED)
    folder, lines = tmp_path / "cut", (whole / JOURNAL).read_bytes().splitlines(keepends=True)
    shutil.copytree(whole, folder)
    told = [at for at, line in enumerate(lines) if json.loads(line).get("trial_id") == behind.number]
    (folder / JOURNAL).write_bytes(b"".join(lines[: told[-1]]))
    for later in range(behind.number + 2, TRIALS + 1):
        shutil.rmtree(folder / f"trial-{later:04d}")
    name = f"trial-{behind.number + 1:04d}"
    if saved:
        (folder / name / "metrics.csv").write_text("")
    else:
        shutil.rmtree(max((folder / name / "checkpoints").glob("step-*")))
    look(recipe, folder, trials=behind.number + 1, resume=True)
    assert facts(folder) == facts(whole)[: behind.number + 1]
    for file in ("metrics.jsonl", "metrics.csv"):
        assert (folder / name / file).read_bytes() == (whole / name / file).read_bytes()
    steps = [sorted(path.name for path in (one / name / "checkpoints").iterdir()) for one in (folder, whole)]
    assert steps[0] == steps[1]


def test_a_third_goes_on_at_evaluations_2_6_and_18(recipe: Path, tmp_path: Path) -> None:
    study = optuna.create_study()
    search = Search("toy", tmp_path, {}, [], "loss", 1, "tune", 0, study, quiet(), False)
    for trial, value in enumerate([5.0, 4.0, 6.0, 3.0, 3.5, 2.0, 2.5]):
        one = study.ask()
        for number in (1, 2, 3, 6):
            one.report(value, number)
        found = {number for number in (1, 2, 3, 6) if SEARCH._is_behind(search, trial, number)}
        assert found == ({2, 6} if trial in (2, 4) else set()), trial


@pytest.mark.parametrize(
    ("metric", "sign", "compared"), [("accuracy", -1, 2.0), ("perplexity", 1, 7.4), ("none", 1, 2.0)]
)
def test_trials_are_compared_by_the_metric_only_if_less_of_it_is_better(
    tmp_path: Path, metric: str, sign: int, compared: float
) -> None:
    study = optuna.create_study()
    trial, found = study.ask(), HeldOut(2.0, {"loss": 2.0, "accuracy": 0.9, "perplexity": 7.4}, 10)
    search = Search("toy", tmp_path, {}, [], metric, sign, "tune", 0, study, quiet(), False)
    assert not SEARCH._falls_behind(search, trial, "pretrain", 3, found)
    assert not SEARCH._falls_behind(search, trial, "tune", 6, found)
    assert study.get_trials()[0].intermediate_values == {1: compared}


def test_a_trial_that_was_ended_early_can_be_trained_on(recipe: Path, tmp_path: Path) -> None:
    said: list[tuple[str, int, float]] = []

    def after_evaluation(stage: str, step: int, found: Any) -> bool:
        said.append((stage, step, found.loss))
        return True

    run(recipe, tmp_path / "calm")
    with pytest.raises(Stopped):
        train(str(recipe), tmp_path / "run", console=quiet(), after_evaluation=after_evaluation)
    first = rows(tmp_path / "run", "eval")
    assert said == [("train", first[0]["step"], first[0]["loss"])]
    run(recipe, tmp_path / "run", resume=True)
    assert rows(tmp_path / "run") == rows(tmp_path / "calm")


@pytest.mark.promise("vqa.search")
def test_the_recipe_of_the_best_trial_is_kept_and_trains(whole: Path, tmp_path: Path) -> None:
    best = min((t for t in trials_of(whole) if t.state == TrialState.COMPLETE), key=lambda t: t.value or 0.0)
    kept = load_recipe(str(whole / "best.yaml"))
    assert kept == load_recipe(str(whole / f"trial-{best.number + 1:04d}" / "recipe.yaml"))
    assert run(whole / "best.yaml", tmp_path / "run", "train.max_steps=1").step == 1


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("optim.lr=1e-2..1e-4", "the range 1e-2..1e-4 is empty"), ("optim.lr=0..1:log", "0..1:log has no logarithm"),
        ("optim.lr=a..1", '"a" is no number'), ("optim.lr=1e-4..1e-2:exp", "may end with"),
        ("optim.lr=-1..1", r"optim.lr=-1: .*greater than 0"), ("optim.lrr=1e-4..1e-2", 'unknown key "lrr"'),
        ("model.width=16,17", "model.width=17: "), ("optim.schedule=cosine,cosin", "optim.schedule=cosin: "),
        ("optim.schedule=cosine,,constant", "a choice is empty"), ("optim.lr=1e-2,1e-2", "twice"),
        ("train.max_epochs=1.0..2.5", "max_epochs=1.0|max_epochs=2.5"),
    ],
)  # fmt: skip
def test_a_wrong_range_is_refused_by_its_key(recipe: Path, tmp_path: Path, field: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        look(recipe, tmp_path / "search", field)
    assert field.partition("=")[0] in caught.value.where
    assert not (tmp_path / "search").exists()


def test_fields_are_read_as_ranges_choices_or_one_value() -> None:
    space, fixed = split_fields(
        ["a=1..3", "b=0.1..3", "c=1e-4..1:log", "d=x,y", "e=[a,b]", "f=[a],[b,c]", 'g="p,q"', "h=../x/..y", "i=-2..2"]
    )
    assert space == {
        "a": Range(1, 3, whole=True, log=False), "b": Range(0.1, 3, whole=False, log=False),
        "c": Range(1e-4, 1, whole=False, log=True), "d": Choice(("x", "y")), "f": Choice(("[a]", "[b,c]")),
        "i": Range(-2, 2, whole=True, log=False),
    }  # fmt: skip
    assert fixed == ["e=[a,b]", 'g="p,q"', "h=../x/..y"]
    assert [written(value) for value in (1e-5, 2.5e-7, 0.25, 3, "1e-5")] == ["1.0e-05", "2.5e-07", "0.25", "3", "1e-5"]
    with pytest.raises(RecipeError, match="twice"):
        split_fields(["a=1", "a=2..3"])


@pytest.mark.promise("vqa.search")
def test_a_trial_that_fails_is_counted_and_the_search_goes_on(recipe: Path, tmp_path: Path) -> None:
    fields = ("model.context=8,64", "plan.overflow=error", "train.max_epochs=1")
    lines = look(recipe, tmp_path / "search", *fields, trials=4)
    states = {t.params["model.context"]: t.state for t in trials_of(tmp_path / "search")}
    assert states == {"8": TrialState.FAIL, "64": TrialState.COMPLETE}
    failed = [t for t in trials_of(tmp_path / "search") if t.state == TrialState.FAIL]
    assert "the limit is 8 of model.context" in failed[0].user_attrs["error"]
    assert any(f"{len(failed)} failed" in line for line in lines)
    with pytest.raises(RecipeError, match="no trial of 1 could be judged"):
        look(recipe, tmp_path / "none", "model.context=8,9", "plan.overflow=error", trials=1)


def test_what_would_make_it_another_search_is_refused(recipe: Path, whole: Path, tmp_path: Path) -> None:
    before = (whole / JOURNAL).read_bytes()
    with pytest.raises(RecipeError, match="holds a search already"):
        look(recipe, whole)
    with pytest.raises(ResumeError, match=r"optim.betas|optim.eps"):
        look(recipe, whole, *FIELDS, "optim.eps=1e-7", resume=True)
    with pytest.raises(ResumeError, match="what is searched"):
        look(recipe, whole, *FIELDS[1:], resume=True)
    with pytest.raises(ResumeError, match="--for: 'loss' in the search, 'perplexity' now"):
        look(recipe, whole, metric="perplexity", resume=True)
    with pytest.raises(RecipeError, match="no search to resume"):
        look(recipe, tmp_path / "none", resume=True)
    with pytest.raises(RecipeError, match="nothing to search for"):
        look(recipe, tmp_path / "none", "optim.lr=1e-3")
    assert (whole / JOURNAL).read_bytes() == before
    assert any(line.startswith("4 trials: ") for line in look(recipe, whole, resume=True))


def test_a_metric_that_the_runs_do_not_have_can_be_mended(recipe: Path, tmp_path: Path) -> None:
    fields = ("optim.lr=1e-3..1e-2", "train.max_epochs=1")
    with pytest.raises(RecipeError, match="better is not known"):
        look(recipe, tmp_path / "search", *fields, metric="speed")
    assert not (tmp_path / "search").exists()
    with pytest.raises(RecipeError, match='there is no "keywords_heldout"') as caught:
        look(recipe, tmp_path / "search", *fields, trials=1, metric="keywords_heldout")
    assert "--resume --for METRIC" in caught.value.fix
    lines = look(recipe, tmp_path / "search", *fields, trials=1, metric="bits_per_char", resume=True)
    assert lines[0].split() == ["trial", "bits_per_char", "optim.lr"]


@pytest.mark.promise("vqa.search")
def test_the_score_is_of_accuracy_and_kept_share() -> None:
    metrics = {"accuracy_origin": 0.8, "accuracy_hard": 0.75, "keep_ratio_final": 0.3}
    assert judge(metrics, "score", Path()) == prune_score(0.8, 0.75, 0.3)
    with pytest.raises(RecipeError, match="accuracy_hard"):
        judge({"accuracy_origin": 0.8}, "score", Path())
    assert direction("score", "vqa") == -1


def test_the_command_shows_trials_and_a_table(unpad: Shell, recipe: Path) -> None:
    shown = unpad("search", recipe, "optim.lr=1e-3..1e-2:log", "train.max_epochs=1", "--trials", 1, "--out", "found")
    assert shown.code == 0, shown
    assert shown.out.count("trial-0001") == 3
    assert "next:  unpad eval found/trial-0001" in shown.out
    assert "epoch" not in shown.out  # the runs themselves are quiet
    kinds = {row["op_code"] for row in read_rows(Path("found") / JOURNAL)}
    assert kinds > {0, 4}


def test_without_optuna_the_command_says_how_to_get_it(unpad: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = "unpad.trials.search.search"
    for name in [n for n in sys.modules if n.partition(".")[0] == "optuna" or n.startswith(ours)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    shown = unpad("search", "zh_chat", "optim.lr=1e-3..1e-2", "--out", "found")
    assert shown.code == 2
    assert shown.err.splitlines() == [
        "RecipeError: unpad search needs optuna, which is not installed", '  do: pip install "optuna>=4"',
    ]  # fmt: skip


def pretended(stop_in: int = 0) -> Callable[..., Any]:
    """Stands for training: the held-out loss follows from the learning rate alone; a Ctrl-C in one trial."""

    def train(
        name: str, folder: Path, overrides: list[str], *, after_evaluation: Callable[..., bool], **_: Any
    ) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "recipe.yaml").write_text("\n".join(overrides), encoding="utf-8")
        for check in (1, 2, 3):
            if check == 2 and folder.name == f"trial-{stop_in:04d}":
                raise Interrupted("in the middle")
            if after_evaluation("train", 10 * check, HeldOut(loss_of(folder) + 1 / check, {}, 1)):
                raise Stopped("behind")

    return train


def loss_of(folder: Path) -> float:
    rate = float((folder / "recipe.yaml").read_text(encoding="utf-8").splitlines()[0].partition("=")[2])
    return abs(math.log10(rate) + 3)


def judged(folder: str, part: str) -> tuple[dict[str, Metric], list[str]]:
    loss = loss_of(Path(folder))
    return {"loss": Metric(loss, loss, loss, 1)}, []


@pytest.mark.promise("vqa.search")
def test_after_random_trials_draws_come_closer_and_resume_equals_one_go(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = ("optim.lr=1e-6..1:log", "model.hidden=16..32", "optim.schedule=constant,cosine")
    monkeypatch.setattr(SEARCH, "evaluate_run", judged)
    monkeypatch.setattr(SEARCH, "train", pretended())
    look(recipe, tmp_path / "whole", *fields, trials=32)
    monkeypatch.setattr(SEARCH, "train", pretended(stop_in=23))
    with pytest.raises(Interrupted):
        look(recipe, tmp_path / "parts", *fields, trials=32)
    assert len(trials_of(tmp_path / "parts")) == 23
    monkeypatch.setattr(SEARCH, "train", pretended())
    look(recipe, tmp_path / "parts", *fields, trials=32, resume=True)
    assert facts(tmp_path / "parts") == facts(tmp_path / "whole")
    away = [abs(math.log10(t.params["optim.lr"]) + 3) for t in trials_of(tmp_path / "whole")]
    assert np.median(away[15:]) < 0.7 * np.median(away[:15])


@pytest.mark.parametrize("number", [3, 18], ids=["random", "estimated"])
def test_a_trial_that_ended_between_two_of_its_draws_draws_the_rest_as_it_would_have(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(SEARCH, "evaluate_run", judged)
    monkeypatch.setattr(SEARCH, "train", pretended())
    look(recipe, tmp_path / "whole", trials=number + 1)
    journal = (tmp_path / "whole" / JOURNAL).read_bytes().splitlines(keepends=True)
    drawn = [at for at, line in enumerate(journal, 1) if b'"param_name"' in line][-len(FIELDS) :]
    for kept in drawn[:-1]:
        folder = tmp_path / f"cut-{kept}"
        shutil.copytree(tmp_path / "whole", folder)
        shutil.rmtree(folder / f"trial-{number + 1:04d}")
        (folder / JOURNAL).write_bytes(b"".join(journal[:kept]))
        look(recipe, folder, trials=number + 1, resume=True)
        assert facts(folder) == facts(tmp_path / "whole")
