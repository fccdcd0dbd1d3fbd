"""Typed call of an autograd function; torch's own has no types."""

from typing import Any

import torch


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """The result of the function's `forward`, which autograd follows."""
    return function.apply(*args)
