"""Use of an external trainer, without dropout and noise where asked, with its state restored afterwards."""

import copy
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

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
