"""Sums of gradients in their own precision, reduced over processes while backward passes run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unpad.errors import LostProcessError
from unpad.processes.group import Group

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
