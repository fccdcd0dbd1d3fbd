"""Training mode without dropout and noise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

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
