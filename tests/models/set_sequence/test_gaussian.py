"""An observation changes a belief as precisions say, and the gate follows its formula."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from tests.helpers.samples import moved
from unpad.models.set_sequence.belief import Gate, product_of_experts

F64 = torch.float64
DIM = 5


def beliefs(num: int = 7, dim: int = DIM, dtype: torch.dtype = F64) -> list[Tensor]:
    """Means and log variances of a prior and of an observation, and days since the set before."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(4, num, dim, generator=generator, dtype=F64).to(dtype).unbind()
    gap = torch.rand(num, generator=generator) * 100
    return [*(x.clone().requires_grad_() for x in parts), gap]


def test_it_is_the_product_of_the_densities():
    prior_mean, prior_log_var, mean, log_var, _ = (x.detach() for x in beliefs(1, 1))
    got_mean, got_log_var = product_of_experts(prior_mean, prior_log_var, mean, log_var, torch.full((1, 1), 2.0))
    x = torch.linspace(-30, 30, 200_001, dtype=F64)
    logs = Normal(prior_mean, (prior_log_var / 2).exp()).log_prob(x) + 2 * Normal(mean, (log_var / 2).exp()).log_prob(x)
    density = (logs - logs.max()).exp().flatten()
    density /= density.sum()
    at = (density * x).sum()
    assert got_mean.item() == pytest.approx(at.item(), rel=1e-8)
    assert got_log_var.exp().item() == pytest.approx((density * (x - at).square()).sum().item(), rel=1e-8)


@pytest.mark.promise("patients.product")
def test_with_gate_one_it_is_a_step_of_the_kalman_filter():
    """Of a scalar that is observed directly: gain K = P / (P + R), mean + K (z - mean), P (1 - K)."""
    state, variance, noise = 1.5, 0.8, 0.3
    observed = [2.0, 1.1, -0.4, 0.7]
    mean, log_var = torch.tensor([[state]], dtype=F64), torch.tensor([[math.log(variance)]], dtype=F64)
    for z in observed:
        gain = variance / (variance + noise)
        state, variance = state + gain * (z - state), variance * (1 - gain)
        seen, noise_log = torch.tensor([[z]], dtype=F64), torch.tensor([[math.log(noise)]], dtype=F64)
        mean, log_var = product_of_experts(mean, log_var, seen, noise_log, torch.ones(1, 1, dtype=F64))
        assert mean.item() == pytest.approx(state, rel=1e-12)
        assert log_var.exp().item() == pytest.approx(variance, rel=1e-12)


@pytest.mark.parametrize(("prior", "observed"), [(-200.0, 200.0), (200.0, -200.0), (-300.0, -300.0), (300.0, 300.0)])
def test_extreme_variances_give_the_surer_of_both(prior, observed):
    leaves = [torch.full((2, 3), x, requires_grad=True) for x in (-1.0, prior, 5.0, observed)]
    gate = torch.ones(2, 1, requires_grad=True)
    mean, log_var = product_of_experts(leaves[0], leaves[1], leaves[2], leaves[3], gate)
    wanted = -1.0 if prior < observed else 5.0 if observed < prior else 2.0
    torch.testing.assert_close(mean, torch.full((2, 3), wanted))
    torch.testing.assert_close(log_var, torch.full((2, 3), min(prior, observed)), rtol=0.01, atol=0)
    assert all(g.isfinite().all() for g in torch.autograd.grad((mean + log_var).sum(), [*leaves, gate]))


def test_a_gate_of_zero_leaves_the_prior():
    prior_mean, prior_log_var, mean, log_var, _ = beliefs()
    gate = torch.zeros(7, 1, dtype=F64, requires_grad=True)
    got = product_of_experts(prior_mean, prior_log_var, mean, log_var, gate)
    torch.testing.assert_close(got, (prior_mean, prior_log_var), rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(got[0].sum() + got[1].sum(), [prior_mean, prior_log_var, mean, log_var, gate])
    assert all(g.isfinite().all() for g in grads)


def test_the_gate_starts_as_the_plain_product():
    torch.manual_seed(0)
    torch.testing.assert_close(Gate()(*beliefs(200, dtype=torch.float32)), torch.ones(200, 1))


def test_the_gate_computes_its_three_features():
    gate = moved(Gate())
    prior_mean, prior_log_var, mean, log_var, gap = (x.detach() for x in beliefs())
    surprise = ((mean - prior_mean) ** 2 / (log_var.exp() + prior_log_var.exp())).mean(1)
    features = torch.stack([(1 + surprise).log(), (prior_log_var - log_var).mean(1), (1 + gap.double()).log()], 1)
    wanted = 0.1 + 2.9 * gate.to_out(torch.nn.functional.gelu(gate.to_hidden(features))).sigmoid()
    torch.testing.assert_close(gate(prior_mean, prior_log_var, mean, log_var, gap), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("log_var", [-300.0, 300.0])
def test_the_gate_bears_extreme_variances(log_var):
    inputs = beliefs(dtype=torch.float32)
    inputs[1], inputs[3] = (torch.full((7, DIM), log_var, requires_grad=True) for _ in range(2))
    got = moved(Gate(), torch.float32)(*inputs)
    assert got.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(got.sum(), inputs[:4]))


def test_low_precision_gives_wide_beliefs():
    prior_mean, prior_log_var, mean, log_var, gap = (x.detach().bfloat16() for x in beliefs())
    with torch.autocast("cpu", torch.bfloat16):
        gate = Gate()(prior_mean, prior_log_var, mean, log_var, gap)
        belief = product_of_experts(prior_mean, prior_log_var, mean, log_var, gate)
    assert gate.dtype == belief[0].dtype == belief[1].dtype == torch.float32


def test_a_gate_of_low_precision_costs_a_belief_no_digits():
    prior_mean, prior_log_var, mean, log_var, _ = beliefs()
    gates = [torch.full((7, 1), 2.0, dtype=dtype) for dtype in (torch.float32, F64)]
    low, exact = (product_of_experts(prior_mean, prior_log_var, mean, log_var, gate) for gate in gates)
    torch.testing.assert_close(low, exact, rtol=0, atol=0)
