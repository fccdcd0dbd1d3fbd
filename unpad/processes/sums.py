"""Sums of gradients over micro-batches and processes that come out the same in every order, and to the bit.

Proof. Each entry x of a micro-batch's gradient, in fp32, becomes r(x), the nearest multiple of
QUANTUM = 2^-47; the multiples are added in fp64.

1. r depends on x alone. In [32, 64) neighbouring numbers of fp64 are 2^-47 apart, so for |x| < 16 the addition of
   SHIFT = 48 rounds x to a multiple of 2^-47, and the subtraction of 48 is exact. A tie goes to the even one of two
   numbers around 48 + x, and 48 is an even multiple: which of the two it is depends on x, never on what was added
   before. (An accumulator that started at 48 would save the subtraction and break this: its own last bit would decide.)
2. Sums are exact. Multiples of 2^-47 of at most 64 in magnitude are whole numbers of at most 2^53 times 2^-47, and
   fp64 holds all of them. While the magnitudes of an entry over all micro-batches of an update add up to 64 or less,
   so does every partial sum, no addition rounds, and addition is associative: neither the order, nor which process
   takes which micro-batch, nor how an all-reduce combines processes changes a bit.
3. The sum is rounded to the parameter's type once, in every process alike.

The error is at most 2^-48 per micro-batch and entry, 3.6e-15, before the last rounding; AdamW adds 1e-8 to what it
divides by.

Beyond. A number of fp32 from 2^-24 on is a multiple of 2^-47 as it is; from 16 to 2^56 the shift returns it unchanged,
and above within 2^-52 of it. Where magnitudes add up to more than 64, sums are those of ordinary fp64: within 2^-53 of
themselves per addition, and the order may show in the last bits. NaN and infinity stay what they are. Gradients of fp16
are divided by the loss scale first, a power of two, which is exact. Those of fp64 parameters, in proofs, are added
unrounded: their sums depend on the order within the rounding of fp64.

An update of one micro-batch has nothing to add; its gradient stays as it is, and other processes contribute -0.0, which
changes no number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from unpad.nn.native import gradient_sum
from unpad.processes.group import Group

QUANTUM = 2.0**-47
SHIFT = 1.5 * 2.0**52 * QUANTUM
# Numbers that torch's operations pass over at a time, for each thread: half a megabyte in fp64 stays in a core's cache.
_BLOCK = 2**16
_BLOCK_OF_GPU = 2**24  # where a launch costs more than a pass


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

    Memory: 8 bytes per trained number, from the first update on that has something to add.

    Args:
        parameters: of the model, in the order that all processes have; frozen ones are passed over.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.used: set[int] = set()
        self._rounded = True
        self._flat: Tensor | None = None  # sums of all parameters; a part holds nothing until its index is in `used`

    def begin(self, *, rounded: bool, takes: int) -> None:
        """As of GradientSum."""
        self._rounded, self.used = rounded, set()

    def take(self, scale: float = 1.0) -> None:
        """As of GradientSum; `.grad` is cleared, unless it is that of the only micro-batch.

        Args:
            scale: a power of two.
        """
        assert math.frexp(scale)[0] == 0.5, "dividing by a power of two rounds nothing"
        given = {index: p.grad for index, p in enumerate(self.parameters) if p.grad is not None}
        if self._rounded:
            for replace in (True, False):
                chosen = {index: gradient for index, gradient in given.items() if (index not in self.used) == replace}
                self._add(chosen, 1 / scale, SHIFT, replace=replace)
        elif scale != 1.0:
            torch._foreach_mul_(list(given.values()), 1 / scale)
        self.used.update(given)

    def finish(self, group: Group, used: set[int]) -> None:
        """As of GradientSum."""
        if not self._rounded:
            if group.size == 1:
                return
            given = {index: p.grad for index, p in enumerate(self.parameters) if p.grad is not None}
            self._add(given, 1.0, 0.0, replace=True)
        flat, parts = self._sums()
        for index, part in enumerate(parts):
            if index not in self.used:
                part.fill_(-0.0)
        group.add(flat)
        for index in used:
            parameter = self.parameters[index]
            parameter.grad = parts[index].view_as(parameter).to(parameter.dtype, copy=True)

    def give_up(self) -> None:
        """As of GradientSum; nothing has been sent."""

    def _sums(self) -> tuple[Tensor, Sequence[Tensor]]:
        """The sums of all parameters as one tensor, and the part of each; fp64."""
        sizes = [parameter.numel() for parameter in self.parameters]
        if self._flat is None:
            device = self.parameters[0].device if self.parameters else None
            self._flat = torch.empty(sum(sizes), dtype=torch.float64, device=device)
        return self._flat, self._flat.split(sizes)

    def _add(self, gradients: dict[int, Tensor], factor: float, shift: float, *, replace: bool) -> None:
        """Add gradients to the sums of their parameters, or put them in the place of the sums; clear `.grad`.

        Args:
            gradients: by index of the parameter.
            factor: of every gradient; a power of two.
            shift: SHIFT, or 0 to leave gradients unrounded.
        """
        parts = self._sums()[1]
        native = [index for index, gradient in gradients.items() if shift and gradient_sum.accepts(gradient)]
        if native:
            gradient_sum.add_rounded(
                [parts[index] for index in native], [gradients[index] for index in native],
                factor=factor, shift=shift, replace=replace,
            )  # fmt: skip
        for index in gradients.keys() - native:
            _add_by_torch(parts[index], gradients[index], factor, shift, replace=replace)
        for index in gradients:
            self.parameters[index].grad = None


def _add_by_torch(total: Tensor, gradient: Tensor, factor: float, shift: float, *, replace: bool) -> None:
    """Do the same as `add_rounded`, for a gradient of any type on any device; those in fp64 are not rounded."""
    most = _BLOCK * torch.get_num_threads() if total.device.type == "cpu" else _BLOCK_OF_GPU
    block = min(most, max(total.numel(), 1))
    scratch = total if replace else total.new_empty(block)
    for sums, numbers in zip(total.split(block), gradient.flatten().split(block), strict=True):
        wide = (sums if replace else scratch[: len(numbers)]).copy_(numbers)
        if factor != 1.0:
            wide.mul_(factor)
        if shift and gradient.dtype != torch.float64:
            wide.add_(shift).sub_(shift)
        if not replace:
            sums.add_(wide)
