"""Rounded sums of gradients as one operator, `unpad::add_rounded`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from unpad.nn.native.library import call, is_plain, operator, runs


def accepts(gradient: Tensor) -> bool:
    """True if the kernel reads gradients like this one: contiguous fp32 on the processor, kernels being enabled."""
    return gradient.dtype == torch.float32 and runs(gradient) and gradient.is_contiguous() and is_plain(gradient)


@operator("add_rounded", lambda *given: None, changes=["sums"])
def add_rounded(sums: Tensor, gradients: Sequence[Tensor], factor: float, shift: float, replace: bool) -> None:
    """Add (gradient * factor + shift) - shift of every gradient to the sums, in turn.

    Args:
        sums: contiguous fp64.
        gradients: contiguous fp32, each with as many numbers as there are sums.
        factor: a power of two, so that the product is exact.
        shift: a number whose spacing to its neighbours is the multiple to round to.
        replace: the sums hold nothing yet; the first gradient takes their place.
    """
    for number, gradient in enumerate(gradients):
        assert (sums.dtype, gradient.dtype) == (torch.float64, torch.float32), (sums.dtype, gradient.dtype)
        assert sums.numel() == gradient.numel(), (sums.numel(), gradient.numel())
        first = replace and number == 0
        call("add_rounded", gradient.numel(), factor, shift, first, torch.get_num_threads(), gradient, sums)
