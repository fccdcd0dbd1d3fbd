"""`unpad doctor`: the checks in the order in which they depend on each other, and their result."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from unpad.doctor import settings, trials
from unpad.doctor.finding import Finding, Found, Language, finding, listed, ranked, serious
from unpad.doctor.layers import Layers, check_layers, frozen
from unpad.doctor.subject import Subject, TimeBudget, open_subject
from unpad.doctor.trials import LOWEST, Carry, Overfit, Steps, Sweep, System
from unpad.machine import LoadMeter
from unpad.run.report.svg import WIDE, Axes, Curve, picture
from unpad.storage import write_atomic
from unpad.terminal.progress import progress
from unpad.terminal.table import described, wrapped

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
    seconds: float

    @property
    def troubles(self) -> list[Finding]:
        """Findings above a note."""
        return serious(self.findings)

    def lines(self, language: Language) -> list[str]:
        """The examination as text."""
        subject, num, zh = self.subject, len(self.troubles), language == "zh"
        size, stage, steps = sum(p.numel() for p in subject.model.parameters()), subject.stage.name, subject.num_steps
        head = f"{subject.name}: stage {stage}, {size:,} parameters, {steps:,} steps"
        of_run = f", weights of step {subject.step:,}"
        if zh:
            head = f"{subject.name}：阶段 {stage}，{size:,} 个参数，{steps:,} 步"
            of_run = f"，第 {subject.step:,} 步的权重"
        lines, rest = wrapped(head + of_run * (subject.folder is not None)), ", ".join(subject.other_stages)
        if rest:
            words = (f"Not looked at: stage {rest}. stages.{stage}.train.max_epochs=0 goes on to it.",
                     f"未检查阶段 {rest}；加上 stages.{stage}.train.max_epochs=0 就检查下一个。")  # fmt: skip
            lines += wrapped(words[zh])
        if subject.stage.of_pairs:
            words = ("Steps of pairs are not tried: rows, settings and weights are looked at.",
                     "偏好对的训练步不作试验：只检查数据、设置和权重。")  # fmt: skip
            lines += wrapped(words[zh])
        verdicts = {0: ("nothing is wrong, as far as these checks see", "就这些检查来看，没有问题"),
                    1: ("one thing to mend", "有 1 处需要处理")}  # fmt: skip
        many = (f"{num} things to mend, the worst first", f"有 {num} 处需要处理，最严重的在前")
        verdict = verdicts.get(num, many)[zh]
        lines.append(f"{verdict}（{self.seconds:.0f} 秒）" if zh else f"{verdict} ({self.seconds:.0f} s)")
        lines += listed(self.findings, language)
        if self.tried is None:
            return lines
        facts = _facts(self.tried, subject.rate, zh)
        return [*lines, "", "测量结果" if zh else "What was measured", *described(*zip(*facts, strict=True))]

    def to_json(self, language: Language) -> dict[str, Any]:
        """Findings and measurements for programs."""
        findings = [item.to_json(language) for item in self.findings]
        subject = {"name": self.subject.name, "stage": self.subject.stage.name, "step": self.subject.step}
        blocks = [dict(zip(("name", "output", "gradient"), block, strict=True)) for block in self.layers.blocks]
        layers = {"gradient": self.layers.norm, "blocks": blocks}
        tried = {} if self.tried is None else _measured(self.tried, self.subject.rate)
        return {**subject, "seconds": self.seconds, "findings": findings, "layers": layers, **tried}


def _facts(tried: Tried, rate: float, zh: bool) -> list[tuple[str, str]]:
    """Names and measurements of the trials in words."""
    batch, rates, steps = tried.overfit, tried.sweep, tried.steps
    loss, share = (f"{batch.start:.3g}", f"{batch.end:.2g}"), f"{steps.load / max(steps.compute, 1e-9):.0%}"
    facts = [("a batch, overfit", "记住一批",
              f"loss {loss[0]} to {loss[1]} in {batch.steps} steps, {batch.sequences} sequences",
              f"损失 {loss[0]} 到 {loss[1]}，{batch.steps} 步，{batch.sequences} 个样本")]  # fmt: skip
    if rates.low is not None and rates.high is not None:
        ends = f"{rates.low:.1e}", f"{rates.high:.1e}"
        facts.append(("learning rate", "学习率", f"{rate:.1e}; learns from {ends[0]} to {ends[1]}",
                      f"{rate:.1e}；合适范围 {ends[0]} 到 {ends[1]}"))  # fmt: skip
    facts.append(("a step", "一步", f"{steps.compute:.3f} s; loading beside it {share}",
                  f"{steps.compute:.3f} 秒；同时读取数据 {share}"))  # fmt: skip
    return [(fact[zh], fact[2 + zh]) for fact in facts]


def _measured(tried: Tried, rate: float) -> dict[str, Any]:
    """Measurements of the trials as JSON values."""
    rates, carry = tried.sweep, tried.carry
    curve = {"rates": rates.rates.tolist(), "losses": rates.losses.tolist(), "low": rates.low, "high": rates.high}
    return {
        "steps": vars(tried.steps),
        "sweep": {**curve, "recipe": rate},
        "by_heart": vars(tried.overfit) | {"learnt": tried.overfit.learnt},
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
        findings = look(subject)
    layers = check_layers(subject)
    tried = _tried(subject, system, meter, layers) if layers.finite else None
    findings = [*layers.findings, *findings, *(tried.findings if tried is not None else [])]
    return Examination(subject, ranked(findings), layers, tried, clock.spent)


def look(subject: Subject) -> list[Finding]:
    """Findings that need no trial: of the family, or of any where it has no file here, and of the settings."""
    name = subject.data.family
    name = name if (Path(__file__).parent / f"{name}.py").is_file() else "rows"
    return [*import_module(f"unpad.doctor.{name}").look(subject), *settings.look(subject)]


def _tried(subject: Subject, system: System, meter: LoadMeter, layers: Layers) -> Tried:
    """Train copies of the model for some steps each, with a share of the time that is left for each trial."""
    clock = subject.clock
    steps = trials.take_steps(subject, clock.share(0.2))
    rates = trials.sweep(subject, clock.share(0.4))
    overfit = trials.overfit_batch(subject, rates, clock.share(0.5))
    carry = trials.carry_over(subject, rates, clock.share(0.7))
    load = meter.read()
    findings = [
        *trials.lr_high(subject, overfit, rates),
        *trials.lr_low(subject, overfit, rates),
        *frozen(subject, layers, steps.unmoved),
        *trials.by_heart(subject, overfit, rates),
        *(trials.labels_random(subject, carry) if carry else []),
        *trials.loader(steps),
        *trials.threads(subject, system, load),
        *short(clock.seconds, rates, overfit, carry),
    ]
    return Tried(findings, steps, rates, overfit, carry)


@finding("short", "note",
    en=("Only {number:.0f} of at least {least} {what} could be tried in the time: nothing is said about them.",
        "give more time: --seconds {seconds}"),
    zh=("规定时间内只试了 {number:.0f} {what}，至少要 {least}：对此不作判断。",
        "给更多时间：--seconds {seconds}"))  # fmt: skip
def short(given: float, rates: Sweep, overfit: Overfit, carry: Carry | None) -> Found | None:
    """The trial that was cut short the most, too short to be judged."""
    cut = [
        (rates.short, trials.LEAST_RATES, ("learning rates", "个学习率"), bool(rates.short)),
        (overfit.steps, trials.LEAST_REPEATS, ("steps on one batch", "步（同一批）"), overfit.is_short),
        (carry.steps if carry else 0, trials.CARRY_STEPS, ("steps on labelled sequences", "步（带标签的样本）"),
         carry is not None and carry.is_short),
    ]  # fmt: skip
    judged = [(taken, least, what) for taken, least, what, is_short in cut if is_short]
    if not judged:
        return None
    taken, least, what = min(judged, key=lambda item: item[0] / item[1])
    wanted = given * max(1.5 * least / max(taken, 1), 2.0)  # machines slow down
    return Found(taken, "--seconds", least=least, what=what, seconds=10 * math.ceil(wanted / 10))


# --------------------------------------------------------------------------- text and pictures


def write_picture(path: Path, sweep: Sweep, rate: float, language: Language) -> None:
    """Draw the loss over the learning rate, with the range and the recipe's own rate.

    Raises:
        DiskError: the file cannot be written.
    """
    shown, zh, num = sweep.losses <= 1.5, language == "zh", len(sweep.rates)  # what diverges would press the rest flat
    marks = [(f"{rate:.1e}，本配方" if zh else f"{rate:.1e}, the recipe's", float(np.log10(rate)))]
    marks += [(f"{end:.1e}", float(np.log10(end))) for end in (sweep.low, sweep.high) if end]
    title = f"损失随学习率的变化，{num} 步" if zh else f"Loss over the learning rate, {num} steps"
    axes = Axes(size=WIDE, begin=float(np.log10(LOWEST)), powers=True, over="学习率" if zh else "learning rate")
    curve = Curve("main", [(np.log10(sweep.rates[shown]), sweep.losses[shown])])
    write_atomic(path, picture(title, curve, axes, marks))
