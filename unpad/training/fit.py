"""Micro-batches for several processes: which processes have no work, and a smaller cut that gives work to all."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unpad.batching.balance import Balance, BalancedSize, Costs, finer_cut
from unpad.errors import RecipeError
from unpad.models.cost import cells_per_token
from unpad.recipes.recipe import Recipe
from unpad.training.auto_size import FIELD, with_sizes
from unpad.training.setup import Setup
from unpad.training.stage import StageSetup, replanned, with_recipe

EVERYTHING = 1 << 40  # tokens of an update that no epoch fills


@dataclass(frozen=True)
class IdleStage:
    """A stage in which some processes have no work in most updates.

    Args:
        balance: with the recipe's cut of the stage's first epoch into micro-batches.
        cut: a smaller `plan.tokens_per_micro` that gives every process work; None if there is none.
        tokens_per_step: real tokens of updates that would keep all processes busy, if that is known.
    """

    stage: str
    balance: Balance
    cut: BalancedSize | None
    tokens_per_step: int | None


def advice(stages: Sequence[StageSetup], processes: int, cells_per_token: float) -> list[IdleStage]:
    """Advice on every stage in which the first epoch leaves processes without work.

    Args:
        processes: number of them; cells_per_token: of the model.
    """
    idle_stages = []
    for stage in stages:
        if stage.train_ids.size == 0 or stage.recipe.train.max_epochs == 0:
            continue
        balance = Costs(replanned(stage), cells_per_token, stage.data.table.attended).balance(processes)
        if balance.idle:
            cut = best_cut(stage, processes, cells_per_token)
            idle_stages.append(IdleStage(stage.name, balance, cut, fill_tokens(stage, [processes], cells_per_token)[0]))
    return idle_stages


def best_cut(stage: StageSetup, processes: int, cells_per_token: float) -> BalancedSize | None:
    """`finer_cut` of a stage's first epoch."""
    now, attended = int(stage.recipe.plan.tokens_per_micro), stage.data.table.attended
    return finer_cut(
        lambda tokens: replanned(stage, tokens_per_micro=tokens), now, processes, cells_per_token, attended
    )


def fill_tokens(
    stage: StageSetup, processes: Sequence[int], cells_per_token: float, strategy: str | None = None
) -> list[int | None]:
    """`Costs.fill_tokens` for each number of processes, with the micro-batches of an update that spans a whole epoch.

    Args:
        strategy: replaces the recipe's.
    """
    chosen = strategy or stage.recipe.plan.strategy
    whole_epoch = replanned(stage, strategy=chosen, tokens_per_step=EVERYTHING, batches_per_step=None, grow={})
    costs = Costs(whole_epoch, cells_per_token, stage.data.table.attended)
    return [costs.fill_tokens(num) for num in processes]


def share_out(setup: Setup, overrides: Sequence[str], *, fit: bool) -> tuple[Setup, list[str], list[str]]:
    """Find processes without work, and advise or change the recipe so that they have some.

    Args:
        overrides: `key=value` of the command.
        fit: set `plan.tokens_per_micro` of the recipe, as `IdleStage` says.

    Returns:
        The setup, with changed recipe and stages if `fit` changed something; the changes as `key=value`; and notes for
        the log.

    Raises:
        RecipeError: the command sets a field that `fit` would set.
    """
    fields = [override for override in overrides if override.partition("=")[0].endswith(FIELD)]
    if fit and fields:
        what = f"{fields[0]} is given, and --fit-processes would replace it"
        raise RecipeError(what, where="command line", fix="leave out one of them")
    if setup.group.size == 1:
        return setup, [], []
    idle_stages = advice(setup.stages, setup.group.size, cells_per_token(setup.model))
    changes = _changes(setup.recipe, idle_stages)
    set_to = [f"{key}={tokens}" for key, tokens in changes.items()]
    notes = _notes([stage for stage in idle_stages if stage.cut is None], [])
    if not fit or not changes:
        return setup, [], [*_notes([stage for stage in idle_stages if stage.cut is not None], set_to), *notes]
    recipe = with_sizes(setup.recipe, changes)
    stages = with_recipe(setup.stages, recipe)
    done = f"{' and '.join(set_to)}, so that all of {setup.group.size} processes have work (--fit-processes)"
    return replace(setup, recipe=recipe, stages=stages), set_to, [done, *notes]


def _notes(idle_stages: Sequence[IdleStage], changes: Sequence[str]) -> list[str]:
    """One line on these stages, with the changes that would give all processes work; none without stages."""
    if not idle_stages:
        return []
    idle, num = max(stage.balance.idle for stage in idle_stages), idle_stages[0].balance.processes
    stages = f"stage{'s' * (len(idle_stages) > 1)} {' and '.join(stage.stage for stage in idle_stages)}"
    cut = f"{' '.join(changes)} gives them some (--fit-processes sets it for a new run)"
    ways = [cut if changes else "no plan.tokens_per_micro gives all of them some"]
    if None not in (larger := [stage.tokens_per_step for stage in idle_stages]):
        ways.append(f"updates of plan.tokens_per_step={max(size or 0 for size in larger)} would fill all")
    return [f"{idle} of {num} processes have no work in most updates of {stages}: {'; '.join(ways)}"]


def _changes(recipe: Recipe, idle_stages: Sequence[IdleStage]) -> dict[str, int]:
    """Recipe fields to set: the run's, or the field of every named stage if a stage has a size of its own."""
    by_stage = any("tokens_per_micro" in stage.plan for stage in recipe.stages)
    changes: dict[str, int] = {}
    for idle in idle_stages:
        if idle.cut is not None:
            key = f"stages.{idle.stage}.{FIELD}" if by_stage else FIELD
            changes[key] = min(idle.cut.tokens_per_micro, changes.get(key, idle.cut.tokens_per_micro))
    return changes
