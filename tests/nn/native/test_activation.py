"""Activations of unpad/nn/native/activation.py against torch in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.nn.native import library
from unpad.nn.native.activation import GATED, KINDS, activation

pytestmark = pytest.mark.skipif(not library.enabled(), reason=library.describe())

BF16, DOUBLE = torch.bfloat16, torch.float64
SHAPES = [(0, 16), (1, 1), (1, 512), (3, 7), (17, 16), (50, 33), (70, 256)]


def reference(kind: str, x: Tensor) -> Tensor:
    if kind not in GATED:
        return {"relu": F.relu, "gelu": F.gelu}[kind](x)
    gate, up = x.chunk(2, -1)
    return {"geglu": F.gelu, "swiglu": F.silu}[kind](gate) * up


def error(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30)) if actual.numel() else 0.0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, DOUBLE], ids=["bf16", "double"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_torch(kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(shape[0])
    tokens, hidden = shape
    x = (torch.randn(tokens, hidden * (2 if kind in GATED else 1)) * 3).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    grad = torch.randn(shape).to(dtype)
    y, expected = activation(kind, x), reference(kind, exact)
    y.backward(grad)
    expected.backward(grad.double())
    assert y.dtype == dtype
    assert y.shape == shape
    bound = 1e-12 if dtype == DOUBLE else 2.5e-3
    assert error(y.detach(), expected.detach()) < bound
    assert error(x.grad, exact.grad) < bound


@pytest.mark.parametrize("kind", KINDS)
def test_every_bf16_number_of_use_is_near_rounding(kind: str) -> None:
    """All bf16 numbers between -30 and 30, one by one: no region of the functions is far off."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    every = every[every.isfinite() & (every.abs() < 30)][:, None]
    x = (torch.cat([every, torch.ones_like(every)], 1) if kind in GATED else every).contiguous().requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, expected = activation(kind, x), reference(kind, exact)
    y.backward(torch.ones_like(y))
    expected.sum().backward()
    for got, want in ((y, expected), (x.grad, exact.grad)):
        assert ((got.double() - want).abs() <= want.abs() / 256 + 4e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_inf_show(kind: str) -> None:
    width = 66 if kind in GATED else 33
    for bad in (float("nan"), float("inf")):
        x = torch.zeros(3, width, dtype=BF16)
        x[1, 32] = bad
        if kind in GATED:
            x[:, 33:] = 1
        x.requires_grad_()
        y = activation(kind, x)
        assert not y[1, 32].isfinite()
        assert y.isfinite().sum() == y.numel() - 1
        y.backward(torch.ones_like(y))
        assert bad == float("inf") or x.grad[1, 32].isnan()


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(kind: str) -> None:
    x = torch.randn(300, 256).to(BF16)
    one = activation(kind, x)
    torch.set_num_threads(2)
    try:
        assert torch.equal(one, activation(kind, x))
    finally:
        torch.set_num_threads(1)


def test_operators_describe_themselves_rightly() -> None:
    x, grad = torch.randn(3, 14).to(BF16), torch.randn(3, 7).to(BF16)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.unpad.activation.default, ("swiglu", x), test_utils=utils)
    torch.library.opcheck(torch.ops.unpad.activation_backward.default, ("swiglu", grad, x), test_utils=utils)
