"""The operator of native activations; tests/nn has what all paths do."""

import pytest
import torch
from torch import Tensor

from tests.helpers.paths import LOWEST, NATIVE_DTYPES, check_operator, needs_kernels
from unpad.nn.activation import GATED, KINDS, activation

pytestmark = needs_kernels


def test_operators_describe_themselves_rightly():
    x, grad = torch.randn(3, 14).to(LOWEST), torch.randn(3, 7).to(LOWEST)
    for bias in (None, torch.randn(14).to(LOWEST)):
        check_operator("activation", "swiglu", x, bias)
        check_operator("activation_backward", "swiglu", grad, x, bias)


def with_gradients(kind: str, inputs: list[Tensor], threads: int = 1) -> list[Tensor]:
    """y, and the gradients of the inputs: x, or x and its bias."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    torch.set_num_threads(threads)
    y = activation(kind, *leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))]


@pytest.mark.parametrize("dtype", [d for d in NATIVE_DTYPES if d != torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_is_added_as_beforehand_on_any_number_of_threads(kind, dtype):
    width = 128 if kind in GATED else 64
    for tokens in (0, 1, 16, 700, 4100):
        torch.manual_seed(tokens)
        x, bias = torch.randn(tokens, width).to(dtype), torch.randn(width).to(dtype)
        y, grad_x = with_gradients(kind, [x + bias])
        for threads in (1, 2, 3):
            found = with_gradients(kind, [x, bias], threads)
            assert torch.equal(found[0], y)
            assert torch.equal(found[1], grad_x)
            torch.testing.assert_close(found[2], grad_x.sum(0))


def test_a_sum_over_rows_keeps_its_order_at_any_number_of_threads():
    x, bias = torch.randn(5000, 256), torch.randn(256)
    sums = [with_gradients("gelu", [x, bias], threads)[2] for threads in (1, 2, 3)]
    assert all(torch.equal(one, sums[0]) for one in sums)


@pytest.mark.parametrize("bias", [torch.zeros(13), torch.zeros(14, dtype=torch.float64)], ids=["short", "wide"])
def test_a_bias_that_does_not_fit_is_refused(bias):
    with pytest.raises(AssertionError, match="does not match"):
        activation("relu", torch.zeros(3, 14), bias)
