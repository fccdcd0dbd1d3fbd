"""Settings of the optimizer and the schedule that leave nothing to learn, whatever the data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from unpad.doctor.subject import Subject, Trial
from unpad.doctor.trials.overfit import Overfit
from unpad.recipes.training import OptimSettings
from unpad.terminal.finding import Finding, Severity, Value
from unpad.training.optim import Schedule, make_optimizer
from unpad.training.stage import stage_epochs

LONG_WARMUP, WHOLE_WARMUP = 0.5, 0.9
FEW_STEPS, RATHER_FEW = 10, 30
SHORT_HALF, VERY_SHORT_HALF = 300.0, 100.0  # steps in which decay alone would halve a matrix
USUAL_DECAY = 0.01
MUCH_DROPPED, MOST_DROPPED = 0.5, 0.8
MUCH_CLIPPED, MOST_CLIPPED = 100.0, 1000.0
LITTLE_AREA, NO_AREA = 0.08, 0.03  # mean of the rate that is run, over its peak
SAMPLED_STEPS = 2000  # of a schedule
STALE = 0.5  # of the stage, that the mean of gradients reaches back
COARSE, VERY_COARSE = 3.0, 30.0  # epsilon over the size of a gradient's numbers
MANY_CYCLES = 5  # of the schedule with restarts
LARGE_STEP, WILD_STEP = 5.0, 20.0  # rate times the inputs of an output


def check_schedule(subject: Subject) -> list[Finding]:
    """Warm-up against the length of the stage, and that length."""
    optim, steps, found = subject.recipe.optim, subject.num_steps, list[Finding]()
    if optim.schedule in ("cosine", "warmup") and optim.warmup >= LONG_WARMUP:
        field = subject.field("optim.warmup")
        values: dict[str, Value] = {"warm": math.ceil(optim.warmup * steps), "steps": steps, "field": field}
        severity: Severity = "fault" if optim.warmup >= WHOLE_WARMUP else "warning"
        found.append(Finding("warmup", severity, optim.warmup, (field,), values))
    else:
        found += _area(subject)
    if steps < RATHER_FEW:
        advice = subject.longer
        fields = (subject.field("plan.tokens_per_step"), *advice)
        values = {"longer": " or ".join(advice), "field": fields[0]}
        found.append(Finding("few_steps", "warning" if steps < FEW_STEPS else "note", steps, fields, values))
    return found


def _area(subject: Subject) -> list[Finding]:
    """The rate that is run over the whole stage, against its peak."""
    optim, steps = subject.recipe.optim, subject.num_steps
    epochs = stage_epochs(subject.stage, subject.plan)
    schedule, peak = Schedule(optim, epochs, steps), subject.rate
    taken = np.unique(np.linspace(0, steps - 1, SAMPLED_STEPS).astype(int)).tolist()
    cycles = optim.restarts + 1 if optim.first_cycle is None else _cycles(optim, steps)
    if optim.schedule == "restarts" and optim.per == "update" and cycles >= MANY_CYCLES and steps < FEW_STEPS * cycles:
        names = tuple(subject.field(f"optim.{name}") for name in ("restarts", "first_cycle", "schedule"))
        values: dict[str, Value] = {"steps": steps / cycles, "field": names[0]}
        return [Finding("many_restarts", "warning", cycles, names, values)]
    rates = np.array([schedule.rate(step, int(epochs.epochs_before(step))) for step in taken]) / peak
    area = float(rates.mean())
    if area >= LITTLE_AREA:
        return []
    names = {
        "exponential": ("decay", "decay_epochs"),
        "restarts": ("first_cycle", "restarts", "floor"),
        "cosine": ("warmup", "floor"),
    }.get(optim.schedule, ("warmup",))
    fields = tuple(subject.field(f"optim.{name}") for name in ("schedule", *names))
    last, field = float(rates[-1] * peak), subject.field("optim.schedule")
    values = {"schedule": optim.schedule, "last": last, "peak": peak, "field": field}
    values["others"] = ", ".join(fields[1:])
    return [Finding("schedule", "fault" if area < NO_AREA else "warning", area, fields, values)]


def _cycles(optim: OptimSettings, steps: int) -> int:
    """The number of cycles of which the first has `optim.first_cycle` steps."""
    length, end, num = float(optim.first_cycle or steps), 0.0, 0
    while end < steps and num < steps:
        end, length, num = end + length, length * optim.cycle_factor, num + 1
    return num


def check_betas(subject: Subject) -> list[Finding]:
    """The memory of Adam's two means: against each other, and against the stage."""
    (first, second), field = subject.recipe.optim.betas, subject.field("optim.betas")
    reach = math.inf if first >= 1 else 1 / (1 - first)
    values: dict[str, Value] = {"first": first, "second": second, "field": field, "steps": subject.num_steps}
    if first > math.sqrt(max(second, 0.0)):  # Reddi et al. 2018, arXiv 1904.09237: Adam need not converge
        return [Finding("betas", "warning" if first < 0.98 else "fault", reach, (field,), values)]
    if reach > max(STALE * subject.num_steps, 20):
        return [Finding("stale", "fault" if reach > 2 * subject.num_steps else "warning", reach, (field,), values)]
    return []


def check_eps(subject: Subject, norms: list[float]) -> list[Finding]:
    """Adam's epsilon against the numbers of a gradient: where it is larger, steps shrink by as much."""
    optim = subject.recipe.optim
    finite = sorted(norm for norm in norms if math.isfinite(norm))
    num = sum(parameter.numel() for parameter in subject.model.parameters() if parameter.requires_grad)
    if not finite or not num:
        return []
    norm = finite[len(finite) // 2]
    size = norm / math.sqrt(num)
    times = optim.eps / max(size, 1e-30)
    if times < COARSE or optim.eps <= OptimSettings().eps:
        return []
    field = subject.field("optim.eps")
    values: dict[str, Value] = {"eps": optim.eps, "size": size, "field": field}
    return [Finding("eps", "fault" if times >= VERY_COARSE else "warning", times, (field,), values)]


def check_step_size(subject: Subject) -> list[Finding]:
    """The learning rate against the width of the layers: a step of Adam moves each weight by about the rate, so that an
    output moves by the rate times the number of its inputs.

    After Yang et al. 2022, arXiv 2203.03466.
    """
    optim, worst = subject.recipe.optim, (0.0, 0.0, 0)
    for group in make_optimizer(Trial(subject).model, optim).param_groups:
        sizes = [(parameter.numel(), parameter.shape[-1]) for parameter in group["params"] if parameter.dim() == 2]
        if sizes:
            inputs = sum(num * width for num, width in sizes) / sum(num for num, _ in sizes)
            worst = max(worst, (subject.rate * group["lr_scale"] * inputs, inputs, group["part"]))
    times, inputs, part = worst
    if times < LARGE_STEP:
        return []
    names = [subject.field("optim.lr")]
    if part < len(optim.groups) and optim.groups[part].lr_scale > 1:
        names.insert(0, "optim.groups")
    elif optim.lr_scale > 1:
        names.insert(0, subject.field("optim.lr_scale"))
    values: dict[str, Value] = {"rate": subject.rate, "inputs": inputs, "field": names[0]}
    return [Finding("step_size", "fault" if times >= WILD_STEP else "warning", times, tuple(names), values)]


def check_decay(subject: Subject) -> list[Finding]:
    """Weight decay against the learning rate: how fast a matrix would fade without gradients."""
    optim = subject.recipe.optim
    groups = [(group.weight_decay, group.lr_scale) for group in optim.groups if group.weight_decay is not None]
    strongest = max([optim.weight_decay, *(decay * scale for decay, scale in groups)])
    step = subject.rate * strongest
    half = math.log(2) / step if step else math.inf
    if half > SHORT_HALF:
        return []
    field = subject.field("optim.weight_decay")
    values: dict[str, Value] = {"half": half, "steps": subject.num_steps, "usual": USUAL_DECAY, "field": field}
    return [Finding("decay", "fault" if half < VERY_SHORT_HALF else "warning", step, (field,), values)]


def check_dropout(subject: Subject, overfit: Overfit) -> list[Finding]:
    """The largest dropout of the model."""
    found = sorted(_dropouts(subject.setup.model.config.model_dump(), "model"), key=lambda one: -one[1])
    if not found or found[0][1] <= MUCH_DROPPED:
        return []
    field, share = found[0]
    values: dict[str, Value] = {"kept": 1 - share, "layer": field, "steps": overfit.steps, "field": field}
    return [Finding("dropout", "fault" if share >= MOST_DROPPED else "warning", overfit.end, (field,), values)]


def _dropouts(section: dict[str, Any], path: str) -> Iterator[tuple[str, float]]:
    """Fields of a section that are shares of numbers to drop."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _dropouts(value, f"{path}.{name}")
        elif "dropout" in name and isinstance(value, float):
            yield f"{path}.{name}", value


def check_clip(subject: Subject, norms: list[float]) -> list[Finding]:
    """The smallest clipping threshold, of all parameters or of a group, against the norms of some steps."""
    optim = subject.recipe.optim
    given = [(optim.clip, subject.field("optim.clip")), *((group.clip, "optim.groups") for group in optim.groups)]
    known = [(clip, field) for clip, field in given if clip is not None]
    if not known or not norms:
        return []
    clip, field = min(known)
    least = min(norms) / clip
    if not least > MUCH_CLIPPED:
        return []
    values: dict[str, Value] = {"clip": clip, "norm": sorted(norms)[len(norms) // 2], "field": field}
    return [Finding("clip", "fault" if least > MOST_CLIPPED else "warning", least, (field,), values)]
