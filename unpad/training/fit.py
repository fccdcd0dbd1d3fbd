"""Micro-batches for several processes: which of them a recipe leaves without work, and a cut that gives all of them
some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unpad.batching.balance import Balance, Costs, Cut, finer_cut
from unpad.batching.plan import Plan, plan
from unpad.models.cost import cells_per_token
from unpad.recipes.recipe import Recipe, stages_of
from unpad.training.setup import Setup
from unpad.training.stage import StageSetup, plan_inputs

FIELD = "plan.tokens_per_micro"
EVERYTHING = 1 << 40  # tokens of an update that no epoch fills


@dataclass(frozen=True)
class Advice:
    """A stage in which some processes have no work in most updates.

    Args:
        balance: as the recipe cuts the stage's first epoch into micro-batches.
        cut: a smaller `plan.tokens_per_micro` that gives every process work; None if there is none.
        tokens_per_step: real tokens of updates that would keep all processes busy, if that is known.
    """

    stage: str
    balance: Balance
    cut: Cut | None
    tokens_per_step: int | None

    def line(self) -> str:
        """The advice as one line."""
        idle, num = self.balance.idle, self.balance.processes
        what = f"{idle} of {num} processes have no work in most updates of stage {self.stage}"
        steps = [] if self.tokens_per_step is None else [f"plan.tokens_per_step={self.tokens_per_step} would fill them"]
        if self.cut is None:
            ways = ["no plan.tokens_per_micro gives all of them some", *steps]
        else:
            busy = f"{self.cut.balance.efficiency:.0%} busy by cost, not {self.balance.efficiency:.0%}"
            size = f"plan.tokens_per_micro={self.cut.tokens_per_micro} would keep them {busy}"
            ways = [f"{size} (--fit-processes sets it for a new run)", *steps]
        return f"{what}; " + "; ".join(ways)


def advice(stages: Sequence[StageSetup], processes: int, cells_per_token: float) -> list[Advice]:
    """Advice on every stage whose first epoch leaves processes without work.

    Args:
        processes: number of them; cells_per_token: of the model.
    """
    found = []
    for stage in stages:
        if stage.train_ids.size == 0 or stage.recipe.train.max_epochs == 0:
            continue
        attended = stage.data.table.attended
        made = Costs(recut(stage), cells_per_token, attended).balance(processes)
        if made.idle:
            cut = best_cut(stage, processes, cells_per_token)
            found.append(Advice(stage.name, made, cut, fill_tokens(stage, [processes], cells_per_token)[0]))
    return found


def best_cut(stage: StageSetup, processes: int, cells_per_token: float) -> Cut | None:
    """`finer_cut` of a stage's first epoch."""
    now = plan_inputs(stage, 0)[1].tokens_per_micro
    attended = stage.data.table.attended
    return finer_cut(lambda tokens: recut(stage, tokens_per_micro=tokens), now, processes, cells_per_token, attended)


def fill_tokens(
    stage: StageSetup, processes: Sequence[int], cells_per_token: float, strategy: str | None = None
) -> list[int | None]:
    """`Costs.fill_tokens` of each number of processes, with the micro-batches of an update that holds a whole epoch.

    Args:
        strategy: in place of the recipe's.
    """
    chosen = strategy or stage.recipe.plan.strategy
    made = recut(stage, strategy=chosen, tokens_per_step=EVERYTHING, batches_per_step=None, grow={})
    costs = Costs(made, cells_per_token, stage.data.table.attended)
    return [costs.fill_tokens(num) for num in processes]


def recut(stage: StageSetup, **changes: object) -> Plan:
    """The plan of a stage's first epoch with changed plan settings."""
    lengths, settings, known = plan_inputs(stage, 0)
    return plan(lengths, settings.model_copy(update=changes), epoch=0, **known)


def share_out(setup: Setup, *, fit: bool) -> tuple[Setup, list[str], list[str]]:
    """Look for processes without work, and give them some.

    Args:
        fit: set `plan.tokens_per_micro` of the recipe, as `Advice` says.

    Returns:
        The setup, whose recipe and stages are changed if `fit` found something to change; the changes as `key=value`;
        and notes for the log.
    """
    if setup.group.size == 1 or setup.recipe.train.pipeline_stages > 1:  # a stage has a part of every micro-batch
        return setup, [], []
    found = advice(setup.stages, setup.group.size, cells_per_token(setup.model))
    changes: dict[str, int] = _changes(setup.recipe, found) if fit else {}
    notes = [one.line() for one in found if not fit or one.cut is None]
    if not changes:
        return setup, [], notes
    recipe = _changed(setup.recipe, changes)
    stages = [
        replace(stage, recipe=resolved.recipe) for stage, resolved in zip(setup.stages, stages_of(recipe), strict=True)
    ]
    set_to = [f"{key}={tokens}" for key, tokens in changes.items()]
    notes.append(f"{' and '.join(set_to)} for {setup.group.size} processes (--fit-processes)")
    return replace(setup, recipe=recipe, stages=stages), set_to, notes


def _changes(recipe: Recipe, found: Sequence[Advice]) -> dict[str, int]:
    """Fields of the recipe to set: the run's, or where a stage has a size of its own, that of every stage named."""
    by_stage = any("tokens_per_micro" in stage.plan for stage in recipe.stages)
    changes: dict[str, int] = {}
    for one in found:
        if one.cut is not None:
            key = f"stages.{one.stage}.{FIELD}" if by_stage else FIELD
            changes[key] = min(one.cut.tokens_per_micro, changes.get(key, one.cut.tokens_per_micro))
    return changes


def _changed(recipe: Recipe, changes: dict[str, int]) -> Recipe:
    """The recipe with these fields set."""
    tokens = changes.get(FIELD, recipe.plan.tokens_per_micro)
    stages = [
        stage.model_copy(update={"plan": {**stage.plan, "tokens_per_micro": changes[key]}})
        if (key := f"stages.{stage.name}.{FIELD}") in changes
        else stage
        for stage in recipe.stages
    ]
    settings = recipe.plan.model_copy(update={"tokens_per_micro": tokens})
    return recipe.model_copy(update={"plan": settings, "stages": stages})
