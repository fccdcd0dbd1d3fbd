"""One batch overfit: the loss must be able to fall, and the optimizer's settings must not block it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from unpad.doctor.subject import Subject, Trial
from unpad.doctor.trials.sweep import Sweep
from unpad.recipes.recipe import Recipe
from unpad.recipes.training import OptimSettings, TrainSettings
from unpad.terminal.finding import Finding, Value
from unpad.terminal.progress import counted

STEPS, LEAST_STEPS = 60, 40
SEQUENCES, TOKENS = 16, 512
# Of the first loss: batches of most healthy recipes end below a tenth, of few more slowly, blocked ones at the start.
LEARNT, SLOWLY = 0.8, 0.9
USUAL_RATE = 1e-3
TOO_HIGH, SURELY_TOO_HIGH, TOO_LOW = 3.0, 10.0, 30.0  # times beyond the range of the sweep


@dataclass(frozen=True)
class Overfit:
    """A batch repeated.

    Args:
        start, end: loss before and after `steps` with the recipe's settings; plain: after as many with usual ones,
            without dropout, decay and warm-up; None where it was not needed.
        is_lost: whether a step was not finite, and ended it.
        culprit: the field without which it is learnt, and the loss then; None where there is none.
    """

    sequences: int
    steps: int
    start: float
    end: float
    plain: float | None
    is_lost: bool = False
    culprit: tuple[str, float] | None = None

    @property
    def learnt(self) -> bool:
        return self.end < SLOWLY * self.start

    @property
    def is_short(self) -> bool:
        """True if the time ended it before it could be judged."""
        return not self.learnt and not self.is_lost and self.steps < LEAST_STEPS


def overfit_batch(subject: Subject, found: Sweep, seconds: float) -> Overfit:
    """Repeat one batch, as often as `seconds` allow."""
    batch = subject.small_batch(SEQUENCES, TOKENS)
    if batch.num_targets == 0:
        batch = subject.small_batch(1 << 20, 1 << 20)
    trial = Trial(subject)
    began = subject.clock.now()
    start = trial.loss(batch)
    trial.step([batch])
    one = max(subject.clock.now() - began, 1e-9)
    steps = min(STEPS, max(LEAST_STEPS, int(seconds / 2 / one)))

    def repeated(trial: Trial, done: int) -> tuple[float, int, bool]:
        began, is_lost = subject.clock.now(), False
        for _ in counted(range(done, steps), "overfitting one batch", steps - done, "steps"):
            done += 1
            is_lost = trial.is_lost(trial.step([batch]))
            if is_lost or subject.clock.now() - began > seconds:
                break
        return trial.loss(batch), done, is_lost

    end, taken, is_lost = repeated(trial, 1)
    plain, culprit = None, None
    if not end < SLOWLY * start:
        usual = subject.recipe.model_copy(update={"train": _usual_train(subject.recipe)})
        optim = OptimSettings(lr=found.high or USUAL_RATE, weight_decay=0.0).model_dump()
        plain = repeated(Trial(subject, drops=False, recipe=usual, **optim), 0)[0]
        if plain < LEARNT * start:
            ends = {name: repeated(one, 0)[0] for name, one in _changed_back(subject)}
            best = min(ends, key=lambda name: ends[name], default="")
            culprit = (best, ends[best]) if best and ends[best] < LEARNT * start else None
    return Overfit(batch.num_seqs, taken, start, end, plain, is_lost, culprit)


def _usual_train(recipe: Recipe) -> TrainSettings:
    """The recipe's `train` without what weakens targets or freezes parameters."""
    return recipe.train.model_copy(update={"label_smoothing": 0.0, "freeze": []})


def _changed_back(subject: Subject) -> Iterator[tuple[str, Trial]]:
    """Trials with one setting each back at its default, for all that the recipe changes, by field."""
    optim, usual = subject.recipe.optim, OptimSettings()
    for name in ("betas", "eps", "clip", "weight_decay", "groups", "lr", "lr_scale"):
        if getattr(optim, name) != getattr(usual, name):
            yield f"optim.{name}", Trial(subject, **{name: getattr(usual, name)})
    for name in ("label_smoothing", "freeze"):
        if getattr(subject.recipe.train, name):
            train = subject.recipe.train.model_copy(update={name: getattr(TrainSettings(), name)})
            yield f"train.{name}", Trial(subject, recipe=subject.recipe.model_copy(update={"train": train}))


def judge(subject: Subject, overfit: Overfit, found: Sweep) -> list[Finding]:
    """Findings on the learning rate, and on a batch that is not learnt."""
    rate, field = subject.rate, subject.field("optim.lr")
    findings = []
    if found.low is not None and found.high is not None:
        known: dict[str, Value] = {
            "rate": rate,
            "low": found.low,
            "high": found.high,
            "middle": found.middle,
            "field": field,
        }
        above, below = rate / found.high, found.low / rate
        if above > SURELY_TOO_HIGH or (above > TOO_HIGH and not overfit.learnt):
            findings.append(Finding("lr_high", "fault", above, (field,), known))
        elif below > TOO_LOW and not overfit.learnt and not overfit.is_short:
            more: dict[str, Value] = {"steps": overfit.steps, "start": overfit.start, "end": overfit.end}
            findings.append(Finding("lr_low", "fault", below, (field,), {**known, **more}))
    if overfit.learnt or overfit.plain is None or overfit.is_short:
        return findings
    values: dict[str, Value] = {"sequences": overfit.sequences, "steps": overfit.steps, "start": overfit.start}
    if not overfit.plain < LEARNT * overfit.start:
        findings.append(Finding("by_heart", "fault", overfit.plain, ("data", "model"), values))
    elif not findings and overfit.culprit is not None:
        name, values["plain"] = overfit.culprit
        section, _, own = name.partition(".")
        usual = getattr({"optim": OptimSettings(), "train": TrainSettings()}[section], own)
        values |= {"field": subject.field(name), "default": json.dumps(usual)}
        findings.append(Finding("setting", "fault", overfit.end, (subject.field(name),), values))
    elif not findings:
        values |= {"plain": overfit.plain, "rate": found.high or USUAL_RATE, "field": field}
        findings.append(Finding("by_heart_settings", "fault", overfit.end, ("optim",), values))
    return findings
