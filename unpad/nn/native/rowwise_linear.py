"""Linear layer of rowwise_linear.h, in which a row's result depends on no other row."""

from __future__ import annotations

import torch
from torch import Tensor

from unpad.nn.native.library import call, operator


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
