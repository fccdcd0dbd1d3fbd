"""The processes that trained a run one after the other, from its log: first step, machine and recipe of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from unpad.errors import SourceError
from unpad.recipes.recipe import Recipe
from unpad.recipes.section import kept_paths
from unpad.run.folder import run_recipe
from unpad.run.report.history import log_file, read_log
from unpad.run.upgrade import with_truths


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
