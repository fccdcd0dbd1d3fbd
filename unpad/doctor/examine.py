"""`unpad doctor`: the checks in the order in which they depend on each other, and their result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from unpad.doctor import settings, trials
from unpad.doctor.carry import STEPS as CARRY_STEPS
from unpad.doctor.carry import Carry, carry_over, labels_random, transfer_of
from unpad.doctor.finding import Finding, Found, Language, finding, ranked
from unpad.doctor.layers import Layers, check_layers, frozen, starved
from unpad.doctor.lines import drawing, fact_lines, word
from unpad.doctor.subject import Subject, TimeBudget, open_subject
from unpad.doctor.trials import (
    LEAST_RATES,
    LEAST_REPEATS,
    Overfit,
    Steps,
    Sweep,
    System,
    overfit_batch,
    sweep,
    take_steps,
)
from unpad.machine.load import LoadMeter
from unpad.terminal.progress import progress
from unpad.terminal.table import wrapped

SECONDS = 120.0


@dataclass(frozen=True)
class Tried:
    """Copies of the model, trained for some steps each, and what that showed."""

    findings: list[Finding]
    steps: Steps
    sweep: Sweep
    overfit: Overfit
    carry: Carry | None


@dataclass(frozen=True)
class Examination:
    """Findings by rank, and what they rest on."""

    subject: Subject
    findings: list[Finding]
    layers: Layers
    tried: Tried | None
    threads: int
    cores: int
    seconds: float

    @property
    def sweep(self) -> Sweep | None:
        return None if self.tried is None else self.tried.sweep

    @property
    def troubles(self) -> list[Finding]:
        """Findings above a note."""
        return [item for item in self.findings if item.severity != "note"]

    def lines(self, language: Language) -> list[str]:
        """The examination as text."""
        subject, num = self.subject, len(self.troubles)
        parameters = sum(p.numel() for p in subject.model.parameters())
        names = {"name": subject.name, "stage": subject.stage.name}
        head = word("subject", language, parameters=parameters, steps=subject.num_steps, **names)
        if subject.folder is not None:
            head += word("of_run", language, step=subject.step)
        verdict = word("nothing" if num == 0 else "one_trouble" if num == 1 else "troubles", language, number=num)
        lines = wrapped(head)
        if subject.other_stages:
            others = ", ".join(subject.other_stages)
            lines += wrapped(word("others", language, others=others, stage=subject.stage.name))
        if subject.stage.of_pairs:
            lines += wrapped(word("of_pairs", language))
        lines.append(word("seconds", language, verdict=verdict, number=self.seconds))
        for rank, item in enumerate(self.findings, 1):
            lines += ["", *item.lines(rank, language)]
        lines += ["", word("looked", language), *fact_lines(self._facts(language))]
        if self.sweep is not None and len(self.sweep.rates):
            lines += ["", *drawing(self.sweep, subject.rate, language)]
        return lines

    def _facts(self, language: Language) -> list[tuple[str, str]]:
        subject, facts = self.subject, list[tuple[str, str]]()
        if self.tried is not None:
            overfit, rates = self.tried.overfit, self.tried.sweep
            values = {
                "start": overfit.start,
                "end": overfit.end,
                "steps": overfit.steps,
                "sequences": overfit.sequences,
            }
            facts.append((word("heart", language), word("heart_value", language, **values)))
            if rates.low is not None and rates.high is not None:
                range_of = {"rate": subject.rate, "low": rates.low, "high": rates.high}
                facts.append((word("rate", language), word("rate_value", language, **range_of)))
            facts += _time_facts(self.tried.steps, language)
            norm = {"norm": self.layers.norm, "blocks": len(self.layers.blocks)}
            facts.append((word("norm", language), word("norm_value", language, **norm)))
        kernels = subject.setup.environment["kernels"]
        cores = word("cores_value", language, threads=self.threads, cores=self.cores, kernels=kernels)
        return [*facts, (word("cores", language), cores)]

    def to_json(self, language: Language) -> dict[str, Any]:
        """Findings and measurements for programs."""
        findings = [item.to_json(language) for item in self.findings]
        subject = {"name": self.subject.name, "stage": self.subject.stage.name, "step": self.subject.step}
        blocks = [dict(zip(("name", "output", "gradient"), block, strict=True)) for block in self.layers.blocks]
        layers = {"gradient": self.layers.norm, "blocks": blocks}
        tried = {} if self.tried is None else _measured(self.tried, self.subject.rate)
        return {**subject, "seconds": self.seconds, "findings": findings, "layers": layers, **tried}


def _time_facts(steps: Steps, language: Language) -> list[tuple[str, str]]:
    """Seconds of a step, and the shares of its parts."""
    whole = max(steps.compute, 1e-9)
    values = {name: getattr(steps, name) / whole for name in ("forward", "backward", "optimize", "load")}
    said = word("step_value", language, seconds=whole, **values)
    return [(word("step", language), said), (word("saved", language), word("saved_value", language, save=steps.save))]


def _measured(tried: Tried, rate: float) -> dict[str, Any]:
    """Measurements of the trials as JSON values."""
    rates, carry = tried.sweep, tried.carry
    curve = {"rates": rates.rates.tolist(), "losses": rates.losses.tolist(), "low": rates.low, "high": rates.high}
    return {
        "steps": vars(tried.steps),
        "sweep": {**curve, "recipe": rate},
        "by_heart": {**vars(tried.overfit), "learnt": tried.overfit.learnt},
        "labels": None if carry is None else vars(carry),
    }


def examine(
    name: str, overrides: Sequence[str] = (), seconds: float = SECONDS, system: System | None = None
) -> Examination:
    """Examine a recipe, or a run by its directory or name; writes nothing.

    Args:
        overrides: `key=value` changes of the recipe.
        seconds: for all of it, about.
        system: readings of the machine; default those of this one.

    Raises:
        RecipeError, SourceError, CheckpointError: it cannot be trained or used at all.
    """
    system = system or System()
    clock = TimeBudget(seconds, system.now)
    meter = LoadMeter(system.busy_seconds, system.own_seconds, clock.now)
    with progress("reading the data"):
        subject = open_subject(name, overrides, clock)
    with progress("looking at the data"):
        findings = [*_family(subject).look(subject), *settings.look(subject)]
    layers = check_layers(subject)
    tried = _tried(subject, system, meter, layers) if layers.finite else None
    findings = [*layers.findings, *findings, *(tried.findings if tried is not None else [])]
    return Examination(subject, ranked(findings), layers, tried, system.threads(), system.cores(), clock.spent)


def _family(subject: Subject) -> Any:
    """The module with the findings of the subject's family, or with those of any family where it has none."""
    name = subject.data.family
    return import_module(f"unpad.doctor.{name if (Path(__file__).parent / f'{name}.py').is_file() else 'rows'}")


def _tried(subject: Subject, system: System, meter: LoadMeter, layers: Layers) -> Tried:
    """Train copies of the model for some steps each, with a share of the time that is left for each trial."""
    clock = subject.clock
    steps = take_steps(subject, clock.share(0.2))
    rates = sweep(subject, clock.share(0.4))
    overfit = overfit_batch(subject, rates, clock.share(0.5))
    transfer = transfer_of(subject)
    carry = None if transfer is None else carry_over(subject, transfer, rates, clock.share(0.7))
    load = meter.read()
    findings = [
        *trials.lr_high(subject, overfit, rates),
        *trials.lr_low(subject, overfit, rates),
        *settings.clip(subject, steps.norms),
        *settings.eps(subject, steps.norms),
        *starved(subject),
        *frozen(subject, layers, steps.unmoved),
        *trials.by_heart(subject, overfit, rates),
        *(labels_random(subject, carry) if carry is not None else []),
        *trials.loader(steps),
        *trials.overhead(subject, steps),
        *trials.padding(subject),
        *trials.threads(subject, system, load),
        *trials.neighbour(load, system.cores()),
        *short(clock.seconds, rates, overfit, carry),
    ]
    return Tried(findings, steps, rates, overfit, carry)


@finding(
    "short", "note",
    en=("Only {number:.0f} of at least {least} {what} could be tried in the time: nothing is said about them.",
        "give more time: --seconds {seconds}"),
    zh=("在规定时间内只试了 {number:.0f} {what}，至少要 {least}：对此不作判断。", "给更多时间：--seconds {seconds}"),
)  # fmt: skip
def short(given: float, rates: Sweep, overfit: Overfit, carry: Carry | None) -> Found | None:
    """The trial that was cut short the most, too short to be judged."""
    cut = [
        (rates.short, LEAST_RATES, ("learning rates", "个学习率"), bool(rates.short)),
        (overfit.steps, LEAST_REPEATS, ("steps on one batch", "步（同一批）"), overfit.is_short),
        (carry.steps if carry else 0, CARRY_STEPS, ("steps on labelled sequences", "步（带标签的样本）"),
         carry is not None and carry.is_short),
    ]  # fmt: skip
    judged = [(taken, least, what) for taken, least, what, is_short in cut if is_short]
    if not judged:
        return None
    taken, least, what = min(judged, key=lambda item: item[0] / item[1])
    wanted = given * max(1.5 * least / max(taken, 1), 2.0)  # machines slow down
    return Found(taken, "--seconds", least=least, what=what, seconds=10 * math.ceil(wanted / 10))
