"""Aims of a stage: smoothed targets, weights of loss terms, and the share of the model that trains."""

from __future__ import annotations

from unpad.doctor.data.rows import class_labels
from unpad.doctor.subject import Subject, Trial
from unpad.models.objective import LAST, Objective
from unpad.recipes.training import Ramp, Weight
from unpad.terminal.finding import Finding, Severity, Value
from unpad.training.optim import make_optimizer

MUCH_SMOOTHED, MOST_SMOOTHED = 0.3, 0.6  # of a target
FAR, VERY_FAR = 50.0, 1000.0  # times the default weight of a term
UNFINISHED = 0.2  # of a ramp, that a stage goes through
SLOW = 1e-3  # factor on the learning rate
FEW_FROZEN, MANY_FROZEN = 0.1, 0.4  # of the parameters


def check_aims(subject: Subject) -> list[Finding]:
    """Findings on `train.label_smoothing`, `losses`, `model.positive_weight`, `train.freeze` and `optim.groups`."""
    found = [*_smoothing(subject), *_weights(subject), *_ramps(subject), *_class_weight(subject)]
    return [*found, *_frozen(subject), *_slow_groups(subject)]


def _smoothing(subject: Subject) -> list[Finding]:
    share = subject.recipe.train.label_smoothing
    if share < MUCH_SMOOTHED:
        return []
    field = subject.field("train.label_smoothing")
    severity: Severity = "fault" if share >= MOST_SMOOTHED else "warning"
    return [Finding("smoothing", severity, share, (field,), {"field": field})]


def _weights(subject: Subject) -> list[Finding]:
    """The term with the weight furthest above its default; a small one may be meant so (see layers.py)."""
    usual = {name: _last(weight) or 1.0 for name, weight in subject.setup.model.weights.items()}
    over = {name: _last(weight) / usual[name] for name, weight in subject.recipe.losses.items()}
    name = max(over, key=lambda one: over[one], default="")
    if not name or over[name] < FAR:
        return []
    field = subject.field(f"losses.{name}")
    values: dict[str, Value] = {"field": field, "weight": _last(subject.recipe.losses[name]), "usual": usual[name]}
    severity: Severity = "fault" if over[name] >= VERY_FAR else "warning"
    return [Finding("loss_weight", severity, over[name], (field,), values)]


def _ramps(subject: Subject) -> list[Finding]:
    """Ramps of a loss term that the stage goes through in small part."""
    for name, weight in subject.recipe.losses.items():
        if isinstance(weight, Ramp) and weight.end != weight.start:
            last = weight.at(subject.num_steps - 1, subject.num_steps)
            done = (last - weight.start) / (weight.end - weight.start)
            if done < UNFINISHED:
                field = subject.field(f"losses.{name}")
                values: dict[str, Value] = {"field": field, "last": last, "end": weight.end}
                values |= {"steps": subject.num_steps, "length": weight.steps or 0}
                return [Finding("ramp_unfinished", "warning", done, (field, f"losses.{name}.steps"), values)]
    return []


def _class_weight(subject: Subject) -> list[Finding]:
    """A weight of class 1 that makes one class nearly all of the loss, and more so than their numbers do."""
    weight, known = getattr(subject.setup.model.config, "positive_weight", 1.0), class_labels(subject)
    trained = Objective.of(subject.setup.model, subject.recipe.losses).at(LAST, LAST)
    if known is None or weight == 1.0 or "classification" not in trained:
        return []
    positive, negative = int((known[0] == 1).sum()), int((known[0] == 0).sum())
    if not positive or not negative:
        return []
    balance = positive / negative
    over = max(weight * balance, 1 / (weight * balance))
    if over < FAR or over <= max(balance, 1 / balance):
        return []
    values: dict[str, Value] = {
        "field": "model.positive_weight",
        "weight": weight,
        "usual": round(1 / balance, 2),
        "side": "1" if weight > 1 else "0",
    }
    return [Finding("class_weight", "fault", over, ("model.positive_weight",), values)]


def _last(weight: Weight) -> float:
    return weight.end if isinstance(weight, Ramp) else weight


def _frozen(subject: Subject) -> list[Finding]:
    """Parameters that `train.freeze` leaves as they were drawn, in a model that has learnt nothing before."""
    recipe = subject.recipe
    if not recipe.train.freeze or recipe.train.init_from is not None or "from" in subject.setup.recipe.model:
        return []
    if subject.setup.base is not None or subject.stage.name != subject.setup.stages[0].name:
        return []
    model = Trial(subject).model
    sizes = {name: (parameter.numel(), parameter.requires_grad) for name, parameter in model.named_parameters()}
    frozen = sum(size for size, trains in sizes.values() if not trains) / max(
        sum(size for size, _ in sizes.values()), 1
    )
    blocks = {name.split(".")[1] for name in sizes if name.startswith("blocks.")}
    learning = {name.split(".")[1] for name, (_, trains) in sizes.items() if name.startswith("blocks.") and trains}
    no_block = bool(blocks) and not learning
    if frozen < FEW_FROZEN and not no_block:
        return []
    field = subject.field("train.freeze")
    first = next(name for name, (_, trains) in sizes.items() if not trains)
    values: dict[str, Value] = {"layer": first, "field": field, "blocks": len(blocks) - len(learning)}
    severity: Severity = "fault" if no_block or frozen >= MANY_FROZEN else "warning"
    return [Finding("frozen_at_start", severity, frozen, (field,), values)]


def _slow_groups(subject: Subject) -> list[Finding]:
    """Groups of parameters with next to no learning rate; a rate of 0 is found by the steps that change nothing."""
    model, optim = Trial(subject).model, subject.recipe.optim
    whole = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    slow = {part for part, group in enumerate(optim.groups) if 0 < group.lr_scale <= SLOW}
    groups = make_optimizer(model, optim).param_groups if slow else []
    held = sum(parameter.numel() for group in groups if group["part"] in slow for parameter in group["params"])
    if held < FEW_FROZEN * whole:
        return []
    group = optim.groups[min(slow)]
    values: dict[str, Value] = {"layer": group.parameters[0], "scale": group.lr_scale}
    return [Finding("slow_group", "warning", held / whole, ("optim.groups",), values)]
