"""A recorded step compared with its recomputation, and likely reasons for a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unpad.run.checkpoint import State
from unpad.run.sessions import Cut, Session
from unpad.training.progress import DECIDE_BITS, SHARDED_AMONG, UPDATE_RULE
from unpad.training.setup import Setup

# Columns of a step in the order in which one follows from the others: the first difference is the one to explain.
ORDER = (
    *("rows", "stage", "epoch", "sequences", "tokens", "padded_tokens", "targets"),
    *("lr", "values", "loss", "grad_norm"),
)


@dataclass(frozen=True)
class StepComparison:
    """Columns of a step: name, recorded value, recomputed value; None for a missing number."""

    columns: list[tuple[str, Any, Any]]

    @property
    def differing(self) -> list[tuple[str, Any, Any]]:
        """Columns that differ in any bit, in the order in which they follow from each other."""
        return [column for column in self.columns if column[1] != column[2]]

    @property
    def equal(self) -> bool:
        return not self.differing


def compare(recorded: dict[str, Any], computed: dict[str, Any] | None) -> StepComparison:
    """Compare the columns that the run recorded; JSON keeps every bit of a number.

    Args:
        computed: None for a step that could not be computed.
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
    return StepComparison(columns)


def of_memory(
    session: Session, cuts: Sequence[Cut], after: int, most_tokens: int | None, newest: State | None
) -> list[str]:
    """Likely reasons for a different cut of micro-batches into parts, each a sentence.

    Args:
        session: that took the step.
        cuts: until the step, as the log has them.
        after: step that the computation began after.
        most_tokens: most tokens of a pass at the end of the computation.
        newest: a checkpoint of the run.
    """
    other = "parts have other last bits"
    if most_tokens is not None and (not cuts or most_tokens < cuts[-1].tokens):
        return [f"memory did not hold micro-batches here, computed in parts of at most {most_tokens:,} tokens: {other}"]
    processes = session.environment.get("processes", 1)
    if cuts and cuts[-1].step > after and processes != 1:
        return [
            f"memory ended in step {cuts[-1].step:,}, which {processes} processes cut each in its own parts: {other}"
        ]
    saved = newest.values.get("progress", {}).get("most_tokens") if newest is not None else None
    if saved is not None and not cuts:
        return [f"the run computed micro-batches in parts, from a step on that its log does not name: {other}"]
    return []


def reasons(
    session: Session, setup: Setup, newest: State | None, in_parts: list[str], *, from_scratch: bool
) -> list[str]:
    """Likely reasons for a difference, each a sentence.

    Args:
        session: that took the step.
        setup: of the steps that were computed again.
        newest: a checkpoint of the run.
        in_parts: those of `of_memory`.
        from_scratch: whether they began from the weights that the run began with.
    """
    found, values = list[str](), newest.values if newest is not None else {}
    was = session.environment or values.get("environment", {})
    for key in (*DECIDE_BITS, "version"):
        if key in was and was[key] != setup.environment.get(key):
            name = "version of unpad" if key == "version" else key
            found.append(f"{name} is {setup.environment.get(key)}, was {was[key]}")
    if newest is not None and values["update_rule"] != UPDATE_RULE:
        found.append("the run was begun by a version that drew dropout once for all micro-batches of an update")
    processes = was.get("processes")
    if session.recipe.train.sums == "fast" and processes not in (None, 1):
        found.append(f"{processes} processes trained with train.sums=fast: the bits depend on their number")
    if values.get(SHARDED_AMONG, 1) != 1:
        found.append(f"the model was divided among {values[SHARDED_AMONG]} processes")
    found += in_parts
    if session.undescribed:
        what = "a later resume changed the recipe, and the log does not keep what was before"
        found.append(f"{what}: {session.undescribed}")
    if from_scratch and session.recipe.train.init_from and setup.base is None:
        found.append(f"{session.recipe.train.init_from} may hold other weights than when the run began")
    if not found:
        what = "nothing that the run records has changed"
        found.append(f"{what}: a checkpoint or a row of metrics.jsonl was altered, or the code was")
    return found
