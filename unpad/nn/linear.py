"""Linear layers that compute in low precision from copies of their weights, or from quantized weights.

A training step makes each copy where it is used, because the step changes the weights. Generation computes every token
with the same weights; inside `keep_copies` a copy lives until its weight changes. It also promises that a sequence gets
what it would get alone; inside `independent_rows` no product looks at the number of its rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from unpad.machine import processor_fields
from unpad.nn.autograd import apply
from unpad.nn.native import library
from unpad.nn.native.library import call, operator
from unpad.nn.native.quantized import QuantizedWeight, multiply_int8, runs_native
from unpad.nn.scope import Scope


def _empty(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@operator("rowwise_linear", _empty)
def rowwise_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias without gradient; a row's result depends neither on the other rows nor on their number.

    Args:
        x: (num_rows, in) bf16, fp32 or fp64.
        weight: (out, in) of x's type.
        bias: (out,) of x's type.

    Returns:
        (num_rows, out) of x's type; sums are kept in fp32 or wider.
    """
    x, y = x.contiguous(), _empty(x, weight)
    assert x.dtype == weight.dtype == (x if bias is None else bias).dtype, "mixed dtypes"
    assert x.shape[1] == weight.shape[1], (tuple(x.shape), tuple(weight.shape))
    assert bias is None or bias.shape == weight.shape[:1], "the bias has other outputs"
    call("rowwise_linear", x.dtype, *x.shape, weight.shape[0], torch.get_num_threads(), x, weight, bias, y)
    return y


@dataclass
class _Copy:
    value: Tensor
    version: int  # of the parameter when the copy was made


MIN_ROUND = 16  # rows; see `round_rows`
FIXED_ROWS = 32  # of torch's products where rows are independent
TILED_ROWS = 128  # of those that read prompts on AMX: torch packs the weight anew for every product
_independent: Scope[bool] = Scope(False)
_reading: Scope[bool] = Scope(False)
# Copies of the innermost `keep_copies` of this thread: parameter -> _Copy.
_kept: Scope[WeakTensorKeyDictionary | None] = Scope(None)
_owned: WeakKeyDictionary[object, WeakTensorKeyDictionary] = WeakKeyDictionary()


@contextmanager
def keep_copies(owner: object | None = None) -> Iterator[None]:
    """Keep low-precision copies of parameters inside, each until its parameter changes; for computing without gradient.

    Only for code that knows every writer: a write through `.data` or by torch's fused optimizers is not noticed unless
    `torch.autograd.graph.increment_version` reports it, as `optim.update` does.

    Args:
        owner: the copies live as long as this object and are reused the next time; None drops them at the end.
    """
    new = WeakTensorKeyDictionary()
    with _kept.of(new if owner is None else _owned.setdefault(owner, new)):
        yield


@contextmanager
def independent_rows() -> Iterator[None]:
    """Compute products inside, if they are without gradient and on the CPU, so that each row's bits depend on nothing
    but this row: neither on the other rows nor on their number.

    For generation. Elsewhere, as in the evaluation of held-out data, products stay torch's: on processors with AMX
    they are several times as fast in bf16.
    """
    with _independent.of(True):
        yield


@contextmanager
def reading() -> Iterator[None]:
    """Read prompts inside, many tokens of a sequence in one pass; outside, every sequence has one token."""
    with _reading.of(True):
        yield


@cache
def has_tiles() -> bool:
    """True if torch multiplies bf16 in the tiles of AMX, which the native kernels use in attention and the head."""
    return "amx_bf16" in processor_fields().get("flags", "").split()


def rows_are_independent(x: Tensor) -> bool:
    """True if computations on x, (total_tokens, ...), must treat every sequence as if it were alone."""
    return _independent.get() and not torch.is_grad_enabled() and x.device.type == "cpu"


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's if enabled, else the input's."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def computing_copy(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter in the computing dtype, without gradient; a quantized one as it is, for any dtype."""
    if isinstance(parameter, QuantizedWeight):
        return parameter
    if parameter.dtype == dtype:
        return parameter.detach()
    return _kept_copy(parameter, dtype, lambda: parameter.detach().to(dtype))


def _kept_copy(parameter: Tensor, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
    """The tensor of this dtype that `make` makes of a parameter; inside `keep_copies` it is made once."""
    copies = _kept.get()
    if copies is None:
        return make()
    kept: _Copy | None = copies.get(parameter)
    wanted = dtype, parameter.device, parameter._version
    if kept is None or (kept.value.dtype, kept.value.device, kept.version) != wanted:
        kept = copies[parameter] = _Copy(make(), parameter._version)
    return kept.value


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias of one dtype, x (num_rows, in); each row by itself inside `independent_rows`, and everywhere if
    the weight is quantized and without gradient.

    A row of torch's product depends on the number of rows, and at a fixed number on nothing but the row: without the
    native kernel, and where prompts are read in bf16 on AMX, it is computed a fixed number of rows at a time, rows of
    zeros added.
    """
    if isinstance(weight, QuantizedWeight):
        return _quantized_product(x, weight, bias)
    if not rows_are_independent(x):
        return F.linear(x, weight, bias)
    tiled = _reading.get() and x.dtype == torch.bfloat16 and has_tiles()
    if not tiled and library.runs(x) and library.is_plain(weight) and library.is_plain(bias):
        return rowwise_linear(x, weight, bias)
    at_once = TILED_ROWS if tiled else FIXED_ROWS
    parts = F.pad(x, (0, 0, 0, -len(x) % at_once)).split(at_once)
    return torch.cat([F.linear(part, weight, bias) for part in parts])[: len(x)]


def _quantized_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """`product` by a quantized weight, without a gradient of the weight."""
    of_rows = not (torch.is_grad_enabled() and x.requires_grad)
    if of_rows and runs_native(x):
        y = weight.native(x.float())
    elif of_rows and x.dtype != torch.float64:
        y = multiply_int8(x.float(), _kept_copy(weight, torch.float32, weight.whole), weight.scales)
    else:
        return product(x, _kept_copy(weight, x.dtype, lambda: weight.widened(x.dtype)), bias)
    return (y if bias is None else y + bias).to(x.dtype)


class Linear(nn.Linear):
    """y = x W^T + b over a flat run, (total_tokens, in) to (total_tokens, out), in the computing dtype.

    Attributes:
        recasts: whether the backward pass makes its low-precision copy of the weight anew. A stored copy of a weight
            that is divided among processes would be whole.
    """

    recasts: bool = False

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        # A frozen weight may be in low precision itself; with a gradient its products have rounded rows too.
        if self.weight.dtype == dtype and (dtype.itemsize > 2 or not torch.is_grad_enabled()):
            return product(x.to(dtype), self.weight, self.bias)
        if not torch.is_grad_enabled():
            bias = None if self.bias is None else computing_copy(self.bias, dtype)
            return product(x.to(dtype), computing_copy(self.weight, dtype), bias)
        return apply(_LowPrecision, x.to(dtype), self.weight, self.bias, self.recasts)


def apart(linear: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x W^T of a linear layer, and its bias for the native kernel that reads the product next and adds it on the way.

    The bias is None if the product already contains it: without a bias or a gradient, where no kernel follows, in low
    precision, where the sum would be rounded twice, and for a layer wrapped by another one.
    """
    if type(linear) is not Linear or linear.bias is None or not torch.is_grad_enabled() or not library.runs(x):
        return linear(x), None
    if not x.dtype == linear.weight.dtype == compute_dtype(x):
        return linear(x), None
    return F.linear(x, linear.weight), linear.bias


def round_rows(x: Tensor) -> Tensor:
    """Append rows of zeros to x (rows, columns), so that row counts repeat: oneDNN prepares a kernel for every new
    count, which takes several times as long as a small product. At most an eighth more rows, or 15.
    """
    if x.dim() != 2 or x.device.type != "cpu":  # first: torch.compile takes a number whose bits are read for a constant
        return x
    missing = -len(x) % max(MIN_ROUND, 1 << max(len(x).bit_length() - 4, 0))
    return F.pad(x, (0, 0, 0, missing)) if missing else x


class _LowPrecision(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recasts: bool) -> Tensor:
        low, num_rows = computing_copy(weight, x.dtype), len(x)
        x = round_rows(x)
        ctx.save_for_backward(x, weight if recasts else low)
        return F.linear(x, low, None if bias is None else computing_copy(bias, x.dtype))[:num_rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, kept = ctx.saved_tensors
        low = kept.to(x.dtype)
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        num_rows, grad = len(grad), round_rows(grad)
        return (
            (grad @ low)[:num_rows] if need_x else None,
            grad.t() @ x if need_weight else None,
            grad.sum(0) if need_bias else None,
            None,
        )
