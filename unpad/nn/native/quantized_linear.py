"""Linear layers of quantized_linear.h, whose weights are of 8 or 4 bits."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from unpad.nn.native.library import function, pointer

BLOCK = 16  # outputs whose numbers lie together; those that fill up the last block are not written


def int8_linear(x: Tensor, numbers: Tensor, scales: Tensor) -> Tensor:
    """x weight^T without gradient, where the sums are whole numbers.

    Args:
        x: (num_rows, in) fp32; each row is rounded to whole numbers from -127 to 127.
        numbers: (blocks, in / 4, BLOCK, 4) uint8, those of the weight plus 128.
        scales: (out,) fp32.

    Returns:
        (num_rows, out) fp32.
    """
    y: Tensor = _int8_linear(x, numbers, scales)
    return y


def int4_linear(x: Tensor, numbers: Tensor, scales: Tensor, num_outputs: int) -> Tensor:
    """x weight^T without gradient; a row's result depends neither on the other rows nor on their number.

    Args:
        x: (num_rows, in) fp32; `in` is a multiple of 32.
        numbers: (blocks, in / 8, BLOCK) int32, eight numbers of the weight plus 8 in each.
        scales: (blocks, in / 32, BLOCK) fp32.

    Returns:
        (num_rows, num_outputs) fp32.
    """
    y: Tensor = _int4_linear(x, numbers, scales, num_outputs)
    return y


_library = torch.library.Library("unpad", "FRAGMENT")
_library.define("int8_linear(Tensor x, Tensor numbers, Tensor scales) -> Tensor")
_library.define("int4_linear(Tensor x, Tensor numbers, Tensor scales, int num_outputs) -> Tensor")
_int8_linear = torch.ops.unpad.int8_linear.default
_int4_linear = torch.ops.unpad.int4_linear.default


@cache
def _functions() -> tuple[Any, Any]:
    arguments = [*[ctypes.c_int64] * 3, ctypes.c_int, *[ctypes.c_void_p] * 4]
    return function("int8_linear", None, *arguments), function("int4_linear", None, *arguments)


def _forward_int8(x: Tensor, numbers: Tensor, scales: Tensor) -> Tensor:
    assert numbers.shape == (-(-len(scales) // BLOCK), -(-x.shape[1] // 4), BLOCK, 4), (x.shape, numbers.shape)
    return _forward(0, x, numbers, scales, len(scales))


def _forward_int4(x: Tensor, numbers: Tensor, scales: Tensor, num_outputs: int) -> Tensor:
    blocks, width = -(-num_outputs // BLOCK), x.shape[1]
    assert numbers.shape == (blocks, width // 8, BLOCK), (x.shape, numbers.shape)
    assert scales.shape == (blocks, width // 32, BLOCK), (x.shape, scales.shape)
    return _forward(1, x, numbers, scales, num_outputs)


def _forward(which: int, x: Tensor, numbers: Tensor, scales: Tensor, num_outputs: int) -> Tensor:
    assert x.dtype == scales.dtype == torch.float32, (x.dtype, scales.dtype)
    x, y = x.contiguous(), x.new_empty((x.shape[0], num_outputs))
    threads = torch.get_num_threads()
    _functions()[which](*x.shape, num_outputs, threads, pointer(x), pointer(numbers), pointer(scales), pointer(y))
    return y


def _fake_int8(x: Tensor, numbers: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], len(scales)))


def _fake_int4(x: Tensor, numbers: Tensor, scales: Tensor, num_outputs: int) -> Tensor:
    return x.new_empty((x.shape[0], num_outputs))


for _name, _made, _fake in (("int8_linear", _forward_int8, _fake_int8), ("int4_linear", _forward_int4, _fake_int4)):
    _library.impl(_name, _made, "CPU")
    torch.library.register_fake(f"unpad::{_name}", _fake, lib=_library)
