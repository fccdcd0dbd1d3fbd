"""Rounded sums of gradients as one operator, `unpad::add_rounded`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from unpad.nn.native.library import function, is_plain, pointer, runs


def accepts(gradient: Tensor) -> bool:
    """True if the kernel reads gradients like this one: contiguous fp32 on the processor, kernels being enabled."""
    return gradient.dtype == torch.float32 and runs(gradient) and gradient.is_contiguous() and is_plain(gradient)


def add_rounded(sums: Tensor, gradients: Sequence[Tensor], factor: float, shift: float, replace: bool) -> None:
    """Add (gradient * factor + shift) - shift of every gradient to the sums, in turn.

    Args:
        sums: contiguous fp64.
        gradients: contiguous fp32, each with as many numbers as there are sums.
        factor: a power of two, so that the product is exact.
        shift: a number whose spacing to its neighbours is the multiple to round to.
        replace: the sums hold nothing yet; the first gradient takes their place.
    """
    torch.ops.unpad.add_rounded.default(sums, gradients, factor, shift, replace)


_library = torch.library.Library("unpad", "FRAGMENT")
_library.define("add_rounded(Tensor(a!) sums, Tensor[] gradients, float factor, float shift, bool replace) -> ()")


@cache
def _function() -> Callable[..., None]:
    sizes = [ctypes.c_int64, ctypes.c_double, ctypes.c_double, ctypes.c_int, ctypes.c_int]
    return function("add_rounded", None, *sizes, *[ctypes.c_void_p] * 2)


def _add(sums: Tensor, gradients: list[Tensor], factor: float, shift: float, replace: bool) -> None:
    call, threads = _function(), torch.get_num_threads()
    for number, gradient in enumerate(gradients):
        assert (sums.dtype, gradient.dtype) == (torch.float64, torch.float32), (sums.dtype, gradient.dtype)
        assert sums.numel() == gradient.numel(), (sums.numel(), gradient.numel())
        first = replace and number == 0
        call(gradient.numel(), factor, shift, first, threads, pointer(gradient), pointer(sums))


def _fake(sums: Tensor, gradients: list[Tensor], factor: float, shift: float, replace: bool) -> None:
    return None


_library.impl("add_rounded", _add, "CPU")
torch.library.register_fake("unpad::add_rounded", _fake, lib=_library)
