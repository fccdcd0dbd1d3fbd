"""Sums of gradients over micro-batches and processes that come out the same in every order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unpad.processes.group import Group

QUANTUM = 2.0**-47
_SHIFT = 1.5 * 2.0**52 * QUANTUM  # x + _SHIFT - _SHIFT is x as a multiple of QUANTUM


class ExactSum:
    """Gradients of the micro-batches of an update, rounded to multiples of QUANTUM and added in fp64.

    Args:
        parameters: of the model, in the order that all processes have.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        sizes = [p.numel() for p in self.parameters]
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self._flat = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self._parts = self._flat.split(sizes)
        self.used: set[int] = set()

    def begin(self) -> None:
        """Forget the last update."""
        self._flat.zero_()
        self.used = set()

    def take(self, scale: float = 1.0) -> None:
        """Add the `.grad` of every parameter, divided by `scale`, and clear it."""
        for index, (parameter, part) in enumerate(zip(self.parameters, self._parts, strict=True)):
            if parameter.grad is None:
                continue
            wide = parameter.grad.flatten().double()
            if scale != 1.0:
                wide.mul_(1.0 / scale)
            if parameter.dtype != torch.float64:
                wide.add_(_SHIFT).sub_(_SHIFT)
            part.add_(wide)
            self.used.add(index)
            parameter.grad = None

    def finish(self, group: Group, used: set[int]) -> None:
        """Add over all processes, and leave the sums as `.grad` of the parameters in `used`."""
        group.add(self._flat)
        for index, (parameter, part) in enumerate(zip(self.parameters, self._parts, strict=True)):
            if index in used:
                parameter.grad = part.view_as(parameter).to(parameter.dtype)
