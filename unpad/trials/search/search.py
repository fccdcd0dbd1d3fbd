"""`unpad search`: train a recipe with many values of some fields, and find the best.

Every trial is a run of its own. Values are drawn by the tree-structured Parzen estimator (Bergstra et al. 2011), all
keys together (Falkner et al. 2018, arXiv 1807.01774), after random ones; runs that fall behind at their evaluations
end early by asynchronous successive halving (Li et al. 2018, arXiv 1810.05934).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from unpad.data.family import family_name
from unpad.errors import (
    DiskError,
    Interrupted,
    RecipeError,
    ResumeError,
    RunInUseError,
    Signalled,
    Stopped,
    UnpadError,
    nearest,
)
from unpad.evaluation.family import measures_of
from unpad.evaluation.metrics import HeldOut
from unpad.evaluation.run import evaluate_run
from unpad.recipes.file import parse_recipe
from unpad.recipes.recipe import differences, stages_of
from unpad.run.checkpoint import saved_steps
from unpad.run.folder import CHECKPOINTS, RECIPE
from unpad.run.screen import open_console
from unpad.storage import RunLock, make_folder, remove_folder, write_atomic
from unpad.terminal.commands import resume_search
from unpad.terminal.printing import print_styled
from unpad.terminal.progress import progress
from unpad.terminal.table import number_of, text_table
from unpad.training.loop import train
from unpad.training.setup import resolved
from unpad.trials.search.space import Choice, Space, check_space, split_fields, written

KEEP_RANGE = (0.10, 0.60)  # range of kept shares within which fewer tokens are only slightly better
OUTSIDE, INSIDE = 10.0, 0.1  # penalty per distance from that range, and per kept share within it
STEEPNESS = 50.0


def prune_score(accuracy_origin: float, accuracy: float, keep: float) -> float:
    """Higher is better: -drop (1 + 50 drop) for a drop in accuracy, and the gain as it is where there is none; less a
    penalty of 10 times the distance of `keep` from 0.10 to 0.60, or within these of a tenth of it.

    Args:
        accuracy_origin, accuracy: without pruning and with it, from 0 to 1.
        keep: share of the visual tokens that stays, from 0 to 1.
    """
    drop = accuracy_origin - accuracy
    worth = -drop * (1 + STEEPNESS * drop) if drop > 0 else -drop
    low, high = KEEP_RANGE
    distance = max(low - keep, keep - high, 0.0)
    return worth - (OUTSIDE * distance if distance else INSIDE * keep)


SCORE = "score"


def direction(metric: str, family: str) -> int:
    """1 if a lower metric is better, -1 if a higher one is.

    Args:
        family: family of the trials' data.

    Raises:
        RecipeError: the family has no such metric, or neither direction of it is better.
    """
    if metric == SCORE:
        return -1
    known = measures_of(family).HIGHER_IS_BETTER
    better = next((more for pattern, more in known.items() if fnmatchcase(metric, pattern)), None)
    if better is None:
        names = [pattern.replace("*", "NAME") for pattern, more in known.items() if more is not None]
        what = f'more or less of "{metric}": which is better is not known'
        raise RecipeError(what, where="--for", fix="name a metric of `unpad eval`: " + ", ".join(names))
    return -1 if better else 1


def judge(metrics: dict[str, float], metric: str, folder: Path) -> float:
    """The value of a trial by the metrics of its run.

    Raises:
        RecipeError: the run has no such metric.
    """
    needed = ("accuracy_origin", "accuracy_hard", "keep_ratio_final") if metric == SCORE else (metric,)
    for name in needed:
        if name not in metrics:
            what = f'there is no "{name}" among the metrics of these runs'
            hint = "score is of models that make visual tokens fewer, as those of vqa_prune are."
            known = hint if metric == SCORE else nearest(name, list(metrics))
            fix = f"{known} Then run the same command with --resume --for METRIC"
            raise RecipeError(what, where=f"--for {metric}: {folder}", fix=fix)
    return prune_score(*(metrics[name] for name in needed)) if metric == SCORE else metrics[metric]


try:
    import optuna
    from optuna.trial import FrozenTrial, Trial, TrialState

    from unpad.trials.search.journal import Journal, open_study
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "optuna":
        raise
    raise RecipeError("unpad search needs optuna, which is not installed", fix='pip install "optuna>=4"') from None

JOURNAL, BEST = "search.jsonl", "best.yaml"
FIRST_CHECK, KEPT_PART = 2, 3  # halving compares at evaluations 2, 6, 18, ... and lets a third go on
RANDOM_TRIALS = 15  # before the estimator has enough to go by
SHOWN = 10


@dataclass(frozen=True)
class Search:
    """Constants of a search.

    Args:
        fixed: overrides of every trial.
        metric: name of a metric of `evaluate_run`, or `score`.
        sign: 1 if a lower metric is better, -1 if a higher one is; the study minimises their product.
        last_stage: only evaluations of this stage are compared; earlier stages may evaluate other data.
    """

    recipe: str
    folder: Path
    space: Space
    fixed: list[str]
    metric: str
    sign: int
    last_stage: str
    seed: int
    study: optuna.Study
    console: Console
    verbose: bool

    def place(self, number: int) -> Path:
        """The run directory of a trial, counted from 0."""
        return self.folder / f"trial-{number + 1:04d}"


# --------------------------------------------------------------------------- the search


def search(
    recipe: str,
    folder: Path,
    fields: Sequence[str],
    *,
    trials: int,
    metric: str | None = None,
    resume: bool = False,
    console: Console | None = None,
    verbose: bool = False,
) -> list[str]:
    """Train and judge runs with values drawn from ranges and choices, or resume such a search.

    Args:
        recipe: packaged name or YAML file.
        folder: holds the journal, a run directory per trial, and `best.yaml`, the recipe of the best trial.
        fields: ranges and choices as `split_fields` reads them, and `key=value`; if empty, those of the existing
            search.
        trials: of the whole search.
        metric: default `loss`, or the metric that the search began with.

    Returns:
        Lines: the best trials, numbers of trials, and the next commands.

    Raises:
        RecipeError: a range does not fit, the metric is unknown, or no trial could be judged.
        ResumeError: another recipe, field or metric than the search began with.
        Signalled: Ctrl-C, SIGTERM or SIGHUP, after saving.
    """
    begun = (folder / JOURNAL).is_file()
    if (begun or any(folder.glob("trial-*"))) and not resume:
        fix = f"continue it with {resume_search(recipe, folder, trials)}, or choose another --out"
        raise RecipeError("the directory holds a search already", where=str(folder), fix=fix)
    if resume and not begun:
        raise RecipeError("there is no search to resume", where=str(folder), fix="leave out --resume, or mend --out")
    settings = None if begun else _settings(recipe, fields, metric or "loss")  # refused before a folder is created
    make_folder(folder)
    with RunLock(folder), closing(Journal(folder / JOURNAL)) as journal:
        study = open_study(journal)
        settings = settings or _agreed(study, recipe, fields, metric, folder)
        if study.user_attrs.get("settings") != settings:
            study.set_user_attr("settings", settings)
        state = _begin(study, settings, folder, console or open_console(), verbose)
        _run_trials(state, trials)
        return _summary(state)


def _settings(recipe: str, fields: Sequence[str], metric: str) -> dict[str, Any]:
    """Settings that must not change during a search, as the journal holds them."""
    space, fixed = split_fields(fields)
    if not space:
        fix = "give a range or a choice, such as optim.lr=1e-4..1e-2:log or model.blocks=2,4,6"
        raise RecipeError("there is nothing to search for", where="command line", fix=fix)
    loaded = check_space(recipe, fixed, space)
    direction(metric, family_name(loaded))
    return {"name": recipe, "fields": list(fields), "metric": metric, "recipe": loaded.model_dump(mode="json")}


def _agreed(
    study: optuna.Study, recipe: str, fields: Sequence[str], metric: str | None, folder: Path
) -> dict[str, Any]:
    """Settings of the search, which must equal those at its beginning.

    The metric may change until a trial has been judged.
    """
    began = study.user_attrs.get("settings")
    if began is None:  # the search ended before its first trial
        return _settings(recipe, fields, metric or "loss")
    now = _settings(recipe, fields or began["fields"], metric or began["metric"])
    changed = differences(*(resolved(parse_recipe(start["recipe"])) for start in (began, now)))
    changed |= {"what is searched": (began["fields"], now["fields"])} if _space(began) != _space(now) else {}
    judged = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    changed |= {"--for": (began["metric"], now["metric"])} if judged and began["metric"] != now["metric"] else {}
    if changed:
        listing = "; ".join(f"{key}: {old!r} in the search, {new!r} now" for key, (old, new) in changed.items())
        raise ResumeError(listing, where=str(folder), fix="undo these changes, or choose another --out")
    return now


def _space(settings: dict[str, Any]) -> Space:
    return split_fields(settings["fields"])[0]


def _begin(study: optuna.Study, settings: dict[str, Any], folder: Path, console: Console, verbose: bool) -> Search:
    space, fixed = split_fields(settings["fields"])
    recipe, metric = parse_recipe(settings["recipe"]), settings["metric"]
    last, seed, sign = stages_of(recipe)[-1].name, recipe.train.seed, direction(metric, family_name(recipe))
    return Search(settings["name"], folder, space, fixed, metric, sign, last, seed, study, console, verbose)


def _run_trials(search: Search, trials: int) -> None:
    """Finish the unfinished trial of an interrupted search, then run others up to `trials`."""
    try:
        for frozen in search.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            search.study.sampler = _sampler(search, frozen.number)
            trial = Trial(search.study, frozen._trial_id)
            if len(frozen.params) < len(search.space):
                _draw_again(trial, frozen)
            _take_back(search, frozen)
            _run_trial(search, trial)
        while (number := len(search.study.get_trials(deepcopy=False))) < trials:
            search.study.sampler = _sampler(search, number)
            _run_trial(search, search.study.ask())
    except KeyboardInterrupt:
        raise _stopped(search, Interrupted, trials) from None
    except Signalled as end:
        raise _stopped(search, type(end), trials) from None


def _stopped(search: Search, kind: type[Signalled], trials: int) -> Signalled:
    what = f"the search was stopped by {kind.name}; everything up to here is saved"
    fix = f"continue with {resume_search(search.recipe, search.folder, trials)}"
    return kind(what, where=str(search.folder), fix=fix)


def _sampler(search: Search, number: int) -> optuna.samplers.TPESampler:
    """Sampler for one trial; it depends on the seed, the trial's number and the trials before, so a resumed search
    draws the same."""
    [seed] = np.random.SeedSequence([search.seed, number]).generate_state(1).tolist()
    return optuna.samplers.TPESampler(n_startup_trials=RANDOM_TRIALS, multivariate=True, seed=seed)


def _draw_again(trial: Trial, frozen: FrozenTrial) -> None:
    """Repeat the recorded draws of a trial, so that the remaining draws are the same as without the interruption."""
    for key, distribution in frozen.distributions.items():
        if key not in trial.relative_params:  # which are drawn together
            trial.study.sampler.sample_independent(trial.study, frozen, key, distribution)


# --------------------------------------------------------------------------- one trial


def _run_trial(search: Search, trial: Trial) -> None:
    """Train with the values of one trial, or resume it; judge it, and record the outcome."""
    values = {key: _draw(trial, key, of) for key, of in search.space.items()}
    overrides = [*search.fixed, *(f"{key}={value}" for key, value in values.items())]
    folder = search.place(trial.number)
    console = search.console if search.verbose else Console(quiet=True)
    resume = (folder / RECIPE).is_file()

    def falls_behind(stage: str, step: int, result: HeldOut) -> bool:
        return _falls_behind(search, trial, stage, step, result)

    try:
        with progress(folder.name):
            train(search.recipe, folder, overrides, resume=resume, console=console, after_evaluation=falls_behind)
            metrics = {name: metric.value for name, metric in evaluate_run(str(folder), part="valid")[0].items()}
    except Stopped:
        _end_early(search, trial)
        return
    except (Signalled, DiskError, RunInUseError):
        raise
    except UnpadError as error:
        _fail(search, trial, error.what)
        return
    value = judge(metrics, search.metric, folder)
    if not math.isfinite(value):
        _fail(search, trial, f"its {search.metric} is {value}")
        return
    search.study.tell(trial, search.sign * value)
    _write_best(search)
    _say(search, trial.number)


def _draw(trial: Trial, key: str, of: Any) -> str:
    """Draw the value of one key, as text; a resumed trial keeps its value."""
    if isinstance(of, Choice):
        return str(trial.suggest_categorical(key, of.options))
    if of.whole:
        return written(trial.suggest_int(key, int(of.low), int(of.high), log=of.log))
    return written(trial.suggest_float(key, of.low, of.high, log=of.log))


def _falls_behind(search: Search, trial: Trial, stage: str, step: int, held_out: HeldOut) -> bool:
    """Compare an evaluation with those of other trials; return whether to end this trial.

    The comparison uses the metric of the search if evaluations in training have it and lower is better, else the loss.
    """
    if stage != search.last_stage:
        return False
    value = held_out.values.get(search.metric, held_out.loss) if search.sign > 0 else held_out.loss
    steps: list[int] = trial.user_attrs.get("checks", [])
    if step not in steps:
        steps = [*steps, step]
        trial.set_user_attr("checks", steps)
    if not math.isfinite(value):
        trial.set_user_attr("error", f"its held-out loss is {value}")
        return True
    number = steps.index(step) + 1
    if number not in search.study.get_trials(deepcopy=False)[trial.number].intermediate_values:
        trial.report(value, number)  # only once: a resumed run repeats evaluations after its last checkpoint
    return _is_behind(search, trial.number, number)


def _is_behind(search: Search, trial: int, number: int) -> bool:
    """True if evaluations of this number are compared, and the trial is not in the best third of those that had one.

    It depends only on evaluations of the trials up to this one, so a resumed search decides the same.
    """
    checks = FIRST_CHECK
    while checks < number:
        checks *= KEPT_PART
    if checks != number:
        return False
    upto = search.study.get_trials(deepcopy=False)[: trial + 1]
    values = [other.intermediate_values[number] for other in upto if number in other.intermediate_values]
    return values[-1] > sorted(values)[max(len(values) // KEPT_PART, 1) - 1]


def _take_back(search: Search, frozen: FrozenTrial) -> None:
    """Delete the checkpoint of the evaluation at which a trial was stopped, if only the journal lacks its end.

    Its run then repeats the last steps, ends at the same step, and has all its files.
    """
    steps: list[int] = frozen.user_attrs.get("checks", [])
    measured = len(steps) in frozen.intermediate_values
    if steps and ("error" in frozen.user_attrs or (measured and _is_behind(search, frozen.number, len(steps)))):
        for step, path in saved_steps(search.place(frozen.number) / CHECKPOINTS):
            if step == steps[-1]:
                remove_folder(path)


def _end_early(search: Search, trial: Trial) -> None:
    """Record that a trial was stopped at an evaluation."""
    failed = "error" in search.study.get_trials(deepcopy=False)[trial.number].user_attrs
    search.study.tell(trial, state=TrialState.FAIL if failed else TrialState.PRUNED)
    _say(search, trial.number)


def _fail(search: Search, trial: Trial, message: str) -> None:
    trial.set_user_attr("error", message)
    search.study.tell(trial, state=TrialState.FAIL)
    _say(search, trial.number)


# --------------------------------------------------------------------------- what is shown and kept


def _say(search: Search, number: int) -> None:
    trial = search.study.get_trials(deepcopy=False)[number]
    values = " ".join(f"{key}={_short(value)}" for key, value in trial.params.items())
    line = f"{search.place(number).name}  {values}  {_ending(search, trial)}"
    print_styled(search.console, line)


def _ending(search: Search, trial: FrozenTrial) -> str:
    if trial.state == TrialState.COMPLETE:
        return f"{search.metric} {_value(search, trial):.4f}"
    if trial.state == TrialState.PRUNED:
        return f"stopped at check {trial.last_step}, at {_short(trial.value)}"
    return f"failed: {trial.user_attrs.get('error', '')}"


def _value(search: Search, trial: FrozenTrial) -> float:
    return search.sign * float(trial.value or 0.0) + 0.0  # never -0


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _ranked(search: Search) -> list[FrozenTrial]:
    """Trials that were judged, best first."""
    trials = search.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return sorted(trials, key=lambda trial: (trial.value or 0.0, trial.number))


def _write_best(search: Search) -> None:
    best = _ranked(search)[0]
    folder = search.place(best.number)
    head = f"# {folder.name} of a search for {search.metric}: {_value(search, best):.6g}\n"
    write_atomic(search.folder / BEST, head + (folder / RECIPE).read_text(encoding="utf-8"))


def _summary(search: Search) -> list[str]:
    """Table of the best trials, and the next commands."""
    ranked, trials = _ranked(search), search.study.get_trials(deepcopy=False)
    states = [trial.state for trial in trials]
    if not ranked:
        said = next((trial.user_attrs["error"] for trial in trials if "error" in trial.user_attrs), "all were stopped")
        what = f"no trial of {len(trials)} could be judged; the first: {said}"
        fix = "train one of them alone to see more, and change what is searched"
        raise RecipeError(what, where=str(search.folder), fix=fix)
    head = ["trial", search.metric, *search.space]
    rows = []
    for trial in ranked[:SHOWN]:
        values = (_short(trial.params[key]) for key in search.space)
        rows.append([search.place(trial.number).name, f"{_value(search, trial):.4f}", *values])
    lines = text_table(head, rows, left=range(len(head)))
    lines.append(
        f"{number_of(len(trials), 'trials')}: {len(ranked)} judged, {states.count(TrialState.PRUNED)} stopped early, "
        f"{states.count(TrialState.FAIL)} failed"
    )
    best = search.place(ranked[0].number)
    return [*lines, "", f"next:  unpad eval {best}", f"       unpad train {search.folder / BEST}"]
