"""Settings of the optimizer and the schedule that leave nothing to learn, whatever the data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from unpad.doctor.finding import Finding, Severity, Value
from unpad.doctor.heart import Heart
from unpad.doctor.subject import Subject

LONG_WARMUP, WHOLE_WARMUP = 0.5, 0.9
FEW_STEPS, RATHER_FEW = 10, 30
SHORT_HALF, VERY_SHORT_HALF = 300.0, 100.0  # steps in which decay alone would halve a matrix
USUAL_DECAY = 0.01
MUCH_DROPPED, MOST_DROPPED = 0.5, 0.8
MUCH_CLIPPED, MOST_CLIPPED = 100.0, 1000.0


def check_schedule(subject: Subject) -> list[Finding]:
    """Warm-up against the length of the stage, and that length."""
    optim, steps, found = subject.recipe.optim, subject.num_steps, list[Finding]()
    if optim.schedule in ("cosine", "warmup") and optim.warmup >= LONG_WARMUP:
        field = subject.field("optim.warmup")
        values: dict[str, Value] = {"warm": math.ceil(optim.warmup * steps), "steps": steps, "field": field}
        severity: Severity = "fault" if optim.warmup >= WHOLE_WARMUP else "warning"
        found.append(Finding("warmup", severity, optim.warmup, (field,), values))
    if steps < RATHER_FEW:
        fields = (subject.field("plan.tokens_per_step"), subject.field("train.max_epochs"))
        found.append(Finding("few_steps", "warning" if steps < FEW_STEPS else "note", steps, fields))
    return found


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


def check_dropout(subject: Subject, heart: Heart) -> list[Finding]:
    """The largest dropout of the model."""
    found = sorted(_dropouts(subject.setup.model.config.model_dump(), "model"), key=lambda one: -one[1])
    if not found or found[0][1] <= MUCH_DROPPED:
        return []
    field, share = found[0]
    values: dict[str, Value] = {"kept": 1 - share, "layer": field, "steps": heart.steps, "field": field}
    return [Finding("dropout", "fault" if share >= MOST_DROPPED else "warning", heart.end, (field,), values)]


def _dropouts(section: dict[str, Any], path: str) -> Iterator[tuple[str, float]]:
    """Fields of a section that are shares of numbers to drop."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _dropouts(value, f"{path}.{name}")
        elif "dropout" in name and isinstance(value, float):
            yield f"{path}.{name}", value


def check_clip(subject: Subject, norms: list[float]) -> list[Finding]:
    """The clipping threshold against the norms of some steps."""
    clip = subject.recipe.optim.clip
    if clip is None or not norms:
        return []
    least = min(norms) / clip
    if not least > MUCH_CLIPPED:
        return []
    field = subject.field("optim.clip")
    values: dict[str, Value] = {"clip": clip, "norm": sorted(norms)[len(norms) // 2], "field": field}
    return [Finding("clip", "fault" if least > MOST_CLIPPED else "warning", least, (field,), values)]
