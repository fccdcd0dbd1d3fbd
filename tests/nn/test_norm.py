"""Residual add, dropout and normalization by every path against torch in fp64."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.attention_cases import error
from tests.helpers.grid import pairs
from tests.helpers.paths import PATHS, Path, on, taken
from unpad.nn import norm as norm_module
from unpad.nn.draws import kept
from unpad.nn.norm import Norm

SEED, EPS = 0x1234_5678_9ABC, 1e-5
SHAPES = [(0, 16), (1, 512), (3, 7), (17, 16), (50, 33), (70, 256), (130, 512)]


@pytest.fixture(params=PATHS, autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(norm_module, "draw", lambda: SEED)
    with on(request.param):
        yield request.param


def reference(norm: Norm, residual: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """In fp64, with parameters as leaves of the norm."""
    if delta is not None:
        rows, columns = (torch.arange(size) for size in delta.shape)
        delta = torch.where(kept(SEED, rows[:, None], columns, norm.dropout), delta / (1 - norm.dropout), 0)
        residual = residual + delta
    if norm.bias is None:
        return residual, F.rms_norm(residual, residual.shape[1:], norm.weight, EPS)
    return residual, F.layer_norm(residual, residual.shape[1:], norm.weight, norm.bias, EPS)


@pytest.mark.parametrize(
    ("shape", "precision", "kind", "share", "path"),
    pairs(SHAPES, ["bf16", "fp32", "fp64"], ["layernorm", "rmsnorm"], [None, 0.0, 0.3], PATHS),
    indirect=["path"],
)
def test_outputs_and_gradients_are_those_of_torch(shape, precision, kind, share, path):
    torch.manual_seed(sum(shape))
    wide = torch.float64 if precision == "fp64" else torch.float32
    low = torch.bfloat16 if precision == "bf16" else wide
    ours, exact = Norm(kind, shape[1], EPS, share or 0.0), Norm(kind, shape[1], EPS, share or 0.0).double()
    for parameter in ours.parameters():
        parameter.data = torch.randn_like(parameter)
    exact.load_state_dict(ours.state_dict())
    ours = ours.to(wide).train()
    residual = (torch.randn(shape, dtype=wide) + 2).requires_grad_()
    delta = None if share is None else torch.randn(shape).to(low).requires_grad_()
    given = [residual] if delta is None else [residual, delta]
    leaves = [x.detach().double().requires_grad_() for x in given]
    with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
        actual = ours(residual, delta)
    expected = reference(exact, leaves[0], leaves[1] if share is not None else None)
    assert (actual[0].dtype, actual[1].dtype) == (wide, low)
    grads = torch.randn(shape, dtype=wide), torch.randn(shape).to(low)
    torch.autograd.backward(actual, grads)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    pairs = [*zip(actual, expected, strict=True), *((a.grad, e.grad) for a, e in zip(given, leaves, strict=True))]
    pairs += [(a.grad, e.grad) for a, e in zip(ours.parameters(), exact.parameters(), strict=True)]
    # Torch divides what dropout keeps in bf16, before it is added.
    rounds = taken(path, low) == "torch" and precision == "bf16" and bool(share)
    for got, want in pairs:
        bound = 1e-12 if wide == torch.float64 else 3e-3 if rounds or got.dtype == torch.bfloat16 else 3e-6
        assert error(got.detach(), want.detach()) < bound


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_nan_and_inf_show_in_their_row_alone(kind, bad):
    residual = torch.randn(3, 33)
    residual[1, 32] = bad
    with torch.autocast("cpu", torch.bfloat16):
        total, y = Norm(kind, 33, EPS)(residual, torch.randn(3, 33).bfloat16())
    assert not total[1, 32].isfinite()
    assert y[1, 32].isnan()
    assert y[::2].isfinite().all()
