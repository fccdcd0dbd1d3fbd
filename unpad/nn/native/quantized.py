"""Weights of 8 or 4 bits: how numbers are rounded, the operators of quantized_linear.h, and the tensors that stand for
such weights in a model.

int8: whole numbers from -127 to 127, and a scale for every output. In a product the rows of activations become such
numbers too, so sums are whole numbers: neither their order nor the number of rows or threads changes a bit, and torch
computes the same bits as the native kernels.

int4: q from 0 to 15 stands for (q - 8) times the scale of its group of 32 inputs, by which the number of the group that
is farthest from zero becomes -8: Q4_0 of GGUF. Activations stay as they are.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from unpad.nn.native import library
from unpad.nn.native.library import operator

Kind = Literal["int8", "int4"]
GROUP = 32  # inputs that share a scale in int4
MOST, LOWEST = 127, -8  # the largest number of int8, and the number of int4 of what is farthest from zero
MOST_INPUTS = 1 << 16  # of int8: sums of more products may leave 32 bits
EXACT_INPUTS = (1 << 24) // MOST**2  # whose sum of products is exact in fp32
LEAST_SCALE = torch.finfo(torch.float32).tiny  # of activations: the inverse of less is infinite

BLOCK = 16  # outputs whose numbers lie together; those that fill up the last block are not written
ModelType = TypeVar("ModelType", bound=nn.Module)
aten = torch.ops.aten


# --------------------------------------------------------------------------- rounding


def to_int8(weight: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Round (out, in) to int8; returns it and the scales, (out,)."""
    scales = _scales(weight.abs().amax(1), MOST, scale_dtype)
    return _rounded(weight, scales[:, None]).clamp(-MOST, MOST).to(torch.int8), scales


def to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round (out, in) to int4.

    Returns:
        (out, in / 2) uint8, 16 bytes a group: the low halves are its first 16 numbers, the high ones the others; and
        the scales, (out, in / 32) fp16.
    """
    groups = weight.unflatten(1, (-1, GROUP))  # (out, in / 32, 32)
    extremes = groups.gather(2, groups.abs().argmax(2, keepdim=True))[..., 0]
    scales = _scales(extremes, LOWEST, torch.float16)
    numbers = (_rounded(groups, scales[..., None]).clamp(LOWEST, -1 - LOWEST) - LOWEST).to(torch.uint8)
    low, high = numbers.chunk(2, 2)
    return (low | high << 4).flatten(1), scales


def from_int8(numbers: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight, (out, in), that `to_int8` rounded to these."""
    return numbers.to(dtype) * scales.to(dtype)[:, None]


def from_int4(numbers: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight, (out, in), that `to_int4` rounded to these."""
    wide: Tensor = int4_numbers(numbers).unflatten(1, (-1, GROUP)).to(dtype) + LOWEST
    return (wide * scales.to(dtype)[..., None]).flatten(1)


def int4_numbers(numbers: Tensor) -> Tensor:
    """Numbers from 0 to 15 in their order, (out, in) uint8, of those that `to_int4` returns."""
    halves = numbers.unflatten(1, (-1, GROUP // 2))
    return torch.cat([halves & 15, halves >> 4], 2).flatten(1)


def _scales(extremes: Tensor, full: int, dtype: torch.dtype) -> Tensor:
    """Scales by which `extremes` become `full`; 0 where the dtype has no number that small."""
    scales = (extremes / full).to(dtype)
    return scales.masked_fill(torch.round(extremes / scales.float()) != full, 0)


def _rounded(weight: Tensor, scales: Tensor) -> Tensor:
    """Numbers of the weight in units of their scales; 0 where these are 0."""
    return torch.where(scales == 0, 0, torch.round(weight / scales.float()))


# --------------------------------------------------------------------------- operators


def _empty_int8(x: Tensor, numbers: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], len(scales)))


@operator("int8_linear", _empty_int8)
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
    return _multiply("int8_linear", x, numbers, scales, _empty_int8(x, numbers, scales))


def _empty_int4(x: Tensor, numbers: Tensor, scales: Tensor, num_outputs: int) -> Tensor:
    return x.new_empty((x.shape[0], num_outputs))


@operator("int4_linear", _empty_int4)
def int4_linear(x: Tensor, numbers: Tensor, scales: Tensor, num_outputs: int) -> Tensor:
    """x weight^T without gradient; a row's result depends neither on the other rows nor on their number.

    Args:
        x: (num_rows, in) fp32; `in` is a multiple of 32.
        numbers: (blocks, in / 8, BLOCK) int32, eight numbers of the weight plus 8 in each.
        scales: (blocks, in / 32, BLOCK) fp32.

    Returns:
        (num_rows, num_outputs) fp32.
    """
    blocks, width = -(-num_outputs // BLOCK), x.shape[1]
    assert numbers.shape == (blocks, width // 8, BLOCK), (x.shape, numbers.shape)
    assert scales.shape == (blocks, width // 32, BLOCK), (x.shape, scales.shape)
    return _multiply("int4_linear", x, numbers, scales, _empty_int4(x, numbers, scales, num_outputs))


def _multiply(function: str, x: Tensor, numbers: Tensor, scales: Tensor, y: Tensor) -> Tensor:
    assert x.dtype == scales.dtype == torch.float32, (x.dtype, scales.dtype)
    x = x.contiguous()
    library.call(function, *x.shape, y.shape[1], torch.get_num_threads(), x, numbers, scales, y)
    return y


# --------------------------------------------------------------------------- in a model


class QuantizedWeight(Tensor):
    """A parameter of a model that only computes, (out, in) fp32 to all who look at it.

    `nn.linear.product` multiplies by its numbers; an embedding widens the rows that it looks up. Every other
    computation gets the widened weight, anew each time.
    """

    kind: ClassVar[Kind]
    numbers: Tensor
    scales: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor, shape: tuple[int, int]) -> QuantizedWeight:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=numbers.device)
        made.numbers, made.scales = numbers, scales
        weight: QuantizedWeight = made
        return weight

    def __init__(self, numbers: Tensor, scales: Tensor, shape: tuple[int, int]) -> None:
        """Hold numbers and scales in blocks of `BLOCK` outputs, as the kernels read them."""

    @abstractmethod
    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weight, (num,) int64 -> (num, in) fp32."""

    @abstractmethod
    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole weight as a plain tensor."""

    @abstractmethod
    def native(self, x: Tensor) -> Tensor:
        """x weight^T by the native kernels, (num_rows, in) fp32 -> (num_rows, out) fp32."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.numbers.nbytes + self.scales.nbytes

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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


class Int8Weight(QuantizedWeight):
    """A weight of `to_int8`.

    Attributes:
        numbers: (blocks, in / 4, BLOCK, 4) uint8, the numbers plus 128, filled up with 128.
        scales: (out,) fp32.
    """

    kind = "int8"

    @classmethod
    def pack(cls, numbers: Tensor, scales: Tensor) -> Int8Weight:
        """Hold what `to_int8` returned."""
        out, width = numbers.shape
        filled = F.pad(numbers.view(torch.uint8) ^ 128, (0, -width % 4, 0, -out % BLOCK), value=128)
        blocks = filled.unflatten(1, (-1, 4)).unflatten(0, (-1, BLOCK)).transpose(1, 2)
        return cls(blocks.contiguous(), scales.float().contiguous(), (out, width))

    def rows(self, index: Tensor) -> Tensor:
        numbers = self.numbers[index // BLOCK, :, index % BLOCK].flatten(1)[:, : self.shape[1]]
        return (numbers.float() - 128) * self.scales[index, None]

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.whole(dtype) * self.scales.to(dtype)[:, None]

    def whole(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers in their order, (out, in)."""
        out, width = self.shape
        return self.numbers.transpose(1, 2).flatten(2).flatten(0, 1)[:out, :width].to(dtype) - 128

    def native(self, x: Tensor) -> Tensor:
        return int8_linear(x, self.numbers, self.scales)


class Int4Weight(QuantizedWeight):
    """A weight of `to_int4`.

    Attributes:
        numbers: (blocks, in / 8, BLOCK) int32: each holds the numbers of 8 inputs, the first in its lowest bits.
        scales: (blocks, in / 32, BLOCK) fp32; 0 where a block is filled up.
    """

    kind = "int4"

    @classmethod
    def pack(cls, numbers: Tensor, scales: Tensor) -> Int4Weight:
        """Hold what `to_int4` returned."""
        out, width = numbers.shape[0], 2 * numbers.shape[1]
        eighths = F.pad(int4_numbers(numbers), (0, 0, 0, -out % BLOCK)).unflatten(1, (-1, 8)).int()
        places = 4 * torch.arange(8, dtype=torch.int32, device=numbers.device)
        words = (eighths << places).sum(2, dtype=torch.int32)  # (blocks * BLOCK, in / 8)
        filled = F.pad(scales.float(), (0, 0, 0, -out % BLOCK))
        words, filled = (x.unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous() for x in (words, filled))
        return cls(words, filled, (out, width))

    def rows(self, index: Tensor) -> Tensor:
        return self.widened()[index]

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        places = 4 * torch.arange(8, dtype=torch.int32, device=self.numbers.device)
        words = self.numbers.transpose(1, 2).flatten(0, 1)[: self.shape[0]]  # (out, in / 8)
        numbers: Tensor = (words[..., None] >> places & 15).flatten(1).unflatten(1, (-1, GROUP)).to(dtype) + LOWEST
        scales = self.scales.transpose(1, 2).flatten(0, 1)[: self.shape[0]].to(dtype)
        return (numbers * scales[..., None]).flatten(1)

    def native(self, x: Tensor) -> Tensor:
        return int4_linear(x, self.numbers, self.scales, self.shape[0])


PACKED: dict[Kind, type[Int8Weight | Int4Weight]] = {"int8": Int8Weight, "int4": Int4Weight}


def plain_copy(model: ModelType) -> ModelType:
    """A copy of a model with widened weights in place of quantized ones."""
    copied = copy.deepcopy(model)
    for layer in copied.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if isinstance(parameter, QuantizedWeight):
                setattr(layer, name, nn.Parameter(parameter.widened(), requires_grad=False))
    return copied


# --------------------------------------------------------------------------- products of int8 without kernels


def multiply_int8(x: Tensor, whole: Tensor, scales: Tensor) -> Tensor:
    """x weight^T with the bits of the kernel of int8, (num_rows, in) fp32 -> (num_rows, out) fp32.

    Args:
        whole: of the `Int8Weight`; scales: its.
    """
    own = x.abs().amax(1, keepdim=True) / MOST
    inverse = torch.where(own < LEAST_SCALE, 0, 1 / own)
    rounded = torch.round(x * inverse)
    parts = [F.linear(*part) for part in zip(rounded.split(EXACT_INPUTS, 1), whole.split(EXACT_INPUTS, 1), strict=True)]
    sums = parts[0] if len(parts) == 1 else torch.stack(parts).double().sum(0).float()
    return sums * (own * scales)


def runs_native(x: Tensor) -> bool:
    """True if a kernel multiplies activations like these by quantized weights."""
    return x.device.type == "cpu" and x.dtype != torch.float64 and library.enabled()
