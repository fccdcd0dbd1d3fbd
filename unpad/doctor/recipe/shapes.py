"""Sizes that leave a model or a step next to nothing to work with: heads, windows, steps, parts of the data, changes of
pictures and texts."""

from __future__ import annotations

from typing import Any

from unpad.doctor.subject import Subject
from unpad.terminal.finding import Finding, Severity, Value

NARROW = 2  # channels of a head
SHORT_WINDOW = 4  # tokens
LEAST_WIDTH = 8
NARROW_HIDDEN, LARGE_EPS, MOST_DROPPED = 16, 0.1, 0.8  # of the width, of norms, and of the patches
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
    """Feed-forward parts of a few channels, norms whose epsilon drowns what they divide by, and dropped patches."""
    hidden, width, found = getattr(config, "hidden", None), getattr(config, "width", 0), list[Finding]()
    if hidden is not None and hidden <= width / NARROW_HIDDEN:
        values: dict[str, Value] = {"field": f"{path}.hidden", "width": width, "usual": 2 * width}
        found.append(Finding("narrow_hidden", "warning", hidden, (f"{path}.hidden",), values))
    eps = getattr(config, "eps", None)
    if eps is not None and eps >= LARGE_EPS:
        found.append(Finding("norm_eps", "warning", eps, (f"{path}.eps",), {"field": f"{path}.eps"}))
    dropped = getattr(config, "token_drop", 0.0)
    if dropped >= MOST_DROPPED:
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
    if train.patience is None or train.min_delta < ENDS_SOON:
        return []
    field = subject.field("train.min_delta")
    severity: Severity = "fault" if train.min_delta >= 1 else "warning"
    return [Finding("ends_soon", severity, train.min_delta, (field, "train.patience"), {"field": field})]
