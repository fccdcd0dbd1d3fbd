"""Sums of gradients over micro-batches and processes: bit-identical in every order, or fast, in their own precision.

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

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unpad.errors import LostProcessError
from unpad.nn.native.library import call, is_plain, operator, runs
from unpad.processes.group import Group

QUANTUM = 2.0**-47
SHIFT = 1.5 * 2.0**52 * QUANTUM
# Numbers per operation and thread: two megabytes in fp64. Smaller blocks stay in a nearer cache, but every operation
# takes a microsecond or two to start.
_BLOCK = 2**18
_BLOCK_OF_GPU = 2**24  # where a launch costs more than a pass
_FEW = 4  # most micro-batches per update for which a CPU holds all gradients


def sum_kind(asked: str, device_type: str, num_processes: int) -> str:
    """The sum that a recipe's `train.sums` asks for: auto is fast on several GPUs, and exact elsewhere."""
    auto = "fast" if device_type == "cuda" and num_processes > 1 else "exact"
    return auto if asked == "auto" else asked


class GradientSum(Protocol):
    """Sum of the gradients of an update over micro-batches and processes.

    Attributes:
        used: indices of the parameters that got a gradient from a micro-batch of this process.
    """

    used: set[int]

    def begin(self, *, rounded: bool, takes: int) -> None:
        """Begin an update.

        Args:
            rounded: whether the update has more than one micro-batch; the gradient of one alone stays as it is.
            takes: number of calls of `take` that follow, each after one backward pass.
        """

    def take(self, scale: float = 1.0) -> None:
        """Take the gradients of a micro-batch, which autograd has left in `.grad`, divided by `scale`."""

    def finish(self, group: Group, used: set[int]) -> None:
        """Add over all processes, and leave the sums as `.grad` of the parameters in `used`."""

    def give_up(self) -> None:
        """Abandon an update in which a process has failed; called instead of `finish`."""


def held_bytes(parameter: Tensor, micros: int, processes: int = 1) -> int:
    """Largest number of bytes that ExactSum holds for one parameter during a backward pass.

    Args:
        micros: micro-batches of the update; processes: number of processes that share them equally.
    """
    if micros <= 1:
        return 0
    own, gradient = math.ceil(micros / processes), parameter.numel() * parameter.element_size()
    if processes == 1 and own <= _FEW and parameter.device.type == "cpu":
        return (own - 1) * gradient
    return 8 * parameter.numel() + (gradient if own > 1 and parameter.device.type == "cpu" else 0)


class ExactSum:
    """Gradients of the micro-batches of an update, rounded to multiples of QUANTUM and added in fp64.

    CPUs hold gradients as autograd left them and add several together, block by block in the cache: up to four
    micro-batches at the end of the update, for which a single process keeps no sums in fp64; more than four two at a
    time. GPUs add each gradient at once. Additions always follow the order of the micro-batches.

    Memory: in fp32 at most 12 bytes per trained weight, see `held_bytes`; the 8 bytes of the fp64 sum stay allocated
    from the first update that needs it.

    Args:
        parameters: parameters of the model, in the same order in all processes; frozen ones are skipped.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.used: set[int] = set()
        self._device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self._rounded, self._factor, self._together = True, 1.0, 1
        self._held: list[dict[int, Tensor]] = []  # gradients of micro-batches, by index of the parameter
        self._flat: Tensor | None = None  # sums of all parameters; a part holds nothing until its index is in `_summed`
        self._summed: set[int] = set()

    def begin(self, *, rounded: bool, takes: int) -> None:
        """See `GradientSum`."""
        self.give_up()
        self._rounded, self.used, self._summed = rounded, set(), set()
        if self._device.type == "cpu":
            self._together = takes + 1 if takes <= _FEW and self._flat is None else 2

    def take(self, scale: float = 1.0) -> None:
        """See `GradientSum`; `.grad` is cleared, except after the only micro-batch.

        Args:
            scale: a power of two, the same for all micro-batches of an update.
        """
        assert math.frexp(scale)[0] == 0.5, "dividing by a power of two rounds nothing"
        self._factor = 1 / scale
        if self._rounded:
            self._hold()
            if len(self._held) == self._together:
                self._add_held()
            return
        given = {index: p.grad for index, p in enumerate(self.parameters) if p.grad is not None}
        self.used.update(given)
        if scale != 1.0:
            torch._foreach_mul_(list(given.values()), self._factor)

    def finish(self, group: Group, used: set[int]) -> None:
        """See `GradientSum`."""
        if group.size == 1 and not self._rounded:
            return
        if group.size > 1:
            if not self._rounded:
                self._factor = 1.0
                self._hold()
            self._add_held()
            flat, parts = self._sums()
            for index, part in enumerate(parts):
                if index not in self.used:
                    part.fill_(-0.0)
            group.add(flat)
            self._summed = used
        parts = self._sums()[1] if self._summed else []
        for index in used:
            parameter = self.parameters[index]
            gradient = torch.empty_like(parameter, memory_format=torch.contiguous_format)
            self._add(index, parts[index] if index in self._summed else None, gradient.view(-1))
            parameter.grad = gradient

    def give_up(self) -> None:
        """See `GradientSum`; nothing has been sent."""
        self._held = []

    def _sums(self) -> tuple[Tensor, Sequence[Tensor]]:
        """The sums of all parameters as one tensor, and the part of each; fp64."""
        sizes = [parameter.numel() for parameter in self.parameters]
        if self._flat is None:
            self._flat = torch.empty(sum(sizes), dtype=torch.float64, device=self._device)
        return self._flat, self._flat.split(sizes)

    def _hold(self) -> None:
        """Move `.grad` of all parameters aside, to add it later."""
        self._held.append({index: p.grad for index, p in enumerate(self.parameters) if p.grad is not None})
        self.used.update(self._held[-1])
        for index in self._held[-1]:
            self.parameters[index].grad = None

    def _add_held(self) -> None:
        """Add the held gradients to the sums in fp64."""
        parts = self._sums()[1]
        for index in {index for held in self._held for index in held}:
            self._add(index, parts[index], None)
            self._summed.add(index)
        self._held = []

    def _add(self, index: int, sums: Tensor | None, result: Tensor | None) -> None:
        """Add the gradients of a parameter that are held to its sum, and free them.

        Args:
            sums: the parameter's part of the sums in fp64, (numel,); None if the sum is not needed afterwards.
            result: (numel,) to round the sum to, in the parameter's type.
        """
        gradients = [held.pop(index).flatten() for held in self._held if index in held]
        size, is_new = self.parameters[index].numel(), index not in self._summed
        native = self._rounded and all(accepts(gradient) for gradient in gradients)
        add = add_rounded if native else _add_by_torch
        exact = self._rounded and self.parameters[index].dtype != torch.float64
        block = _BLOCK * torch.get_num_threads() if self._device.type == "cpu" else _BLOCK_OF_GPU
        scratch = torch.empty(min(block, size) if sums is None else 0, dtype=torch.float64, device=self._device)
        for start in range(0, size, block):
            part = slice(start, min(start + block, size))
            total = scratch[: part.stop - start] if sums is None else sums[part]
            if gradients:
                add(total, [gradient[part] for gradient in gradients], self._factor, SHIFT if exact else 0.0, is_new)
            if result is not None:
                result[part].copy_(total)


def accepts(gradient: Tensor) -> bool:
    """True if the kernel reads gradients like this one: contiguous fp32 on the processor, kernels being enabled."""
    return gradient.dtype == torch.float32 and runs(gradient) and gradient.is_contiguous() and is_plain(gradient)


@operator("add_rounded", lambda *given: None, changes=["sums"])
def add_rounded(sums: Tensor, gradients: Sequence[Tensor], factor: float, shift: float, replace: bool) -> None:
    """Add (gradient * factor + shift) - shift of every gradient to the sums, in turn.

    Args:
        sums: contiguous fp64.
        gradients: contiguous fp32, each with as many numbers as there are sums.
        factor: a power of two, so that the product is exact.
        shift: a number whose spacing to its neighbours is the multiple to round to.
        replace: the sums hold nothing yet; the first gradient takes their place.
    """
    for number, gradient in enumerate(gradients):
        assert (sums.dtype, gradient.dtype) == (torch.float64, torch.float32), (sums.dtype, gradient.dtype)
        assert sums.numel() == gradient.numel(), (sums.numel(), gradient.numel())
        first = replace and number == 0
        call("add_rounded", gradient.numel(), factor, shift, first, torch.get_num_threads(), gradient, sums)


def _add_by_torch(total: Tensor, gradients: Sequence[Tensor], factor: float, shift: float, replace: bool) -> None:
    """`add_rounded` in torch, for gradients of any dtype on any device; a shift of 0 disables rounding."""
    scratch = torch.empty_like(total)
    for number, gradient in enumerate(gradients):
        is_first = replace and number == 0
        wide = (total if is_first else scratch).copy_(gradient)
        if factor != 1.0:
            wide.mul_(factor)
        if shift:
            wide.add_(shift).sub_(shift)
        if not is_first:
            total.add_(wide)


# A CPU has no kernel launches to wait for, so it can send small buckets early; the other number is the default of
# torch's DDP.
BUCKET_BYTES = {"cpu": 1 << 20, "cuda": 25 << 20}


@dataclass
class Bucket:
    """Parameters with gradients that are sent together.

    Args:
        indices: of the parameters.
        flat: their gradients end to end, (num_weights,) in the parameters' dtype.
        parts: views of `flat`, one per parameter, in its shape.
        missing: indices of those still without a gradient from the last backward pass.
    """

    indices: list[int]
    flat: Tensor
    parts: list[Tensor]
    missing: set[int] = field(default_factory=set)


class FastSum:
    """Gradients added by autograd in their own precision, then over processes: the bits depend on which process
    computes what.

    During the last backward pass of this process, gradients are sent in buckets as they arrive, the last layers first.
    All processes send all buckets in the same order: a parameter without a gradient counts as zeros, and `finish` sends
    the remaining buckets, which are all of them in a process without micro-batches. Buckets with a gradient that no
    process had in the previous update come last, so that the others need not wait for them.

    Args:
        parameters: as in ExactSum.
        group: the processes.
        bucket_bytes: minimum size of a bucket except the last; default BUCKET_BYTES.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group, bucket_bytes: int | None = None) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.group = group
        self.used: set[int] = set()
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Bucket] = []  # in the order in which they are sent
        self._bucket_of: dict[int, Bucket] = {}
        self._sent: list[Callable[[], None]] = []  # waits for a bucket that was sent, in the order of the buckets
        self._hooks: list[RemovableHandle] = []
        self._takes_left, self._scale = 0, 1.0

    def begin(self, *, rounded: bool, takes: int) -> None:
        """See `GradientSum`; nothing is rounded."""
        for wait in self._sent:  # left over from an abandoned update
            wait()
        if not self._buckets:
            self._make_buckets()
        self.used, self._scale, self._takes_left, self._sent = set(), 1.0, takes, []
        for bucket in self._buckets:
            bucket.missing = set(bucket.indices)
        self._listen_to_last()

    def take(self, scale: float = 1.0) -> None:
        """See `GradientSum`."""
        self.used = {index for index, parameter in enumerate(self.parameters) if parameter.grad is not None}
        self._scale = scale
        self._takes_left -= 1
        self._listen_to_last()

    def finish(self, group: Group, used: set[int]) -> None:
        """See `GradientSum`; `.grad` is a view of memory that the next update writes to."""
        self._send_rest()
        for wait in self._sent:
            wait()
        self._sent = []
        for bucket in self._buckets:
            if self._scale != 1.0:
                bucket.flat.mul_(1.0 / self._scale)
            for index, part in zip(bucket.indices, bucket.parts, strict=True):
                self.parameters[index].grad = part if index in used else None
        self._buckets.sort(key=lambda bucket: not used.issuperset(bucket.indices))

    def give_up(self) -> None:
        """See `GradientSum`: sends the remaining buckets, so that no process waits for this one."""
        with suppress(LostProcessError):  # the error being handled is the one to report
            self._send_rest()

    def _make_buckets(self) -> None:
        """Divide the parameters from the last to the first, which is about the order of their gradients."""
        for index in reversed(range(len(self.parameters))):
            parameter = self.parameters[index]
            kind = (parameter.dtype, parameter.device)
            last = self._buckets[-1] if self._buckets else None
            least = self._bucket_bytes or BUCKET_BYTES[parameter.device.type]
            if last is None or last.flat.nbytes >= least or (last.flat.dtype, last.flat.device) != kind:
                last = Bucket([], torch.zeros(0, dtype=kind[0], device=kind[1]), [])
                self._buckets.append(last)
            last.indices.append(index)
            last.flat = torch.zeros(last.flat.numel() + parameter.numel(), dtype=kind[0], device=kind[1])
            self._bucket_of[index] = last
        for bucket in self._buckets:
            own = [self.parameters[index] for index in bucket.indices]
            parts = bucket.flat.split([p.numel() for p in own])
            bucket.parts = [part.view_as(p) for part, p in zip(parts, own, strict=True)]

    def _listen_to_last(self) -> None:
        """Hook the gradients of the next backward pass if it is the last."""
        if self._takes_left != 1:
            return
        for index, parameter in enumerate(self.parameters):

            def arrived(parameter: Tensor, index: int = index) -> None:
                self._bucket_of[index].missing.discard(index)
                while len(self._sent) < len(self._buckets) and not self._buckets[len(self._sent)].missing:
                    self._send_next()

            self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))

    @torch.no_grad()
    def _send_next(self) -> None:
        bucket = self._buckets[len(self._sent)]
        for index, part in zip(bucket.indices, bucket.parts, strict=True):
            gradient = self.parameters[index].grad
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient)
        self._sent.append(self.group.add_later(bucket.flat))

    def _send_rest(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        while len(self._sent) < len(self._buckets):
            self._send_next()
