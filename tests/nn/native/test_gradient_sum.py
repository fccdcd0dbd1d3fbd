"""The kernel of rounded sums: on every target of the machine the bits of torch's operations."""

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.paths import check_operator, needs_kernels
from unpad.nn.native import library
from unpad.processes import sums as gradient_sum

pytestmark = needs_kernels

SHIFT = 48.0


def example(count: int) -> tuple[Tensor, Tensor]:
    """A gradient with ties, huge, tiny and non-finite numbers, and a sum."""
    generator = torch.Generator().manual_seed(count)
    gradient = torch.randn(count, generator=generator) * 2.0 ** torch.randint(-130, 100, (count,), generator=generator)
    special = torch.tensor([2.0**-48, -3 * 2.0**-48, 15.999999, float("inf"), float("nan"), 0.0, -0.0, 2.0**57, 1e-45])
    gradient[: len(special)] = special[:count]
    return gradient, torch.randn(count, generator=generator, dtype=torch.float64)


def expected(gradient: Tensor, total: Tensor, factor: float, shift: float, replace: bool) -> Tensor:
    rounded = gradient.double() * factor + shift - shift
    return rounded if replace else total + rounded


@pytest.mark.parametrize("target", library.TARGETS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_every_target_gives_the_bits_of_torch(target, num_threads):
    table = library._load()[0].library.unpad_kernels_for(target.encode())
    if not table:
        pytest.skip(f"this processor has no {library.TARGETS[target]}")
    sizes = [ctypes.c_int64, ctypes.c_double, ctypes.c_double, ctypes.c_int, ctypes.c_int]
    call = ctypes.CFUNCTYPE(None, *sizes, ctypes.c_void_p, ctypes.c_void_p)(table.contents.add_rounded)
    for count in (0, 1, 3, 4, 7, 8, 15, 16, 17, 33, 100, 40_001):
        for factor, shift, replace in ((1.0, SHIFT, 0), (1.0, SHIFT, 1), (2.0**-16, SHIFT, 0), (1.0, 3 * SHIFT, 1)):
            gradient, total = example(count)
            wanted = expected(gradient, total, factor, shift, bool(replace))
            call(count, factor, shift, replace, num_threads, gradient.data_ptr(), total.data_ptr())
            np.testing.assert_array_equal(total, wanted)  # NaN equals NaN


def test_operator_describes_itself_rightly():
    gradient, total = example(20)
    check_operator("add_rounded", total, [gradient.nan_to_num(0, 1, 1)], 1.0, SHIFT, False)


def test_only_gradients_whose_memory_is_fp32_are_accepted():
    gradient = torch.ones(4, 4)
    assert gradient_sum.accepts(gradient)
    assert not gradient_sum.accepts(gradient.T[:2])
    assert not gradient_sum.accepts(gradient.double())
    assert not gradient_sum.accepts(gradient.bfloat16())
    with library.switched_off():
        assert not gradient_sum.accepts(gradient)
