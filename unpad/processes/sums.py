"""Sums of gradients over micro-batches and processes that come out the same in every order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from unpad.processes.group import Group

QUANTUM = 2.0**-47
_SHIFT = 1.5 * 2.0**52 * QUANTUM  # x + _SHIFT - _SHIFT is x as a multiple of QUANTUM


class GradientSum(Protocol):
    """Sum of the gradients of an update over micro-batches and processes.

    Attributes:
        used: indices of the parameters to which a micro-batch of this process gave a gradient.
    """

    used: set[int]

    def begin(self, *, rounded: bool, takes: int) -> None:
        """Begin an update.

        Args:
            rounded: whether the update has more than one micro-batch; the gradient of one alone stays as it is.
            takes: number of calls of `take` that follow, each after one backward pass.
        """
        ...

    def take(self, scale: float = 1.0) -> None:
        """Take the gradients of a micro-batch, which autograd has left in `.grad`, divided by `scale`."""
        ...

    def finish(self, group: Group, used: set[int]) -> None:
        """Add over all processes, and leave the sums as `.grad` of the parameters in `used`."""
        ...

    def give_up(self) -> None:
        """End an update in which a process has failed, in place of `finish`."""
        ...


class ExactSum:
    """Gradients of the micro-batches of an update, rounded to multiples of QUANTUM and added in fp64.

    Args:
        parameters: of the model, in the order that all processes have.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._flat = torch.zeros(0, dtype=torch.float64)  # of all parameters from the first update on
        self._parts: tuple[Tensor, ...] = ()
        self.used: set[int] = set()
        self._rounded = True

    def begin(self, *, rounded: bool, takes: int) -> None:
        """As of GradientSum."""
        if self._flat.numel() == 0 and self.parameters:
            sizes = [p.numel() for p in self.parameters]
            self._flat = torch.zeros(sum(sizes), dtype=torch.float64, device=self.parameters[0].device)
            self._parts = self._flat.split(sizes)
        self._flat.zero_()
        self._rounded, self.used = rounded, set()

    def take(self, scale: float = 1.0) -> None:
        """As of GradientSum; `.grad` is cleared."""
        for index, (parameter, part) in enumerate(zip(self.parameters, self._parts, strict=True)):
            if parameter.grad is None:
                continue
            wide = parameter.grad.flatten().double()
            if scale != 1.0:
                wide.mul_(1.0 / scale)
            if self._rounded and parameter.dtype != torch.float64:
                wide.add_(_SHIFT).sub_(_SHIFT)
            part.add_(wide)
            self.used.add(index)
            parameter.grad = None

    def finish(self, group: Group, used: set[int]) -> None:
        """As of GradientSum."""
        group.add(self._flat)
        for index, (parameter, part) in enumerate(zip(self.parameters, self._parts, strict=True)):
            if index in used:
                parameter.grad = part.view_as(parameter).to(parameter.dtype)

    def give_up(self) -> None:
        """As of GradientSum; nothing has been sent."""
