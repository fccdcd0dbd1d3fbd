"""Weights of 8 bits: how numbers are rounded, the operator of quantized_linear.h, and the tensor that stands for such
weights in a model.

Whole numbers from -127 to 127, and a scale for every output. In a product the rows of activations become such numbers
too, so sums are whole numbers: neither their order nor the number of rows or threads changes a bit, and torch computes
the same bits as the native kernel.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from unpad.nn.native import library
from unpad.nn.native.library import operator

MOST = 127  # the largest number
MOST_INPUTS = 1 << 16  # sums of more products may leave 32 bits
EXACT_INPUTS = (1 << 24) // MOST**2  # whose sum of products is exact in fp32
LEAST_SCALE = torch.finfo(torch.float32).tiny  # of activations: the inverse of less is infinite

BLOCK = 16  # outputs whose numbers lie together; those that fill up the last block are not written
ModelType = TypeVar("ModelType", bound=nn.Module)
aten = torch.ops.aten


# --------------------------------------------------------------------------- rounding


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round (out, in) to int8; returns it and the scales, (out,), which are 0 where fp32 has no number that small."""
    largest = weight.abs().amax(1)
    scales = largest / MOST
    scales = scales.masked_fill(torch.round(largest / scales) != MOST, 0)
    numbers = torch.where(scales[:, None] == 0, 0, torch.round(weight / scales[:, None]))
    return numbers.clamp(-MOST, MOST).to(torch.int8), scales


# --------------------------------------------------------------------------- operator


def _empty(x: Tensor, numbers: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], len(scales)))


@operator("int8_linear", _empty)
def int8_linear(x: Tensor, numbers: Tensor, scales: Tensor) -> Tensor:
    """x weight^T without gradient, where the sums are whole numbers.

    Args:
        x: (num_rows, in) fp32; each row is rounded to whole numbers from -127 to 127.
        numbers: (blocks, in / 4, BLOCK, 4) uint8, those of the weight plus 128.
        scales: (out,) fp32.

    Returns:
        (num_rows, out) fp32.
    """
    assert numbers.shape == (-(-len(scales) // BLOCK), -(-x.shape[1] // 4), BLOCK, 4), (x.shape, numbers.shape)
    assert x.dtype == scales.dtype == torch.float32, (x.dtype, scales.dtype)
    x, y = x.contiguous(), _empty(x, numbers, scales)
    library.call("int8_linear", *x.shape, y.shape[1], torch.get_num_threads(), x, numbers, scales, y)
    return y


# --------------------------------------------------------------------------- in a model


class QuantizedWeight(Tensor):
    """A parameter of a model that only computes, (out, in) fp32 to all who look at it.

    `nn.linear.product` multiplies by its numbers; an embedding widens the rows that it looks up. Every other
    computation gets the widened weight, anew each time.

    Attributes:
        numbers: (blocks, in / 4, BLOCK, 4) uint8, those of `to_int8` plus 128, filled up with 128.
        scales: (out,) fp32.
    """

    numbers: Tensor
    scales: Tensor
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor, shape: tuple[int, int]) -> QuantizedWeight:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=numbers.device)
        made.numbers, made.scales = numbers, scales
        return made

    def __init__(self, numbers: Tensor, scales: Tensor, shape: tuple[int, int]) -> None:
        """Hold numbers and scales in blocks of `BLOCK` outputs, as the kernel reads them."""

    @classmethod
    def pack(cls, numbers: Tensor, scales: Tensor) -> QuantizedWeight:
        """Hold what `to_int8` returned."""
        out, width = numbers.shape
        filled = F.pad(numbers.view(torch.uint8) ^ 128, (0, -width % 4, 0, -out % BLOCK), value=128)
        blocks = filled.unflatten(1, (-1, 4)).unflatten(0, (-1, BLOCK)).transpose(1, 2)
        return cls(blocks.contiguous(), scales.contiguous(), (out, width))

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weight, (num,) int64 -> (num, in) fp32."""
        numbers = self.numbers[index // BLOCK, :, index % BLOCK].flatten(1)[:, : self.shape[1]]
        return (numbers.float() - 128) * self.scales[index, None]

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole weight as a plain tensor."""
        return self.whole(dtype) * self.scales.to(dtype)[:, None]

    def whole(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers in their order, (out, in)."""
        out, width = self.shape
        return self.numbers.transpose(1, 2).flatten(2).flatten(0, 1)[:out, :width].to(dtype) - 128

    def native(self, x: Tensor) -> Tensor:
        """x weight^T by the native kernel, (num_rows, in) fp32 -> (num_rows, out) fp32."""
        return int8_linear(x, self.numbers, self.scales)

    @classmethod
    def _dispatch(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        first = args[0] if args else None
        if isinstance(first, QuantizedWeight):
            assert not func._schema.is_mutable, f"{func} would change a quantized weight"
            if func in (aten.detach.default, aten.clone.default, aten.alias.default):
                return type(first)(first.numbers, first.scales, (first.shape[0], first.shape[1]))
            if func is aten.embedding.default:
                index: Tensor = args[1]
                return first.rows(index.flatten()).view(*index.shape, first.shape[1])
        args, kwargs = tree_map(lambda x: x.widened() if isinstance(x, QuantizedWeight) else x, (args, kwargs or {}))
        return func(*args, **kwargs)

    __torch_dispatch__: Any = _dispatch


def plain_copy(model: ModelType) -> ModelType:
    """A copy of a model with widened weights in place of quantized ones."""
    copied = copy.deepcopy(model)
    for layer in copied.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if isinstance(parameter, QuantizedWeight):
                setattr(layer, name, nn.Parameter(parameter.widened(), requires_grad=False))
    return copied


# --------------------------------------------------------------------------- products without the kernel


def multiply_int8(x: Tensor, whole: Tensor, scales: Tensor) -> Tensor:
    """x weight^T with the bits of the kernel, (num_rows, in) fp32 -> (num_rows, out) fp32.

    Args:
        whole: of the `QuantizedWeight`; scales: its.
    """
    own = x.abs().amax(1, keepdim=True) / MOST
    inverse = torch.where(own < LEAST_SCALE, 0, 1 / own)
    rounded = torch.round(x * inverse)
    parts = [F.linear(*part) for part in zip(rounded.split(EXACT_INPUTS, 1), whole.split(EXACT_INPUTS, 1), strict=True)]
    sums = parts[0] if len(parts) == 1 else torch.stack(parts).double().sum(0).float()
    return sums * (own * scales)


def runs_native(x: Tensor) -> bool:
    """True if the kernel multiplies activations like these by quantized weights."""
    return x.device.type == "cpu" and x.dtype != torch.float64 and library.enabled()
