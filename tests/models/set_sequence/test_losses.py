"""Distances between sets are their definitions, set by set and in any order of the members, and beliefs cost what they
should."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from tests.helpers.largest import Largest
from tests.helpers.samples import bounds_of
from unpad.batching.layout import Layout, build_layout
from unpad.models.set_sequence import losses as module
from unpad.models.set_sequence.losses import chamfer, free_bits, gaussian_kl, sinkhorn

WIDTH = 6
F64 = torch.float64
LENGTHS = [7, 1, 40, 12, 0, 3, 44, 1, 7]  # one set has no members
WEIGHTS = [{}, {"cosine": 0.7, "length": 0.0, "distance": 0.0}, {"cosine": 0.0, "length": 0.0, "distance": 2.0}]
WEIGHTS += [{"cosine": 0.0, "length": 1.5, "distance": 0.0}]

Loss = Callable[[Tensor, Tensor, Layout], Tensor]


def transport(made: Tensor, target: Tensor, layout: Layout) -> Tensor:
    """At costs of some 10 this has converged."""
    return sinkhorn(made, target, layout, epsilon=1.0, iterations=300)


LOSSES: list[Loss] = [chamfer, transport]


def layout_of(lengths: list[int]) -> Layout:
    return build_layout(np.array(lengths, int))


def sets(lengths: list[int], width: int = WIDTH, dtype: torch.dtype = F64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(2, sum(lengths), width, generator=generator, dtype=F64)
    vectors += 0.01 * vectors.sign()  # none so short that its direction counts less
    made, target = vectors.to(dtype).unbind()
    return made.clone().requires_grad_(), target.clone()


def brute_force(
    made: Tensor, target: Tensor, cosine: float = 1.0, length: float = 1.0, distance: float = 3.0
) -> Tensor:
    """The definition, of one set, with every pair of members."""
    gap = made[:, None] - target
    costs = [
        1 - F.cosine_similarity(made[:, None], target, dim=-1),
        (made.norm(dim=1)[:, None] - target.norm(dim=1)).abs(),
        gap.square().sum(-1),
    ]
    sides = [(c.min(1).values.mean() + c.min(0).values.mean()) / 2 for c in costs]
    return cosine * sides[0] + length * sides[1] + distance * sides[2]


def gradient(values: Tensor, leaf: Tensor) -> Tensor:
    """Of the values, weighted so that no two count the same."""
    return torch.autograd.grad((values * torch.arange(1, len(values) + 1)).sum(), leaf)[0]


def shuffled(layout: Layout, rng: np.random.Generator) -> Tensor:
    """The members in another order, each in its own set."""
    return torch.cat([torch.arange(0), *(a + torch.from_numpy(rng.permutation(b - a)) for a, b in bounds_of(layout))])


# --------------------------------------------------------------------------- both distances


@pytest.mark.promise("patients.distances")
@pytest.mark.parametrize("loss", LOSSES)
def test_the_order_of_members_and_of_sets_does_not_matter(loss):
    made, target = sets(LENGTHS)
    layout = layout_of(LENGTHS)
    wanted = loss(made, target, layout)
    grads = gradient(wanted, made)
    rng = np.random.default_rng(1)
    shuffles = [shuffled(layout, rng) for _ in range(2)]
    mixed = made[shuffles[0]].detach().requires_grad_()
    got = loss(mixed, target[shuffles[1]], layout)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient(got, mixed), grads[shuffles[0]], rtol=1e-9, atol=1e-10)
    order = rng.permutation(len(LENGTHS)).tolist()
    tokens = layout.select(order)[1]
    got = loss(made[tokens], target[tokens], layout_of([LENGTHS[i] for i in order]))
    torch.testing.assert_close(got, wanted[order], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_the_values(loss):
    lengths = [3, 1, 0, 4]
    made, target = sets(lengths, width=2)
    assert torch.autograd.gradcheck(lambda x: loss(x, target, layout_of(lengths)), (made,))


@pytest.mark.promise("patients.distances")
@pytest.mark.parametrize("loss", LOSSES)
def test_no_gradient_reaches_the_target(loss):
    made, target = sets([3, 2])
    target.requires_grad_()
    loss(made, target, layout_of([3, 2])).sum().backward()
    assert target.grad is None
    assert made.grad is not None


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_nothing_costs_nothing(loss, lengths):
    made, target = sets(lengths)
    got = loss(made, target, layout_of(lengths))
    assert got.tolist() == [0.0] * len(lengths)
    assert torch.autograd.grad(got.sum(), made)[0].shape == (0, WIDTH)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("lengths", [[30], [5, 9, 8, 7], LENGTHS])
def test_blocks_change_nothing(loss, lengths, monkeypatch):
    found = []
    for cells in (module.BLOCK_CELLS, 90):
        monkeypatch.setattr(module, "BLOCK_CELLS", cells)
        made, target = sets(lengths)
        value = loss(made, target, layout_of(lengths))
        found.append((value, gradient(value, made)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("loss", [chamfer, lambda *a: sinkhorn(*a, iterations=2)])
def test_no_tensor_holds_all_pairs_of_a_large_set(loss, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_CELLS", 1 << 16)
    made, target = sets([3000, 5, 1], dtype=torch.float32)
    with Largest() as largest:
        loss(made, target, layout_of([3000, 5, 1])).sum().backward()
    assert largest.numel <= 1 << 16


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("side", [0, 1])
def test_other_sets_are_never_seen(loss, side):
    """Not even times zero, as the padding of a rectangle: one NaN would do."""
    both = sets(LENGTHS)
    layout = layout_of(LENGTHS)
    before = loss(*both, layout)
    changed = [x.detach().clone() for x in both]
    changed[side][layout.select([3])[1]] = math.nan
    after = loss(changed[0], changed[1], layout)
    others = [number for number in range(len(LENGTHS)) if number != 3]
    assert torch.equal(before[others], after[others])
    assert after[3].isnan()


@pytest.mark.parametrize("loss", LOSSES)
def test_low_precision_is_computed_wide(loss):
    layout = layout_of(LENGTHS)
    low = [x.detach().bfloat16() for x in sets(LENGTHS)]
    single = [x.detach().float() for x in sets(LENGTHS)]
    wanted = loss(low[0].double(), low[1].double(), layout)
    plain = loss(single[0], single[1], layout)
    with torch.autocast("cpu", torch.bfloat16):
        got = loss(low[0].requires_grad_(), low[1], layout)
        assert torch.equal(loss(single[0], single[1], layout), plain)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    assert gradient(got, low[0]).isfinite().all()


# --------------------------------------------------------------------------- Chamfer


@pytest.mark.promise("patients.distances")
@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 12), max_size=8),
    width=st.sampled_from([1, 2, 5]),
    weights=st.sampled_from(WEIGHTS),
    seed=st.integers(0, 99),
)
def test_chamfer_equals_brute_force(lengths, width, weights, seed):
    made, target = sets(lengths, width, seed=seed)
    layout = layout_of(lengths)
    got = chamfer(made, target, layout, **weights)
    parts = [brute_force(made[a:b], target[a:b], **weights) if b > a else made.sum() * 0 for a, b in bounds_of(layout)]
    wanted = torch.stack(parts) if parts else made.new_zeros(0)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    if sum(lengths):
        torch.testing.assert_close(gradient(got, made), gradient(wanted, made), rtol=1e-9, atol=1e-9)


def test_zero_vectors_have_a_cost_and_a_finite_gradient():
    made, target = torch.zeros(3, WIDTH, dtype=F64, requires_grad=True), sets([3])[1]
    got = chamfer(made, target, layout_of([3]), length=0, distance=0)
    assert got.item() == pytest.approx(0.5, abs=1e-12)
    got = chamfer(made, target, layout_of([3]))
    grad = gradient(got, made)
    assert grad.isfinite().all()
    assert grad.abs().max() <= 2 / module.SHORTEST
    assert gradient(chamfer(made, torch.zeros_like(made), layout_of([3])), made).isfinite().all()
    assert chamfer(made, made, layout_of([3])).item() == 0


# --------------------------------------------------------------------------- optimal transport


@pytest.mark.promise("patients.distances")
def test_it_is_the_transport_of_the_plain_iteration():
    """Scaling of exp(-C / epsilon) by rows and columns as it was published, and the plan's cost and entropy."""
    made, target = sets([6])
    costs, epsilon, share = (made[:, None] - target).square().sum(-1).detach(), 2.0, 1 / 6
    kernel = (-costs / epsilon).exp()
    u, v = torch.ones(2, 6, dtype=F64)
    for _ in range(2000):
        u = share / (kernel @ v)
        v = share / (kernel.T @ u)
    plan = u[:, None] * kernel * v
    wanted = (plan * costs).sum() + epsilon * (plan * (plan / share**2).log()).sum()
    got = sinkhorn(made, target, layout_of([6]), epsilon=epsilon, iterations=2000)
    torch.testing.assert_close(got[0], wanted, rtol=1e-10, atol=1e-10)
    grad = 2 * (plan.sum(1, keepdim=True) * made - plan @ target)
    torch.testing.assert_close(gradient(got, made), grad.detach(), rtol=1e-9, atol=1e-10)


def test_costs_far_above_epsilon_stay_finite():
    made, target = sets([20, 1, 7], dtype=torch.float32)
    got = sinkhorn(made * 1e4, target * 1e4, layout_of([20, 1, 7]))
    assert got.isfinite().all()
    assert gradient(got, made).isfinite().all()


# --------------------------------------------------------------------------- beliefs


@pytest.mark.promise("patients.kl")
def test_the_divergence_is_its_closed_form():
    mean, log_var, prior_mean, prior_log_var = torch.randn(
        4, 5, 3, generator=torch.Generator().manual_seed(0), dtype=F64
    )
    posterior = Normal(mean, (log_var / 2).exp())
    wanted = kl_divergence(posterior, Normal(prior_mean, (prior_log_var / 2).exp()))
    got = gaussian_kl(mean, log_var, prior_mean, prior_log_var)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    standard = kl_divergence(posterior, Normal(torch.zeros_like(mean), 1))
    torch.testing.assert_close(gaussian_kl(mean, log_var), standard, rtol=1e-12, atol=1e-12)
    shifted = kl_divergence(posterior, Normal(prior_mean, 1))
    torch.testing.assert_close(gaussian_kl(mean, log_var, prior_mean), shifted, rtol=1e-12, atol=1e-12)
    leaves = tuple(x.requires_grad_() for x in (mean, log_var, prior_mean, prior_log_var))
    assert torch.autograd.gradcheck(gaussian_kl, leaves)
    assert gaussian_kl(mean.bfloat16(), log_var.bfloat16()).dtype == torch.float32


def test_the_divergence_of_a_belief_near_its_prior_keeps_its_digits():
    small = torch.tensor([1e-3], dtype=torch.float32)
    assert gaussian_kl(torch.zeros(1), small).item() == pytest.approx(1e-6 / 4, rel=1e-3)
    assert gaussian_kl(small, small, small, small).item() == 0
    assert gaussian_kl(torch.zeros(0, 4), torch.zeros(0, 4)).shape == (0, 4)


@pytest.mark.promise("patients.kl")
def test_a_dimension_above_the_floor_keeps_its_gradient_whatever_the_others_do():
    kl = torch.tensor([[0.01, 0.5], [0.3, 0.02], [0.0, 0.0]], dtype=F64, requires_grad=True)
    got = free_bits(kl, 0.1)
    assert got.tolist() == [[0.1, 0.5], [0.3, 0.1], [0.1, 0.1]]
    got.sum().backward()
    assert kl.grad.tolist() == [[0, 1], [1, 0], [0, 0]]
