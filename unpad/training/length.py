"""Length of a run before it starts: the steps of every stage in order, and what tells of few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unpad.terminal.table import number_of
from unpad.training.stage import StageSetup, epoch_plan, last_step, num_epochs, stage_epochs

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
            plan = epoch_plan(stage, 0)
            epochs = stage_epochs(stage, plan)
            last = last_step(stage, at, epochs) if plan.num_steps else at
            found[stage.name] = StageCourse(stage, at, max(at, last), num_epochs(stage, epochs))
            at = found[stage.name].last
    return found


def length_lines(stages: Sequence[StageSetup], field_of: Callable[[str, str], str]) -> list[str]:
    """A line per stage with its steps, and one more where these are few.

    Args:
        field_of: name of a field in an override for a stage, as `Recipe.field_of`.
    """
    lines = list[str]()
    for name, steps in course(stages).items():
        lines.append(f"{name}: {_counted(steps)}")
        if steps.is_short:
            train = steps.stage.recipe.train
            least = f"train.min_steps={train.min_steps}"
            why = f"fewer than {least}" if train.min_steps else "there is not much to learn in so few"
            size = field_of(name, "plan.tokens_per_step")
            lines.append(f"warning: {name} has few steps: {why}; raise {field_of(name, steps.longer)}, or lower {size}")
    return lines


def _counted(steps: StageCourse) -> str:
    train, num = steps.stage.recipe.train, number_of(steps.num_steps, "steps")
    if steps.longer == "train.max_steps":
        return f"{num}, then train.max_steps={train.max_steps} ends it"
    about = "about " if steps.max_epochs != 1 else ""  # other epochs may differ from the first by a few
    in_epochs = f"{about}{num} in {number_of(steps.max_epochs or 0, 'epochs')}"
    return in_epochs + (
        f" instead of {train.max_epochs}, for train.min_steps={train.min_steps}"
        if steps.longer == "train.min_steps"
        else ""
    )
