"""A stage of a run: its recipe, its sequences, the plans of its epochs, and the last step of all stages."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from unpad.batching.grouping import bundled, reorder_runs
from unpad.batching.plan import Plan, draw_sequences, num_windows, plan, window_places
from unpad.data.family import Data, SequenceTable
from unpad.data.sources.split import Split
from unpad.models import model_config
from unpad.models.contract import Model
from unpad.models.objective import Objective, set_objective
from unpad.recipes.recipe import Recipe, ResolvedStage, stages_of
from unpad.recipes.training import PlanSettings
from unpad.terminal.progress import counted
from unpad.terminal.table import number_of
from unpad.training.optim import Epochs, freeze


@dataclass(frozen=True, eq=False)
class StageSetup:
    """One stage of a run, resolved once.

    Args:
        recipe: the run's recipe with the stage's own fields.
        data: data of the whole run; kinds: the parts of it that the stage uses.
        train_ids, held_out_ids: ids of the stage's sequences, (n,) int64.
        longest: most positions of a sequence that the model reads.
    """

    name: str
    recipe: Recipe
    data: Data
    kinds: tuple[str, ...]
    train_ids: np.ndarray
    held_out_ids: np.ndarray
    longest: int
    steps_of: dict[int, int] = field(init=False, default_factory=dict)  # of the windows planned so far, through epochs

    @property
    def of_pairs(self) -> bool:
        """True if the stage learns from pairs of replies."""
        return bool(self.recipe.data.pairs) and "pairs" in self.kinds

    @property
    def windows(self) -> int:
        """Windows that each epoch is planned in; 1 is without windows."""
        return num_windows(len(self.train_ids), self.recipe.plan)

    @property
    def keeps_best(self) -> bool:
        """True if the stage ends with the weights of its best evaluation; without held-out data, with its last."""
        return self.recipe.train.weights == "best" and self.held_out_ids.size > 0


def make_stage(stage: ResolvedStage, data: Data, longest: int) -> StageSetup:
    """Look up the sequences of a stage."""
    kinds = stage.use or tuple(data.kinds)
    table = data.table
    used = np.isin(table.kind, [data.kinds.index(kind) for kind in kinds])
    train_ids, held_out_ids = (np.flatnonzero(used & (table.split == split)) for split in (Split.TRAIN, Split.HOLDOUT))
    return StageSetup(stage.name, stage.recipe, data, kinds, train_ids, held_out_ids, longest)


def with_recipe(stages: Sequence[StageSetup], recipe: Recipe) -> list[StageSetup]:
    """The stages with the fields of another recipe of theirs."""
    return [replace(stage, recipe=other.recipe) for stage, other in zip(stages, stages_of(recipe), strict=True)]


class Ready(NamedTuple):
    """A model that `prepare_model` has prepared.

    Args:
        num_frozen: values that do not learn.
    """

    objective: Objective
    num_frozen: int


def prepare_model(model: Model, stage: StageSetup) -> Ready:
    """Prepare a model for the steps of a stage: its trainable parameters and its loss terms.

    Raises:
        RecipeError: as `freeze` and `set_objective`.
    """
    num_frozen = freeze(model, stage.recipe.train.freeze)
    objective = set_objective(model, stage.recipe, of_pairs=stage.of_pairs)
    model.trained = objective.weights
    return Ready(objective, num_frozen)


def epoch_plan(stage: StageSetup, epoch: int, window: int = 0) -> Plan:
    """Plan one window of an epoch, which is all of it by default: a pure function of the data, the recipe and the two
    numbers."""
    return _plan(stage, epoch * stage.windows + window)


def _plan(stage: StageSetup, number: int) -> Plan:
    """Plan a window, numbered through all epochs."""
    epoch, window = divmod(number, stage.windows)
    lengths, settings, known = plan_inputs(stage, epoch, window)
    planned = plan(lengths, settings, epoch=epoch, first_step=_steps_before(stage, number), **known)
    stage.steps_of[number] = planned.num_steps
    return planned


def _steps(stage: StageSetup, number: int) -> int:
    """Steps of a window, numbered through all epochs."""
    return stage.steps_of[number] if number in stage.steps_of else _plan(stage, number).num_steps


def _steps_before(stage: StageSetup, number: int) -> int:
    """Steps of the stage before a window, as far as growth by steps depends on them."""
    grown, before = _grown(stage), 0
    for earlier in range(number):
        if before >= grown:
            break
        before += _steps(stage, earlier)
    return before


def _epoch_steps(stage: StageSetup, epoch: int) -> int:
    """Steps of an epoch. Of several windows those after the first that begins with steps of their last size are taken
    to be as long as it, since to plan them all takes as long as an epoch of plans."""
    num_steps, windows = 0, range(epoch * stage.windows, (epoch + 1) * stage.windows)
    for number in windows:
        is_grown, steps = _steps_before(stage, number) >= _grown(stage), _steps(stage, number)
        if is_grown:
            return num_steps + steps * (windows.stop - number)
        num_steps += steps
    return num_steps


def _grown(stage: StageSetup) -> int:
    """Steps of the stage after which steps grow no more, if they grow by steps."""
    settings = stage.recipe.plan
    return max(settings.grow) - 1 if settings.grow and settings.grow_per == "step" else 0


def plan_inputs(stage: StageSetup, epoch: int, window: int = 0) -> tuple[np.ndarray, PlanSettings, dict[str, Any]]:
    """Arguments of the planner for one window of an epoch: positions per sequence, settings, and the others by name."""
    recipe, data, table = stage.recipe, stage.data, stage.data.table
    ids = window_ids(stage, epoch, window)
    if any(weight != 1 for weight in table.weights):
        draw = partial(draw_sequences, weights=table.weights, seed=recipe.train.seed, epoch=epoch, window=window)
        ids = ids[draw(table.source[ids])] if not stage.of_pairs else _drawn_pairs(table, ids, draw)
    settings = recipe.plan
    lengths, longest = data.lengths((recipe.train.seed, epoch)), stage.longest
    if table.attended is not None:  # the context is only an upper bound, and padding up to it would fill the memory
        longest = min(longest, max(int(lengths.max(initial=1)), 1))
    known = {
        "seed": recipe.train.seed,
        "window": window,
        "max_tokens": longest,
        "context_field": model_config(recipe.model).context_field,
        "seq_ids": ids,
        "targets": data.count_targets,
        "bundles": table.bundle if stage.of_pairs else None,
    }
    return lengths, settings, known


def window_ids(stage: StageSetup, epoch: int, window: int) -> np.ndarray:
    """Training sequences of a window, (n,) int64, before sources are weighed; a pair of replies stays together."""
    ids = stage.train_ids
    if stage.windows == 1:
        return ids
    deal = partial(window_places, windows=stage.windows, window=window, seed=stage.recipe.train.seed, epoch=epoch)
    return _drawn_pairs(stage.data.table, ids, lambda of: deal(len(of))) if stage.of_pairs else ids[deal(len(ids))]


def replanned(stage: StageSetup, **changes: object) -> Plan:
    """The plan of a stage's first epoch, or its first window, with changed plan settings."""
    lengths, settings, known = plan_inputs(stage, 0)
    return plan(lengths, settings.model_copy(update=changes), epoch=0, **known)


def _drawn_pairs(table: SequenceTable, ids: np.ndarray, draw: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Draw pairs of replies: both replies of a pair, as often as the pair is drawn.

    Args:
        ids: (n,) sequences of pairs; draw: indices of drawn entries of an array of sources.
    """
    assert table.bundle is not None, "pairs are bundles"
    order, offsets = bundled(table.bundle[ids])
    drawn = draw(table.source[ids[order[offsets[:-1]]]])  # (num_drawn,) index into the pairs
    return ids[order[reorder_runs(offsets, drawn)[0]]]


def stage_epochs(stage: StageSetup) -> Epochs:
    """Count the steps in the epochs of a stage. Each distinct size of step is planned once, or each epoch while steps
    grow by steps.

    Epochs with steps of one size may differ by a few steps, as each is shuffled, and several windows are estimated by
    one; schedules ignore that.
    """
    train, last = stage.recipe.train, stage.recipe.train.max_epochs
    least = train.min_steps or 0
    if stage.recipe.plan.grow_per == "step":
        counts = [_epoch_steps(stage, 0)]
        while sum(counts[:-1]) < _grown(stage) and counts[-1]:
            if last is not None and len(counts) >= last and sum(counts) >= least:
                break
            if train.max_steps is not None and sum(counts) >= train.max_steps:
                break
            counts.append(_epoch_steps(stage, len(counts)))
        return Epochs(tuple(range(len(counts))), tuple(counts))
    found = Epochs((0,), (_epoch_steps(stage, 0),))
    for begin in (epoch - 1 for epoch in sorted(stage.recipe.plan.grow)):
        if last is not None and begin >= last and found.steps_before(begin) >= least:
            break
        found = Epochs((*found.first, begin), (*found.steps, _epoch_steps(stage, begin)))
    return found


def num_epochs(stage: StageSetup, epochs: Epochs) -> int | None:
    """Epochs that a stage runs: `train.max_epochs`, or as many more as `train.min_steps` asks for; None where its steps
    end it.
    """
    most, least = stage.recipe.train.max_epochs, stage.recipe.train.min_steps or 0
    if not most:
        return most
    return bisect_left(range(most + least), least, lo=most, key=epochs.steps_before)  # an epoch has a step or more


def epochs_per_evaluation(stage: StageSetup, epochs: Epochs) -> int:
    """Epochs between evaluations and checkpoints where the recipe gives no steps: 1, or in a stage that
    `train.min_steps` lengthens, so many that there are about as many of them as epochs in the recipe. Hundreds of
    readings of a few held-out examples would choose the best of them by chance.
    """
    most, given = num_epochs(stage, epochs), stage.recipe.train.max_epochs
    return max(round(most / given), 1) if most and given else 1


def last_step(stage: StageSetup, before: int, epochs: Epochs) -> int:
    """Last step of a stage that begins after step `before` of the run."""
    most, max_steps = num_epochs(stage, epochs), stage.recipe.train.max_steps
    by_epochs = None if most is None else before + epochs.steps_before(most)
    return min(end for end in (by_epochs, max_steps) if end is not None)


# Sequences that all stages together may plan in advance, a plan counting as PLAN_COST more: about two seconds.
MOST_PLANNED, PLAN_COST = 3_000_000, 500


@dataclass(frozen=True)
class LastStep:
    """Last step of a run; `exact` if every epoch before it is planned, otherwise a few steps more or less."""

    step: int
    exact: bool


@dataclass
class StageLength:
    """Steps of a stage.

    Args:
        epochs: estimate that takes epochs with equal step sizes as equally long.
        max_epochs, max_steps: limits of the stage, the first by `num_epochs`; max_steps counts the steps of the whole
            run.
        planned: steps of the epochs planned so far, by 0-based epoch.
    """

    epochs: Epochs
    max_epochs: int | None
    max_steps: int | None
    planned: dict[int, int] = field(default_factory=dict)

    def last(self, before: int) -> LastStep:
        """Last step of the stage if it begins after step `before` of the run; early stopping may end it sooner."""
        if self.max_epochs is None:
            return LastStep(max(before, self.max_steps or 0), True)
        known = {epoch: steps for epoch, steps in self.planned.items() if epoch < self.max_epochs}
        drift = sum(steps - self._estimate(epoch) for epoch, steps in known.items())
        end = before + self.epochs.steps_before(self.max_epochs) + drift
        exact = len(known) == self.max_epochs
        if self.max_steps is not None and self.max_steps <= end:
            return LastStep(max(before, self.max_steps), exact or before + sum(known.values()) >= self.max_steps)
        return LastStep(end, exact)

    def _estimate(self, epoch: int) -> int:
        return self.epochs.steps_before(epoch + 1) - self.epochs.steps_before(epoch)


@dataclass
class RunLength:
    """Steps of all stages of a run; None for a stage that trains nothing."""

    stages: list[StageLength | None]

    def last(self, stage: int, before: int) -> LastStep:
        """Last step of the run if stage number `stage` begins after step `before`."""
        end, exact = before, True
        for length in self.stages[stage:]:
            if length is not None:
                part = length.last(end)
                end, exact = part.step, exact and part.exact
        return LastStep(end, exact)

    def learn(self, stage: int, epoch: int, num_steps: int) -> None:
        """Record the steps of a planned epoch."""
        length = self.stages[stage]
        if length is not None:
            length.planned[epoch] = num_steps


def run_length(stages: Sequence[StageSetup]) -> RunLength:
    """Plan the epochs of all stages to count their steps; beyond MOST_PLANNED sequences the rest is estimated, and so
    are windows."""
    left, lengths = MOST_PLANNED, list[StageLength | None]()
    for stage in stages:
        if stage.train_ids.size == 0 or stage.recipe.train.max_epochs == 0:
            lengths.append(None)
            continue
        length, left = _stage_length(stage, left)
        lengths.append(length)
    return RunLength(lengths)


def _stage_length(stage: StageSetup, left: int) -> tuple[StageLength, int]:
    """Length of a stage, planning at most `left` sequences; also returns how many of these remain."""
    train, epochs = stage.recipe.train, stage_epochs(stage)
    most, steps = num_epochs(stage, epochs), epochs.steps[0]
    if stage.windows > 1:
        return StageLength(epochs, most, train.max_steps), left
    length = StageLength(epochs, most, train.max_steps, {0: steps})
    for epoch in counted(range(1, most or 1), f"planning {stage.name}", most, "epochs"):
        left -= stage.train_ids.size + PLAN_COST
        if left < 0 or (train.max_steps is not None and steps >= train.max_steps):
            break
        plan = epoch_plan(stage, epoch)
        length.planned[epoch] = plan.num_steps
        steps += plan.num_steps
    return length, left


# --------------------------------------------------------------------------- what tells of few steps

FEW_STEPS = 10  # in fewer there is not much to learn, whatever the data


@dataclass(frozen=True)
class StageCourse:
    """Steps of one stage that has data and epochs.

    Args:
        first, last: steps of the run that the stage lies between; equal where it has none.
        max_epochs: as `num_epochs` of the stage.
    """

    stage: StageSetup
    first: int
    last: int
    max_epochs: int | None

    @property
    def num_steps(self) -> int:
        return self.last - self.first

    @property
    def is_short(self) -> bool:
        """True if the stage has fewer steps than it should have, or than teach anything; without step, it is over."""
        most = self.stage.recipe.train.max_steps
        return self.num_steps < least_steps(self.stage) and (most is None or self.first < most)

    @property
    def longer(self) -> str:
        """Field that ends the stage: train.max_steps, or of the stage, train.min_steps or train.max_epochs."""
        train = self.stage.recipe.train
        if train.max_steps is not None and self.last >= train.max_steps:
            return "train.max_steps"
        return "train.min_steps" if self.max_epochs != train.max_epochs else "train.max_epochs"


def least_steps(stage: StageSetup) -> int:
    """Steps below which a stage has too few: `train.min_steps`, to a few, or what nothing is learnt in."""
    return max(stage.recipe.train.min_steps or 0, FEW_STEPS)


def course(stages: Sequence[StageSetup]) -> dict[str, StageCourse]:
    """Steps of the stages that have data and epochs, by name; early stopping may end a stage sooner."""
    found, at = dict[str, StageCourse](), 0
    for stage in stages:
        if stage.train_ids.size and stage.recipe.train.max_epochs != 0:
            epochs = stage_epochs(stage)
            last = last_step(stage, at, epochs) if epochs.steps[0] else at
            found[stage.name] = StageCourse(stage, at, max(at, last), num_epochs(stage, epochs))
            at = found[stage.name].last
    return found


def length_lines(stages: Sequence[StageSetup], field_of: Callable[[str, str], str]) -> list[str]:
    """A line per stage with its steps, and one more where these are few.

    Args:
        field_of: name of a field in an override for a stage, as `Recipe.field_of`.
    """
    lines, steps_of = list[str](), course(stages)
    for name, steps in steps_of.items():
        lines.append(f"{name}: {_counted(steps)}")
        if steps.is_short:
            train = steps.stage.recipe.train
            least = f"train.min_steps={train.min_steps}"
            why = f"fewer than {least}" if train.min_steps else "there is not much to learn in so few"
            size = field_of(name, "plan.tokens_per_step")
            lines.append(f"warning: {name} has few steps: {why}; raise {field_of(name, steps.longer)}, or lower {size}")
    ending = next(reversed(steps_of.values()), None)
    if ending is None or ending.is_short or ending.longer == "train.max_steps":
        return lines
    recipe, needed = ending.stage.recipe, ending.stage.data.least_updates
    if ending.last < needed and recipe.train.init_from is None and recipe.train.min_steps is None:
        size, longer = (field_of(ending.stage.name, key) for key in ("plan.tokens_per_step", ending.longer))
        few = f"note: {ending.last:,} updates in all are few, {needed:,} and more are usual"
        lines.append(f"{few}: lower {size}={recipe.plan.tokens_per_step}, or raise {longer}")
    return lines


def _counted(steps: StageCourse) -> str:
    train, num = steps.stage.recipe.train, number_of(steps.num_steps, "steps")
    if steps.longer == "train.max_steps":
        return f"{num}, then train.max_steps={train.max_steps} ends it"
    # Other epochs and windows may differ from the first by a few.
    about = "about " if steps.max_epochs != 1 or steps.stage.windows > 1 else ""
    in_epochs = f"{about}{num} in {number_of(steps.max_epochs or 0, 'epochs')}"
    if steps.longer != "train.min_steps":
        return in_epochs
    return f"{in_epochs} instead of {train.max_epochs}, for train.min_steps={train.min_steps}"
