"""Settings of a recipe that leave nothing to learn, whatever the data: of the optimizer, the schedule, and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from unpad.doctor.subject import Subject, Trial
from unpad.doctor.trials.overfit import Overfit
from unpad.recipes.training import OptimSettings
from unpad.terminal.finding import Finding, Severity, Value
from unpad.training.length import FEW_STEPS, least_steps
from unpad.training.optim import Schedule, make_optimizer
from unpad.training.stage import stage_epochs

LONG_WARMUP, WHOLE_WARMUP = 0.5, 0.9
RATHER_FEW = 30
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
    least = least_steps(subject.stage)
    if steps < max(least, RATHER_FEW):
        advice = subject.longer
        fields = (subject.field("plan.tokens_per_step"), *advice)
        values = {"longer": " or ".join(advice), "field": fields[0]}
        found.append(Finding("few_steps", "warning" if steps < least else "note", steps, fields, values))
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
    """The number of cycles, where the first has `optim.first_cycle` steps."""
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


NARROW = 2  # channels of a head
SHORT_WINDOW = 4  # tokens
LEAST_WIDTH = 8
NARROW_HIDDEN, LARGE_EPS, MOST_PATCHES = 16, 0.1, 0.8  # of the width, of norms, and of the patches
LEAST_BASE = 10.0  # of rotary frequencies
FEW_SEQUENCES, FEW_TARGETS, MANY_STEPS = 1.5, 48.0, 100  # of a step, and steps of the stage
MOSTLY_HELD = 0.75  # of the rows
FEW_HELD, FEW_HELD_TARGETS, MANY_TRAINED = 4, 100, 100  # held-out rows and their targets, and rows to train on
# Largest sensible values of augmentations, which leave the content to be seen.
LARGEST = {
    "images.shift": 0.5, "images.scale": 2.0, "images.zoom": 2.0, "images.color": 0.8, "images.erase": 0.8,
    "images.flip": 0.99, "augment.delete": 0.4, "augment.insert": 0.7, "augment.synonyms": 0.9,
}  # fmt: skip
ENDS_SOON = 0.2  # nats that an evaluation must gain to count as progress


def check_shapes(subject: Subject) -> list[Finding]:
    """Findings on sizes of the recipe."""
    return [
        *_model(subject),
        *_steps(subject),
        *_held_out(subject),
        *_augmentation(subject),
        *_patience(subject),
    ]


def _model(subject: Subject) -> list[Finding]:
    """Heads, windows and widths of any part of the model."""
    found = list[Finding]()
    sections: list[tuple[str, Any]] = [("model", subject.setup.model.config)]
    for path, config in sections:
        sections += [(f"{path}.{name}", one) for name, one in vars(config).items() if hasattr(one, "heads")]
        heads, width = getattr(config, "heads", None), getattr(config, "width", None)
        has_blocks = getattr(config, "blocks", 1) != 0
        if heads is not None and width is not None and has_blocks:
            head_dim = config.head_dim if hasattr(config, "head_dim") else width // heads
            field = f"{path}.head_width" if getattr(config, "head_width", None) else f"{path}.heads"
            if width <= LEAST_WIDTH / 2:
                values: dict[str, Value] = {"field": f"{path}.width"}
                found.append(Finding("narrow_model", "warning", width, (f"{path}.width",), values))
            elif head_dim <= NARROW:
                values = {"field": field, "usual": _heads(width), "width": width}
                found.append(Finding("narrow_heads", "warning", head_dim, (field, f"{path}.width"), values))
        found += _channels(path, config)
        if not has_blocks:
            found.append(Finding("no_blocks", "warning", 0, (f"{path}.blocks",), {"field": f"{path}.blocks"}))
        base = getattr(config, "rope_theta", None)
        if base is not None and config.positions == "rotary" and base < LEAST_BASE:
            found.append(
                Finding("rope_base", "warning", base, (f"{path}.rope_theta",), {"field": f"{path}.rope_theta"})
            )
        window = getattr(config, "sliding_window", None)
        if window is not None and window <= SHORT_WINDOW and getattr(config, "sliding_blocks", None) is None:
            field = f"{path}.sliding_window"
            found.append(
                Finding("short_window", "fault" if window == 1 else "warning", window, (field,), {"field": field})
            )
    return found


def _channels(path: str, config: Any) -> list[Finding]:
    """Feed-forward parts of few channels, norms with an epsilon that drowns what they divide by, dropped patches."""
    hidden, width, found = getattr(config, "hidden", None), getattr(config, "width", 0), list[Finding]()
    if hidden is not None and hidden <= width / NARROW_HIDDEN:
        values: dict[str, Value] = {"field": f"{path}.hidden", "width": width, "usual": 2 * width}
        found.append(Finding("narrow_hidden", "warning", hidden, (f"{path}.hidden",), values))
    eps = getattr(config, "eps", None)
    if eps is not None and eps >= LARGE_EPS:
        found.append(Finding("norm_eps", "warning", eps, (f"{path}.eps",), {"field": f"{path}.eps"}))
    dropped = getattr(config, "token_drop", 0.0)
    if dropped >= MOST_PATCHES:
        values = {"field": f"{path}.token_drop", "usual": 0.2}
        found.append(Finding("augmentation", "warning", dropped, (f"{path}.token_drop",), values))
    return found


def _heads(width: int) -> int:
    """Heads that divide a width into parts of 16 channels or more."""
    return max((one for one in range(1, max(width // 16, 1) + 1) if width % one == 0), default=1)


def _steps(subject: Subject) -> list[Finding]:
    """Steps of one sequence with few targets: their gradient is mostly chance."""
    plan, table = subject.plan, subject.data.table
    sequences = len(plan.pieces.lengths) / max(plan.num_steps, 1)
    targets = int(table.num_targets[subject.stage.train_ids].sum()) / max(plan.num_steps, 1)
    if sequences > FEW_SEQUENCES or targets > FEW_TARGETS or subject.num_steps < MANY_STEPS:
        return []
    field = subject.field("plan.tokens_per_step")
    per_step = subject.recipe.plan.batches_per_step
    names = (field,) if per_step is None else (subject.field("plan.batches_per_step"), subject.field("plan.batch_size"))
    usual = max(int(16 * table.positions[subject.stage.train_ids].mean()), 16)
    values: dict[str, Value] = {"targets": targets, "field": field, "usual": usual}
    return [Finding("tiny_steps", "warning", sequences, names, values)]


def _held_out(subject: Subject) -> list[Finding]:
    held, trained = len(subject.stage.held_out_ids), len(subject.stage.train_ids)
    share = held / max(held + trained, 1)
    classes = subject.data.class_labels() is not None
    asked = subject.recipe.train.patience is not None or subject.recipe.train.weights == "best"
    targets = int(subject.data.table.num_targets[subject.stage.held_out_ids].sum())
    few = 0 < held <= FEW_HELD and (classes or targets <= FEW_HELD_TARGETS)
    few |= held == 0 and subject.recipe.train.patience is not None
    if few and trained >= MANY_TRAINED and asked:
        values: dict[str, Value] = {"trained": trained, "targets": targets}
        return [Finding("few_held_out", "warning", held, ("data.holdout", "train.patience"), values)]
    if share < MOSTLY_HELD:
        return []
    return [Finding("held_out", "warning", share, ("data.holdout",), {"trained": trained})]


def _augmentation(subject: Subject) -> list[Finding]:
    recipe, found = subject.setup.recipe, list[Finding]()
    for field, largest in LARGEST.items():
        section, _, name = field.partition(".")
        given = getattr(getattr(recipe, section), name)
        applies = section == subject.data.augmentation and (section != "augment" or recipe.augment.multiplier)
        if given >= largest and applies:
            values: dict[str, Value] = {"field": field, "usual": largest / 4}
            found.append(Finding("augmentation", "warning", given, (field,), values))
    return found


def _patience(subject: Subject) -> list[Finding]:
    train = subject.recipe.train
    if (
        train.patience is not None
        and (train.eval_every or 0) > subject.num_steps > 0
        and len(subject.stage.held_out_ids)
    ):
        fields = (subject.field("train.eval_every"), "train.patience")
        values: dict[str, Value] = {"steps": subject.num_steps, "field": fields[0]}
        return [Finding("never_evaluated", "warning", train.eval_every or 0, fields, values)]
    if train.patience is None or train.min_delta == "auto" or train.min_delta < ENDS_SOON:
        return []
    field = subject.field("train.min_delta")
    severity: Severity = "fault" if train.min_delta >= 1 else "warning"
    return [Finding("ends_soon", severity, train.min_delta, (field, "train.patience"), {"field": field})]
