"""The start of a recomputation: the processes that trained the run one after the other, from its log, with first step,
machine and recipe of each; its data, where it is now, and checkpoints or beginnings of stages."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from unpad.errors import CheckpointError, RecipeError, SourceError
from unpad.recipes.data import KINDS, as_sources
from unpad.recipes.file import parse_recipe
from unpad.recipes.overrides import apply_override
from unpad.recipes.recipe import Recipe, differences, stages_of
from unpad.recipes.section import kept_paths
from unpad.run import checkpoint, upgrade
from unpad.run.checkpoint import State, put_weights
from unpad.run.folder import CHECKPOINTS, MADE_BY, read_command, run_recipe
from unpad.run.report.history import METRICS, log_file, metric_fault, read_log, read_rows
from unpad.run.upgrade import with_truths
from unpad.training.progress import Progress, check_values
from unpad.training.setup import Setup
from unpad.training.start import start_from


class Cut(NamedTuple):
    """A step in which memory ran out, and the largest tokens of a pass from then on."""

    step: int
    tokens: int


@dataclass(frozen=True)
class Session:
    """A process, or several at the same time, that trained a run.

    Args:
        after: step that it began after.
        recipe: used for training.
        environment: of its machine, from its log; empty if the log lacks it.
        undescribed: the fields that later sessions changed, in words, if the log lacks their old values.
        cuts: steps in which memory ran out, and the largest tokens of a pass from then on.
    """

    after: int
    recipe: Recipe
    environment: dict[str, Any]
    undescribed: str = ""
    cuts: tuple[Cut, ...] = ()


def read_sessions(folder: Path) -> list[Session]:
    """Sessions of a run, oldest first; without a log a single one with the run's recipe.

    Raises:
        RecipeError: the run's recipe cannot be used.
        SourceError: the log is damaged.
    """
    recipe = run_recipe(folder)
    log = read_log(folder) if log_file(folder).is_file() else []
    begins = [index for index, entry in enumerate(log) if entry["kind"] in ("started", "resumed")]
    sessions: list[Session] = []
    undescribed = ""
    for begin, end in reversed(list(zip(begins, [*begins[1:], len(log)], strict=True))):
        entry = log[begin]
        after = entry["step"] if entry["kind"] == "resumed" else 0
        machine = next((logged for logged in log[begin:end] if logged["kind"] == "environment"), {})
        environment = {key: value for key, value in machine.items() if key not in ("time", "kind")}
        sessions.insert(0, Session(after, recipe, environment, undescribed, _cuts(log[begin:end])))
        if entry["kind"] == "resumed":
            recipe = _before(recipe, entry["changed"], log_file(folder))
            undescribed = entry.get("undescribed") or undescribed
    return sessions or [Session(0, recipe, {})]


def _cuts(log: Sequence[dict[str, Any]]) -> tuple[Cut, ...]:
    cuts = [(entry.get("step"), entry.get("tokens")) for entry in log if entry["kind"] == "out_of_memory"]
    return tuple(Cut(step, tokens) for step, tokens in cuts if type(step) is int and type(tokens) is int)


def session_of(sessions: Sequence[Session], step: int) -> Session:
    """The session that trained a step; the last one if it was repeated after a resume."""
    return next((session for session in reversed(sessions) if session.after < step), sessions[0])


def cuts_until(sessions: Sequence[Session], step: int) -> list[Cut]:
    """Out-of-memory cuts in effect at a step, oldest first, without those of steps that were redone."""
    return [
        cut
        for session in sessions
        for cut in session.cuts
        if cut.step <= step and session_of(sessions, cut.step) is session
    ]


def _before(recipe: Recipe, changed: dict[str, Any], where: Path) -> Recipe:
    """Revert the changes of a resume.

    Args:
        changed: [old, new] by dotted key, of `recipes.changes.differences`; null for an unset field.
        where: the log.

    Raises:
        SourceError: they are not changes of this recipe.
    """
    values = recipe.model_dump(mode="json")
    try:
        for key, (old, _) in changed.items():
            *path, name = key.split(".")
            here: Any = values
            for part in path:
                here = here[int(part)] if isinstance(here, list) else here[part]
            if old is None and path[:1] == ["stages"]:
                here.pop(name, None)
            else:
                here[name] = old
        with kept_paths():
            return Recipe(**with_truths(values))
    except (LookupError, ValueError, TypeError, AttributeError):
        what = "the fields that a resume changed, in its log, are not those of its recipe"
        raise SourceError(what, where=str(where), fix="put both files back from a copy of the run") from None


# Last parts of fields that name a file, a folder or a run.
PLACES = ("path", "root", "split", "code_embeddings", "synonyms_file", "init_from")
QUESTIONS = re.compile(r"data\.vqa\.\d+\.(annotations|images)")  # the fields of a source of questions that do


def relocated(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe of a run with new paths of its data; the other fields of a source stay.

    Raises:
        RecipeError: an override is wrong, or changes more than a place.
    """
    if not overrides:
        return recipe
    values = recipe.model_dump(mode="json")
    before = {kind: values["data"][kind] for kind in KINDS}
    for given in overrides:
        apply_override(values, given)
    for kind, old in before.items():
        new = as_sources(values["data"].get(kind))
        if isinstance(new, list) and len(new) == len(old):
            values["data"][kind] = [{**was, **now} for was, now in zip(old, new, strict=True)]
    with kept_paths():
        moved = parse_recipe(values)
    for key in differences(recipe, moved):
        if key.rpartition(".")[2] not in PLACES and not QUESTIONS.fullmatch(key):
            what = f"{key} is not the place of a file, and a run's other fields stay as they were"
            fix = f"give new places of data alone, such as {_field_of_data(recipe)}=NEW"
            raise RecipeError(what, where="command line", fix=fix)
    return moved


@contextmanager
def advising(run: str, recipe: Recipe) -> Iterator[None]:
    """Add advice on how to give the new path to the error of a missing file.

    Args:
        run: the command and its run.
        recipe: of the run.
    """
    try:
        yield
    except SourceError as error:
        if "no such file" not in error.summary and "no file matches" not in error.summary:
            raise
        example = f"{run} {_field_of_data(recipe)}=NEW"
        fix = f"put it back, or name its new place by its field of the recipe, such as {example}"
        raise SourceError(error.summary, where=error.where, fix=fix, details=error.details) from None


def _field_of_data(recipe: Recipe) -> str:
    return next((f"data.{kind}" for kind in KINDS if recipe.data.sources(kind)), "data.text")


@dataclass(frozen=True)
class StageSteps:
    """Recorded steps of a stage that has any.

    Args:
        index: index of the stage in the recipe.
        rows: of `metrics.jsonl`, by step, ascending.
        before: steps of the run before it.
        previous: name of the previous stage with steps; None for the first.
    """

    index: int
    name: str
    rows: dict[int, dict[str, Any]]
    before: int
    previous: str | None


@dataclass(frozen=True)
class StartingPoint:
    """A point of a run from which steps can be recomputed.

    Args:
        after: steps done.
        stage: index of the stage that the next steps belong to.
        path: checkpoint to load; None for the weights that the run began with.
        within: whether the checkpoint was taken within the stage, with the state of the optimizer.
        name: in words.
    """

    after: int
    stage: int
    path: Path | None
    within: bool
    name: str


def refuse_untrained(folder: Path) -> None:
    """Refuse a run that was derived from another one.

    Raises:
        RecipeError: the run has no steps of its own.
    """
    if made_by := read_command(folder).get(MADE_BY):
        fix = "name a run that was trained"
        raise RecipeError(f'"{made_by}" made this run, which has no steps', where=str(folder), fix=fix)


def recorded_steps(folder: Path, recipe: Recipe) -> list[StageSteps]:
    """Steps that the run recorded, stage by stage.

    Raises:
        SourceError: `metrics.jsonl` is missing or damaged, or has no step of a stage of the recipe.
    """
    numbers = {stage.name: index for index, stage in enumerate(stages_of(recipe))}
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in read_rows(folder / METRICS, metric_fault):
        if row["kind"] == "train" and row["stage"] in numbers:
            found.setdefault(row["stage"], {})[row["step"]] = upgrade.step_row(row)
    if not found:
        raise SourceError("the run has recorded no step", where=str(folder / METRICS), fix="name a run that trained")
    stages: list[StageSteps] = []
    for name in sorted(found, key=numbers.__getitem__):
        last = stages[-1] if stages else None
        before = min(found[name]) - 1 if last is not None else 0
        rows = dict(sorted(found[name].items()))
        stages.append(StageSteps(numbers[name], name, rows, before, last.name if last else None))
    return stages


def starts(folder: Path, recipe: Recipe, stage: StageSteps, *, needs_scale: bool = False) -> list[StartingPoint]:
    """Points from which steps of a stage can be recomputed, the latest first.

    Args:
        needs_scale: whether steps depend on a loss scale, which is unknown at the beginning of a later stage.
    """
    checkpoints, last = folder / CHECKPOINTS, max(stage.rows)
    found = [
        StartingPoint(step, stage.index, path, within=True, name=f"checkpoint {path.name}")
        for step, path in checkpoint.saved_steps(checkpoints)
        if stage.before < step <= last
    ]
    if stage.previous is None:
        origin = recipe.train.init_from
        name = f"the weights of {origin}" if origin else "the initial weights, from the seed"
        return [*found, StartingPoint(0, stage.index, None, within=False, name=name)]
    path = checkpoints / f"best-{stage.previous}"
    if path.exists() and not needs_scale:
        name = f"checkpoint {path.name}, where the stage begins"
        found.append(StartingPoint(stage.before, stage.index, path, within=False, name=name))
    return found


def put_start(
    setup: Setup, possible: Sequence[StartingPoint]
) -> tuple[StartingPoint, Progress, State | None, list[str]]:
    """Load the latest readable one of several starting points.

    Returns:
        The start, progress of the run there, its checkpoint if it lies within a stage, and messages on damaged ones.

    Raises:
        CheckpointError: none can be read.
    """
    damages: list[str] = []
    for start in possible:
        progress = Progress(step=start.after, stage=start.stage)
        if start.path is None:
            if setup.recipe.train.init_from and setup.base is None:
                start_from(setup, setup.recipe.train.init_from)
            return start, progress, None, damages
        try:
            state = checkpoint.load(start.path, None if start.within else checkpoint.WEIGHTS)
            if start.within and state.step != start.after:
                raise CheckpointError(f"it holds step {state.step}", where=str(start.path))
            if start.within:
                check_values(state, str(start.path))
        except CheckpointError as error:
            damages.append(f"{start.path.name} is damaged: {error.what}")
            continue
        put_weights(setup.model, checkpoint.model_weights(state.tensors), str(start.path))
        if not start.within:
            return start, progress, None, damages
        return start, Progress.from_values(state.values["progress"]), state, damages
    fix = "choose a later step, or restore a copy of the run's checkpoints"
    what = "; ".join(damages) or "no checkpoint is left of before this step, nor of the end of the stage before"
    raise CheckpointError(what, where=str(setup.folder / CHECKPOINTS), fix=fix)


def readable_states(folder: Path) -> Iterator[State]:
    """Readable checkpoints of a run, the newest first, without their tensors."""
    checkpoints = folder / CHECKPOINTS
    named = sorted(checkpoints.glob("best*")) if checkpoints.is_dir() else []
    for path in [*(path for _, path in checkpoint.saved_steps(checkpoints)), *named]:
        try:
            state = checkpoint.load(path, [])
            check_values(state, str(path))
        except CheckpointError:
            continue
        yield state
