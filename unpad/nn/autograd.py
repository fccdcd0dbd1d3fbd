"""Typed call of an autograd function, as torch's own has no types; and functions with a first derivative alone."""

from typing import Any

import torch

from unpad.errors import RecipeError


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """The result of the function's `forward`, which autograd follows."""
    return function.apply(*args)


def refuse_second_derivative(name: str) -> None:
    """Refuse, in a function's `backward`, a gradient that is to be differentiated again.

    Raises:
        RecipeError: names the function.
    """
    if torch.is_grad_enabled():  # in `backward` only with create_graph=True
        raise RecipeError(
            f"{name} has no second derivative, which create_graph=True asks for",
            fix="leave the penalty on gradients out, or use another attention, such as eager of transformers",
        )
