"""Use of an external trainer, without dropout and noise where asked, with its state restored afterwards."""

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from unpad.proof.foreign.judge import NO_ROUTER_LOSS
from unpad.proof.foreign.model import no_router_loss, untouched, untouched_generators

RANDOM = re.compile("drop|jitter|noise|^p$")


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """No dropout and no noise in training mode.

    Probabilities and sizes that modules and their configurations hold as `p`, or under a name with "drop", "jitter" or
    "noise", are 0 inside.
    """
    parts = [one for part in model.modules() for one in (part, vars(part).get("config")) if hasattr(one, "__dict__")]
    held = [
        (vars(one), name, value)
        for one in parts
        for name, value in vars(one).items()
        if isinstance(value, float) and RANDOM.search(name)
    ]
    try:
        for owner, name, _ in held:
            owner[name] = 0.0
        yield
    finally:
        for owner, name, value in held:
            owner[name] = value


DATA = ("train_dataset", "eval_dataset")  # attributes of a trainer with too much in them to keep their content
DEEPEST = 6  # levels of plain data that are kept


def _is_plain(value: object, depth: int = DEEPEST) -> bool:
    """True for numbers, strings and containers of them: data that a step may have changed in place."""
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if depth and isinstance(value, dict):
        return all(_is_plain(one, depth - 1) for pair in value.items() for one in pair)
    return bool(depth) and isinstance(value, list | set) and all(_is_plain(one, depth - 1) for one in value)


@contextmanager
def attributes_kept(owner: object, without: tuple[str, ...] = ()) -> Iterator[None]:
    """Restore the attributes of an object afterwards, including the content of plain containers.

    Args:
        without: names of attributes with too much data to keep their content.
    """
    attributes = vars(owner)
    before = dict(attributes)
    contents = {
        name: (value, copy.deepcopy(value))
        for name, value in before.items()
        if isinstance(value, dict | list | set) and name not in without and _is_plain(value)
    }
    # Lists of other objects, such as the loaders that an accelerator has prepared.
    lists = [(value, list(value)) for name, value in before.items() if type(value) is list and name not in without]
    try:
        yield
    finally:
        attributes.clear()
        attributes.update(before)
        for whole, items in lists:
            whole[:] = items
        for value, content in contents.values():
            if isinstance(value, list):
                value[:] = content
            else:
                value.clear()
                value.update(content)


@contextmanager
def undisturbed(trainer: Any) -> Iterator[None]:
    """Restore a trainer, its state and its accelerator afterwards; inside, it scales no loss.

    It has no optimizer with a mode of its own, which a step would switch.
    """
    accelerator = trainer.accelerator
    parts = [accelerator, accelerator.gradient_state]
    parts += [getattr(trainer, name) for name in ("state", "control") if hasattr(trainer, name)]
    with ExitStack() as stack:
        stack.enter_context(attributes_kept(trainer, DATA))
        for part in parts:
            stack.enter_context(attributes_kept(part))
        if hasattr(vars(trainer).get("optimizer"), "train"):
            vars(trainer)["optimizer"] = None
        accelerator.scaler = None
        yield


@contextmanager
def own_counts(args: Any) -> Iterator[None]:
    """Let the trainer divide a loss by the targets of this rank's batch alone inside."""
    before = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = before


@contextmanager
def proving(trainer: Any) -> Iterator[tuple[nn.Module, list[str]]]:
    """The model of a trainer and notes on omitted parts; inside, steps have no side effects and no dropout.

    Other processes compute the same, and nothing is sent.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    with (
        untouched_generators(),
        undisturbed(trainer),
        untouched(model),
        no_router_loss(model) as router,
        warnings.catch_warnings(),
        without_dropout(model),
        own_counts(trainer.args),
    ):
        warnings.simplefilter("ignore")  # of a step that is not meant to be one
        for name in ("gather", "gather_for_metrics"):  # restored with the rest of the accelerator
            vars(trainer.accelerator)[name] = lambda value, *args, **kwargs: value
        if hasattr(trainer, "aux_loss_enabled"):  # of TRL, which adds that loss by itself
            router |= trainer.aux_loss_enabled
            trainer.aux_loss_enabled = False
        notes = [NO_ROUTER_LOSS] if router else []
        if trainer.accelerator.mixed_precision != "no":
            notes.append(f"training will run in {trainer.accelerator.mixed_precision}; the proof does without")
        yield model, notes
