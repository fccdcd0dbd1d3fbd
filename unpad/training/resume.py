"""Recipe of a resumed run: what changed since it began, and what the change does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from unpad.errors import ResumeError, SourceError
from unpad.interchange.origin import open_recipe
from unpad.nn.precision import DTYPES, Precision
from unpad.recipes.recipe import Recipe, differences, may_change_on_resume, stages_of
from unpad.recipes.section import kept_paths
from unpad.run import upgrade
from unpad.run.folder import MADE_BY, read_command, run_recipe
from unpad.run.report.history import read_log
from unpad.training.auto_size import with_size
from unpad.training.progress import Progress
from unpad.training.setup import Setup, resolved
from unpad.training.stage import StageSetup, epoch_plan, last_step, stage_epochs

ENDS = ("max_steps", "max_epochs")


def resumed_recipe(recipe: str | None, overrides: Sequence[str], folder: Path) -> tuple[list[str], Recipe, Recipe]:
    """Combine the overrides of the command that started the run with new ones, which come last.

    Args:
        recipe: named by the command; None for the run's saved recipe.

    Returns:
        Overrides, their resolved recipe, and the recipe that the run saved.

    Raises:
        ResumeError: a changed field is fixed during a run, or the run was not trained but derived from another.
    """
    command = read_command(folder)
    if made_by := command.get(MADE_BY):
        fix = f"start a new run from its weights: train.init_from={folder}"
        raise ResumeError(f'"{made_by}" made this run, which has no training to continue', where=str(folder), fix=fix)
    saved = resolved(run_recipe(folder))
    fields = {override.partition("=")[0] for override in overrides}
    began = [o for o in command["overrides"] if o.partition("=")[0] not in fields]
    if recipe is None:
        return [*began, *overrides], _refuse_changes(resolved(run_recipe(folder, overrides)), saved, folder), saved
    with kept_paths():
        settings = _same_rule(resolved(open_recipe(recipe, overrides, began=began, known=saved)), saved)
        if settings.data != saved.data:  # the run may have kept packaged sources beside given ones
            with_packaged = resolved(open_recipe(recipe, overrides, began=began, keep_packaged=True, known=saved))
            with_packaged = _same_rule(with_packaged, saved)
            settings = with_packaged if with_packaged.data == saved.data else settings
    return [*began, *overrides], _refuse_changes(settings, saved, folder), saved


def _refuse_changes(settings: Recipe, saved: Recipe, folder: Path) -> Recipe:
    """The settings of a run that continues, if they may replace the saved ones."""
    changed = differences(saved, settings)
    refused = {key: values for key, values in changed.items() if not may_change_on_resume(key)}
    if refused:
        listing = "; ".join(f"{key}: {old!r} in the run, {new!r} now" for key, (old, new) in refused.items())
        raise ResumeError(listing, where=str(folder), fix="undo these changes, or start a new run with train.init_from")
    return settings


def recorded_precision(folder: Path) -> Precision | None:
    """Precision in which a run was begun; None if neither its command nor its log says."""
    recorded = read_command(folder)["precision"]
    if recorded is None:
        with suppress(SourceError):  # it ended before its log, or the log is damaged
            recorded = upgrade.precision(read_log(folder))
    return recorded if isinstance(recorded, str) and recorded in DTYPES else None


def _same_rule(settings: Recipe, saved: Recipe) -> Recipe:
    """Split by the rule of the run, unless the command names one; auto means the run's own choice."""
    settings = with_size(settings, saved.plan.tokens_per_micro)
    if "split_version" in settings.data.model_fields_set:
        return settings
    rule = {"split_version": saved.data.split_version}
    return settings.model_copy(update={"data": settings.data.model_copy(update=rule)})


def describe_changes(setup: Setup, saved: Recipe, progress: Progress) -> list[str]:
    """One line per field that changed since the run saved its recipe, with the effect of the change.

    Args:
        progress: progress in the checkpoint that the run resumes from.
    """
    changed = differences(saved, setup.recipe)
    moves = any(key.endswith(ENDS) for key in changed) and _schedule_moves(setup, saved, progress)
    lines = []
    for key, (old, new) in changed.items():
        section, _, rest = key.partition(".")
        if section == "stages" and int(rest.partition(".")[0]) < progress.stage:
            effect = ": that stage is over, so nothing changes"
        else:
            effect = ": schedule recomputed" if moves and key.endswith(ENDS) else ""
        lines.append(f"{key} is {_told(new)}, was {_told(old)}{effect}")
    return lines


def _told(value: Any) -> Any:
    return "not set" if value is None else value


def _schedule_moves(setup: Setup, saved: Recipe, progress: Progress) -> bool:
    """True if an unfinished stage has another length than in the saved recipe, and rates that depend on it."""
    before = was_before = progress.step - progress.stage_step
    for stage, old in zip(setup.stages[progress.stage :], stages_of(saved)[progress.stage :], strict=True):
        if stage.train_ids.size == 0:
            continue
        optim, patience = stage.recipe.optim, stage.recipe.train.patience
        is_over = stage is setup.stages[progress.stage] and (
            patience is not None and progress.checks_without_progress >= patience
        )
        last, was_last = _last_step(stage, before), _last_step(replace(stage, recipe=old.recipe), was_before)
        by_length = optim.schedule in ("cosine", "restarts") or (optim.schedule == "warmup" and optim.warmup > 0)
        if by_length and not is_over and last - before != was_last - was_before:
            return True
        before, was_before = max(last, before), max(was_last, was_before)
    return False


def _last_step(stage: StageSetup, before: int) -> int:
    return last_step(stage, before, stage_epochs(stage, epoch_plan(stage, 0)))
