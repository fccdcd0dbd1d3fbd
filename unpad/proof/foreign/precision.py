"""The precision of a proof: fp64 if the model can compute in it, else the model's own, with error bounds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unpad.proof.foreign.model import base_of

EXACT = 1e-10  # most error of a result in fp64
MARGIN = 32.0  # largest error of batching in fp32, in multiples of the error of the same sequences alone
EPS = torch.finfo(torch.float32).eps
LEAST = 16 * EPS  # least bound in fp32
NUDGE = 1e-8  # relative change of all weights that rounds to another fp32 number here and there
CURVED = 1e-12  # most second difference of a smooth function by that change; roundings to fp32 make 1e-9
T = TypeVar("T")


class Wide(TorchFunctionMode):
    """Replace requests for fp32 by fp64: norms, rotary tables, softmax and losses of models that are otherwise fp64."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*wide, **named)


@contextmanager
def wide() -> Iterator[None]:
    """Compute in fp64: requests for fp32 are replaced, and new tensors are fp64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Wide():
            yield
    finally:
        torch.set_default_dtype(default)


@dataclass(frozen=True)
class Errors:
    """Relative errors of logits, the loss and the gradient; or their bounds."""

    logits: float
    loss: float
    gradient: float

    def bounds(self) -> Errors:
        """Bounds for the same work in batches, in fp32, from the errors of sequences alone."""
        return Errors(*(max(LEAST, MARGIN * error) for error in (self.logits, self.loss, self.gradient)))


def relative(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over that of the truth; infinite for NaN and other shapes."""
    if found.shape != truth.shape:
        return float("inf")
    same = found == truth  # also infinities
    difference = float(torch.where(same, 0, found.double() - truth.double()).norm())
    size = float(torch.where(truth.isfinite(), truth.double(), 0).norm())
    error = difference / size if size > 0 else float("inf" if difference else 0)
    return error if error == error else float("inf")


def by_rounding(model: nn.Module, size: float, compute: Callable[[], T]) -> T:
    """A result with every weight changed by a random share of at most `size`; the weights are restored to the bit.

    The shares are always the same ones; a negative size turns them around.
    """
    weights = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    kept = [parameter.data for parameter in weights]
    generator = torch.Generator().manual_seed(0)
    try:
        for parameter, data in zip(weights, kept, strict=True):
            share = torch.rand(data.shape, generator=generator, dtype=torch.float64).to(data.device)
            parameter.data = (data.double() * (1 + size * (2 * share - 1))).to(data.dtype)
        return compute()
    finally:
        for parameter, data in zip(weights, kept, strict=True):
            parameter.data = data


def is_smooth(model: nn.Module, compute: Callable[[], list[Tensor]]) -> bool:
    """True if results change smoothly with small changes of all weights, as in fp64, and not in steps, as with parts in
    fp32."""
    here, more, less = compute(), by_rounding(model, NUDGE, compute), by_rounding(model, -NUDGE, compute)
    bends = [a.double() + b.double() - 2 * x.double() for x, a, b in zip(here, more, less, strict=True)]
    bend = sum(float(one.square().sum()) for one in bends) ** 0.5
    size = sum(float(one.double().square().sum()) for one in here) ** 0.5
    return bool(bend <= CURVED * size)


@contextmanager
def in_fp64(model: nn.Module) -> Iterator[None]:
    """Weights and buffers in fp64, and computation in it; the model has its own weights again afterwards."""
    with _cast(model, (torch.float32, torch.bfloat16, torch.float16), torch.float64), wide():
        yield


@contextmanager
def not_below_fp32(model: nn.Module) -> Iterator[None]:
    """Weights and buffers of less than fp32 in fp32; the model has its own again afterwards."""
    with _cast(model, (torch.bfloat16, torch.float16), torch.float32):
        yield


@contextmanager
def _cast(model: nn.Module, dtypes: Collection[torch.dtype], to: torch.dtype) -> Iterator[None]:
    weights = [(parameter, parameter.data) for parameter in model.parameters() if parameter.dtype in dtypes]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.dtype in dtypes
    ]
    try:
        for parameter, data in weights:
            parameter.data = data.to(to)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.to(to)
        yield
    finally:
        for parameter, data in weights:
            parameter.grad = None
            parameter.data = data
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


@runtime_checkable
class Experts(Protocol):
    """A model whose experts can be computed in several ways, as those of transformers."""

    def get_experts_implementation(self) -> dict[str, str | None]: ...

    def set_experts_implementation(self, name: str | dict[str, str | None]) -> None: ...


def has_experts(model: nn.Module) -> bool:
    return isinstance(base_of(model), Experts)


@contextmanager
def eager_experts(model: nn.Module) -> Iterator[None]:
    """Experts one by one."""
    base = base_of(model)
    assert isinstance(base, Experts)
    before = base.get_experts_implementation()
    base.set_experts_implementation("eager")
    try:
        yield
    finally:
        base.set_experts_implementation(before)
