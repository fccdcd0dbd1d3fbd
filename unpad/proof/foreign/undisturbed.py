"""Use of an external trainer, without dropout and noise where asked, with its state restored afterwards."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

DROPOUTS: tuple[Callable[..., object], ...] = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
)
RANDOM = re.compile("drop|jitter|noise")
PROBABILITY = 4  # place of attention's dropout among its arguments


class WithoutDropout(TorchFunctionMode):
    """Dropout functions return their input, and attention drops no weights."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = dict(kwargs or {})
        if func in DROPOUTS:
            return args[0] if args else named["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > PROBABILITY:
                args = [*args[:PROBABILITY], 0.0, *args[PROBABILITY + 1 :]]
            elif "dropout_p" in named:
                named["dropout_p"] = 0.0
        return func(*args, **named)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """No dropout and no noise in training mode.

    Probabilities and sizes that modules hold under a name with "drop", "jitter" or "noise", and those of dropout
    modules, are 0 inside: they also reach what backward computes again for checkpointing, where no mode does.
    """
    held = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and (RANDOM.search(name) or isinstance(module, nn.modules.dropout._DropoutNd))
    ]
    try:
        for module, name, _ in held:
            setattr(module, name, 0.0)
        with WithoutDropout():
            yield
    finally:
        for module, name, value in held:
            setattr(module, name, value)


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
