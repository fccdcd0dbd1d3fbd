"""The operator of residual add and normalisation; tests/nn/test_norm.py has what all paths do."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.attention_cases import error
from tests.helpers.paths import LOWEST, check_operator, needs_kernels
from unpad.nn.norm import add_norm

pytestmark = [needs_kernels, pytest.mark.promise("speed.kernels")]

DOUBLE, EPS = torch.float64, 1e-5


def plain(residual: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, centred: bool = True) -> tuple[Tensor, Tensor]:
    """The same in torch, without dropout."""
    total = residual + delta
    if centred:
        return total, F.layer_norm(total, total.shape[1:], weight, bias, EPS)
    return total, F.rms_norm(total, total.shape[1:], weight, EPS) + bias


def inputs(tokens: int, width: int, dtype: torch.dtype = DOUBLE) -> list[Tensor]:
    """The sum so far, what is added, weight and bias, as leaves."""
    torch.manual_seed(tokens + width)
    wide = torch.promote_types(dtype, torch.float32)
    drawn = [torch.randn(tokens, width, dtype=wide) + 2, torch.randn(tokens, width).to(dtype)]
    drawn += [torch.randn(width, dtype=wide), torch.randn(width, dtype=wide)]
    return [x.requires_grad_() for x in drawn]


@pytest.mark.parametrize("centred", [True, False], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
def test_one_used_output_is_enough_and_gradients_need_not_be_contiguous(used, centred):
    ours, exact = inputs(40, 33), inputs(40, 33)
    grads = [torch.randn(33, 40, dtype=DOUBLE).t() for _ in used]
    actual = add_norm(*ours, (EPS, centred, 0.0, 0, None), DOUBLE)
    expected = plain(*exact, centred=centred)
    torch.autograd.backward([actual[i] for i in used], grads)
    torch.autograd.backward([expected[i] for i in used], grads)
    for a, e in zip(actual, expected, strict=True):
        assert error(a, e) < 1e-12
    for a, e in zip(ours, exact, strict=True):
        assert error(a.grad, torch.zeros_like(e) if e.grad is None else e.grad) < 1e-12


def test_rows_far_from_zero_keep_their_variance():
    residual = torch.randn(20, 256) + 3000.0
    weight, bias = torch.ones(256), torch.zeros(256)
    _, y = add_norm(residual, None, weight, bias, (EPS, True, 0.0, 0, None), LOWEST)
    assert error(y, F.layer_norm(residual.double(), (256,), eps=EPS)) < 2.5e-3


def test_results_repeat_and_agree_between_threads():
    def grads(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        given = inputs(300, 256, LOWEST)
        out = add_norm(*given, (EPS, True, 0.1, 3, None), LOWEST)
        torch.autograd.backward(out, [torch.ones_like(out[0]), torch.linspace(-1, 1, 256).to(LOWEST).expand(300, -1)])
        return [*out, *(t.grad for t in given if t.grad is not None)]

    one, two = grads(1), grads(2)
    assert all(torch.equal(a, b) for a, b in zip(two, grads(2), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one[:4], two[:4], strict=True))  # rows do not depend on threads
    assert all(error(a, b) < 1e-5 for a, b in zip(one[4:], two[4:], strict=True))


def test_operators_describe_themselves_rightly():
    residual, delta, weight, bias = (x.detach() for x in inputs(3, 7, LOWEST))
    arguments = (residual, delta, weight, bias, EPS, True, 0.1, 5, torch.arange(2, 5), LOWEST)
    stats = torch.ops.unpad.add_norm(*arguments)[2]
    check_operator("add_norm", *arguments)
    check_operator("add_norm_backward", delta, None, residual, stats, weight, True, False, EPS, True, 0.1, 5, None)
