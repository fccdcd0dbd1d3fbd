"""Residual add and normalisation of unpad/nn/native/norm.py against torch in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.paths import LOWEST, NATIVE_DTYPES
from unpad.nn.native import library
from unpad.nn.native.norm import add_norm

pytestmark = [
    pytest.mark.skipif(not library.enabled(), reason=library.describe()),
    pytest.mark.promise("speed.kernels"),
]

BF16, FLOAT, DOUBLE = torch.bfloat16, torch.float32, torch.float64
WIDE = {BF16: FLOAT, FLOAT: FLOAT, DOUBLE: DOUBLE}
SHAPES = [(0, 16), (1, 1), (1, 512), (3, 7), (17, 16), (50, 33), (70, 256), (130, 512)]
EPS = 1e-5


def error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to the norm of what is expected."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30)) if actual.numel() else 0.0


def mix(x: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 on int64 numbers below 2**32."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & 0xFFFFFFFF
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def kept(tokens: int, width: int, dropout: float, seed: int) -> Tensor:
    """(tokens, width) bool: the numbers that dropout keeps, by the rule in simd.h."""
    row = mix(torch.arange(tokens) ^ 0)
    bits = mix(mix(row ^ (seed & 0xFFFFFFFF)) ^ (seed >> 32))
    column = (torch.arange(width) * 0x9E3779B9) & 0xFFFFFFFF
    return mix(bits[:, None] ^ column) >= int(dropout * 2**32)


def reference(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    centred: bool,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    total = residual
    if delta is not None:
        total = total + torch.where(kept(*delta.shape, dropout, seed), delta / (1 - dropout), 0)
    if centred:
        return total, F.layer_norm(total, total.shape[1:], weight, bias, EPS)
    y = F.rms_norm(total, total.shape[1:], weight, EPS)
    return total, y if bias is None else y + bias


def leaves(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def inputs(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens + width)
    wide = WIDE[dtype]
    residual = torch.randn(tokens, width, dtype=wide) + 2
    return (
        residual,
        torch.randn(tokens, width).to(dtype),
        torch.randn(width, dtype=wide),
        torch.randn(width, dtype=wide),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize("centred", [True, False], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("optional", [True, False], ids=["full", "bare"])
def test_outputs_and_gradients_are_those_of_torch(
    shape: tuple[int, int], dtype: torch.dtype, centred: bool, dropout: float, optional: bool
) -> None:
    residual, delta, weight, bias = inputs(*shape, dtype)
    seed = 0x1234_5678_9ABC
    given = (residual, delta, weight, bias) if optional else (residual, None, weight, None)
    ours = leaves(*given)
    exact = leaves(*(None if t is None else t.double() for t in given))
    actual = add_norm(*ours, eps=EPS, centred=centred, dropout=dropout, seed=seed, dtype=dtype)
    expected = reference(*exact, centred, dropout, seed)
    assert actual[0].dtype == WIDE[dtype]
    assert actual[1].dtype == dtype
    grads = torch.randn(shape, dtype=WIDE[dtype]), torch.randn(shape).to(dtype)
    torch.autograd.backward(actual, grads)
    torch.autograd.backward(expected, [g.double() for g in grads])
    pairs = [*zip(actual, expected, strict=True)]
    pairs += [(a.grad, e.grad) for a, e in zip(ours, exact, strict=True) if a is not None]
    for got, want in pairs:
        assert got.shape == want.shape
        # One number has no spread: what is left of it is rounding alone, so absolute there.
        bound = 1e-12 if dtype == DOUBLE else 2.5e-3 if got.dtype == BF16 else 2e-6
        if shape[1] == 1:
            assert (got.double() - want).abs().max() < bound * 1e3
        else:
            assert error(got.detach(), want.detach()) < bound


@pytest.mark.parametrize("used", [0, 1], ids=["sum", "y"])
def test_one_used_output_is_enough(used: int) -> None:
    ours, exact = leaves(*inputs(9, 33, DOUBLE)), leaves(*inputs(9, 33, DOUBLE))
    grad = torch.randn(9, 33, dtype=DOUBLE)
    add_norm(*ours, eps=EPS, centred=True, dtype=DOUBLE)[used].backward(grad)
    reference(*exact, True, 0.0, 0)[used].backward(grad)
    for a, e in zip(ours, exact, strict=True):
        assert error(a.grad, torch.zeros_like(e) if e.grad is None else e.grad) < 1e-12


def test_rows_far_from_zero_keep_their_variance() -> None:
    residual = torch.randn(20, 256) + 3000.0
    weight, bias = torch.ones(256), torch.zeros(256)
    _, y = add_norm(residual, None, weight, bias, eps=EPS, centred=True, dtype=LOWEST)
    assert error(y, F.layer_norm(residual.double(), (256,), eps=EPS)) < 2.5e-3


def test_gradients_that_are_not_contiguous_are_read_right() -> None:
    ours, exact = leaves(*inputs(40, 33, DOUBLE)), leaves(*inputs(40, 33, DOUBLE))
    grads = [torch.randn(33, 40, dtype=DOUBLE).t() for _ in range(2)]
    torch.autograd.backward(add_norm(*ours, eps=EPS, centred=True, dtype=DOUBLE), grads)
    torch.autograd.backward(reference(*exact, True, 0.0, 0), grads)
    assert error(ours[0].grad, exact[0].grad) < 1e-12


def test_results_repeat_and_agree_between_threads() -> None:
    def grads(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        try:
            given = leaves(*inputs(300, 256, LOWEST))
            out = add_norm(*given, eps=EPS, centred=True, dropout=0.1, seed=3, dtype=LOWEST)
            torch.autograd.backward(
                out, [torch.ones_like(out[0]), torch.linspace(-1, 1, 256).to(LOWEST).expand(300, -1)]
            )
            return [*out, *(t.grad for t in given)]
        finally:
            torch.set_num_threads(1)

    one, two = grads(1), grads(2)
    assert all(torch.equal(a, b) for a, b in zip(two, grads(2), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one[:4], two[:4], strict=True))  # rows do not depend on threads
    assert all(error(a, b) < 1e-5 for a, b in zip(one[4:], two[4:], strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_show(bad: float) -> None:
    residual, delta, weight, bias = inputs(3, 33, LOWEST)
    residual[1, 32] = bad
    for centred in (True, False):
        total, y = add_norm(residual, delta, weight, bias, eps=EPS, centred=centred, dtype=LOWEST)
        assert not total[1, 32].isfinite()
        assert y[1, 32].isnan()
        assert y[::2].isfinite().all()


def test_operators_describe_themselves_rightly() -> None:
    residual, delta, weight, bias = inputs(3, 7, LOWEST)
    arguments = (residual, delta, weight, bias, EPS, True, 0.1, 5, torch.arange(2, 5), LOWEST)
    stats = torch.ops.unpad.add_norm(*arguments)[2]
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.unpad.add_norm.default, arguments, test_utils=utils)
    arguments = (delta, None, residual, stats, weight, True, False, EPS, True, 0.1, 5, None)
    torch.library.opcheck(torch.ops.unpad.add_norm_backward.default, arguments, test_utils=utils)
