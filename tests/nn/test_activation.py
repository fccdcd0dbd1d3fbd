"""Activations by every path against torch in fp64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.attention_cases import error
from tests.helpers.grid import pairs
from tests.helpers.paths import PATHS, Path, on, taken
from unpad.nn.activation import GATED, KINDS, activate

pytestmark = pytest.mark.promise("speed.kernels")

BF16, DOUBLE = torch.bfloat16, torch.float64
# Relative error of bf16: a native kernel rounds once, torch's gated kinds once more between.
ROUNDING: dict[Path, float] = {"native": 1 / 256, "torch": 1 / 128}
SHAPES = [(0, 16), (1, 1), (1, 512), (3, 7), (17, 16), (50, 33), (70, 256)]


@pytest.fixture(params=PATHS, autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    with on(request.param):
        yield request.param


def reference(kind: str, x: Tensor) -> Tensor:
    if kind not in GATED:
        return {"relu": F.relu, "gelu": F.gelu}[kind](x)
    gate, up = x.chunk(2, -1)
    return {"geglu": F.gelu, "swiglu": F.silu}[kind](gate) * up


@pytest.mark.parametrize("kind", ["relu", "gelu_tanh", "swiglu"])
def test_a_bias_is_added_first(kind):
    x, bias = torch.randn(9, 32, dtype=DOUBLE), torch.randn(32, dtype=DOUBLE)
    torch.testing.assert_close(activate(kind, x, bias), activate(kind, x + bias))


@pytest.mark.parametrize(
    ("kind", "dtype", "shape", "path"), pairs(KINDS, [BF16, DOUBLE], SHAPES, PATHS), indirect=["path"]
)
def test_values_and_gradients_are_those_of_torch(kind, dtype, shape, path):
    torch.manual_seed(shape[0])
    tokens, hidden = shape
    x = (torch.randn(tokens, hidden * (2 if kind in GATED else 1)) * 3).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    grad = torch.randn(shape).to(dtype)
    y, expected = activate(kind, x), reference(kind, exact)
    y.backward(grad)
    expected.backward(grad.double())
    assert y.dtype == dtype
    assert y.shape == shape
    bound = 1e-12 if dtype == DOUBLE else 0.7 * ROUNDING[taken(path, dtype)]
    assert error(y.detach(), expected.detach()) < bound
    assert error(x.grad, exact.grad) < bound


@pytest.mark.parametrize("kind", KINDS)
def test_every_bf16_number_of_use_is_near_rounding(kind, path):
    """All bf16 numbers between -30 and 30, one by one: no region of the functions is far off."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    every = every[every.isfinite() & (every.abs() < 30)][:, None]
    x = (torch.cat([every, torch.ones_like(every)], 1) if kind in GATED else every).contiguous().requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, expected = activate(kind, x), reference(kind, exact)
    y.backward(torch.ones_like(y))
    expected.sum().backward()
    for got, want in ((y, expected), (x.grad, exact.grad)):
        assert ((got.double() - want).abs() <= want.abs() * ROUNDING[path] + 4e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_inf_show(kind, path):
    width = 66 if kind in GATED else 33
    for bad in (float("nan"), float("inf")):
        x = torch.zeros(3, width, dtype=BF16)
        x[1, 32] = bad
        if kind in GATED:
            x[:, 33:] = 1
        x.requires_grad_()
        y = activate(kind, x)
        assert not y[1, 32].isfinite()
        assert y.isfinite().sum() == y.numel() - 1
        y.backward(torch.ones_like(y))
        assert bad == float("inf") or x.grad[1, 32].isnan() or (taken(path, BF16), kind) == ("torch", "relu")


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(kind):
    x = torch.randn(300, 256).to(BF16)
    one = activate(kind, x)
    torch.set_num_threads(2)
    assert torch.equal(one, activate(kind, x))
