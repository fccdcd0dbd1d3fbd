"""A step as it was recorded against the same step computed again, and what may have made a difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unpad.run.checkpoint import State
from unpad.run.sessions import Session
from unpad.training.progress import DECIDE_BITS, SHARDED_AMONG, UPDATE_RULE
from unpad.training.setup import Setup

# Columns of a step in the order in which one follows from the others: the first difference is the one to explain.
ORDER = (
    *("rows", "stage", "epoch", "sequences", "tokens", "padded_tokens", "targets"),
    *("lr", "values", "loss", "grad_norm"),
)


@dataclass(frozen=True)
class Comparison:
    """Columns of a step: name, as recorded, as computed again; None where there is no such number."""

    columns: list[tuple[str, Any, Any]]

    @property
    def differing(self) -> list[tuple[str, Any, Any]]:
        """Columns that differ in any bit, in the order in which they follow from each other."""
        return [column for column in self.columns if column[1] != column[2]]

    @property
    def equal(self) -> bool:
        return not self.differing


def compare(recorded: dict[str, Any], computed: dict[str, Any] | None) -> Comparison:
    """Compare the columns that the run recorded; JSON keeps every bit of a number.

    Args:
        computed: None for a step that could not be taken.
    """
    given = computed or {}
    names = [*(name for name in ORDER if recorded.get(name) is not None)]
    names += [name for name, value in recorded.items() if name not in names and value is not None]
    columns: list[tuple[str, Any, Any]] = []
    for name in names:
        if name == "values" and isinstance(recorded[name], dict):
            before, now = recorded[name], given.get(name) or {}
            columns += [(term, before.get(term), now.get(term)) for term in dict.fromkeys([*before, *now])]
        else:
            columns.append((name, recorded[name], given.get(name)))
    return Comparison(columns)


def reasons(session: Session, setup: Setup, newest: State | None, *, from_scratch: bool) -> list[str]:
    """Likely reasons for a difference, each a sentence.

    Args:
        session: that took the step.
        setup: of the steps that were computed again.
        newest: a checkpoint of the run.
        from_scratch: whether they began from the weights that the run began with.
    """
    found, values = list[str](), newest.values if newest is not None else {}
    was = session.environment or values.get("environment", {})
    for key in (*DECIDE_BITS, "version"):
        if key in was and was[key] != setup.environment.get(key):
            name = "version of unpad" if key == "version" else key
            found.append(f"{name} is {setup.environment.get(key)}, was {was[key]}")
    if values.get("update_rule", 1) != UPDATE_RULE and newest is not None:
        found.append("the run was begun by a version that drew dropout once for all micro-batches of an update")
    processes = was.get("processes")
    if session.recipe.train.sums == "fast" and processes not in (None, 1):
        found.append(f"{processes} processes trained with train.sums=fast, whose bits depend on their number")
    if values.get(SHARDED_AMONG, 1) != 1:
        found.append(f"the model was divided among {values[SHARDED_AMONG]} processes")
    if values.get("progress", {}).get("most_tokens") is not None:
        found.append("memory did not hold some micro-batches, which were computed in parts: these have other last bits")
    if session.undescribed:
        what = "a later resume changed the recipe, and the log does not keep what was before"
        found.append(f"{what}: {session.undescribed}")
    if from_scratch and session.recipe.train.init_from and setup.base is None:
        found.append(f"{session.recipe.train.init_from} may hold other weights than when the run began")
    if not found:
        what = "nothing that the run records has changed"
        found.append(f"{what}: a checkpoint or a row of metrics.jsonl was altered, or the code was")
    return found
