"""The precision of a proof: fp64 where a model computes in it, else the model's own, with bounds of its error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

EXACT = 1e-10  # most error of a result in fp64
MARGIN = 32.0  # most that batching may err, in errors of the same sequences alone
LEAST_EPS = 16.0  # least bound, in roundings of the dtype
NUDGE = 1e-11  # relative change of all weights that fp64 sees and fp32 does not
# What fp64 makes of that change: a layer may damp or amplify it a hundredfold. A part in fp32 loses it or rounds it up.
SEEN = (NUDGE / 100, NUDGE * 100)
NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
T = TypeVar("T")


class Wide(TorchFunctionMode):
    """Turn what asks for fp32 into fp64: norms, rotary tables, softmax and losses of models that are fp64 otherwise."""

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
    """Compute in fp64: requests for fp32 are turned, and new tensors are fp64."""
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

    def bounds(self, dtype: torch.dtype) -> Errors:
        """Bounds for the same work in batches, from the errors of sequences alone."""
        least = LEAST_EPS * torch.finfo(dtype).eps
        return Errors(*(max(least, MARGIN * error) for error in (self.logits, self.loss, self.gradient)))


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
    """A result with every weight changed by a random share of at most `size`; the weights are restored to the bit."""
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


def dtype_of(model: nn.Module) -> torch.dtype:
    """The coarsest dtype of a model's floating-point parameters."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return max(dtypes or {torch.float32}, key=lambda dtype: torch.finfo(dtype).eps)
