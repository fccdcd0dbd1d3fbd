"""Length of a run: the last step of all its stages, from the plans of their epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unpad.terminal.progress import counted
from unpad.training.optim import Epochs
from unpad.training.stage import StageSetup, epoch_plan, stage_epochs

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
        max_epochs, max_steps: limits of the stage; max_steps counts the steps of the whole run.
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
    """Plan the epochs of all stages to count their steps; beyond MOST_PLANNED sequences the rest is estimated."""
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
    train, first = stage.recipe.train, epoch_plan(stage, 0)
    length = StageLength(stage_epochs(stage, first), train.max_epochs, train.max_steps, {0: first.num_steps})
    steps = first.num_steps
    for epoch in counted(range(1, train.max_epochs or 1), f"planning {stage.name}", train.max_epochs, "epochs"):
        left -= stage.train_ids.size + PLAN_COST
        if left < 0 or (train.max_steps is not None and steps >= train.max_steps):
            break
        plan = epoch_plan(stage, epoch)
        length.planned[epoch] = plan.num_steps
        steps += plan.num_steps
    return length, left
