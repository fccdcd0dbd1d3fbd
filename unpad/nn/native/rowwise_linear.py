"""Linear layer of rowwise_linear.h, in which a row's result depends on no other row."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from unpad.nn.native.library import code, function, pointer


def rowwise_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias without gradient; a row's result depends neither on the other rows nor on their number.

    Args:
        x: (num_rows, in) bf16, fp32 or fp64.
        weight: (out, in) of x's type.
        bias: (out,) of x's type.

    Returns:
        (num_rows, out) of x's type; sums are kept in fp32 or wider.
    """
    y: Tensor = _rowwise_linear(x, weight, bias)
    return y


_library = torch.library.Library("unpad", "FRAGMENT")
_library.define("rowwise_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_rowwise_linear = torch.ops.unpad.rowwise_linear.default


@cache
def _function() -> Any:
    sizes = [ctypes.c_int, *[ctypes.c_int64] * 3, ctypes.c_int]
    return function("rowwise_linear", None, *sizes, *[ctypes.c_void_p] * 4)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x, y = x.contiguous(), x.new_empty((x.shape[0], weight.shape[0]))
    assert x.dtype == weight.dtype == (x if bias is None else bias).dtype, "mixed dtypes"
    assert x.shape[1] == weight.shape[1], (tuple(x.shape), tuple(weight.shape))
    assert bias is None or bias.shape == weight.shape[:1], "the bias has other outputs"
    _function()(
        code(x.dtype), *x.shape, weight.shape[0], torch.get_num_threads(), pointer(x), pointer(weight),
        pointer(bias), pointer(y),
    )  # fmt: skip
    return y


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


_library.impl("rowwise_linear", _forward, "CPU")
torch.library.register_fake("unpad::rowwise_linear", _fake, lib=_library)
