"""Losses are their closed forms, gradients go where they belong, and the adversary can learn."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.samples import WIDTH, bounds_of, make_samples, moved
from unpad.batching.layout import Layout, build_layout
from unpad.models.vision_language import losses

F64 = torch.float64
LAYERS = 3

# --------------------------------------------------------------------------- what is kept


def value(term: losses.Term) -> float:
    return float(term[0]) / term[1]


@pytest.mark.promise("vqa.prune-losses")
def test_sparsity_is_the_square_of_the_gap():
    layout = build_layout(np.array([10]))
    keep = torch.full((10,), 0.6, dtype=F64)
    assert value(losses.sparsity(keep, layout, 0.3, "ratio")) == pytest.approx(0.09, abs=1e-15)
    assert value(losses.sparsity(keep, layout, 3, "tokens")) == pytest.approx(0.09, abs=1e-15)
    assert value(losses.sparsity(keep, layout, 0.7, "ratio")) == 0
    assert value(losses.sparsity(keep, layout, 0.7, "ratio", one_sided=False)) == pytest.approx(0.01, abs=1e-15)
    assert value(losses.sparsity(keep, layout, 200, "tokens")) == 0
    assert value(losses.sparsity(keep, layout, 200, "tokens", one_sided=False)) == pytest.approx(0.16, abs=1e-15)


@pytest.mark.promise("vqa.prune-losses")
def test_each_sample_has_its_own_share_and_target():
    """Sums over samples: the second keeps half of 4, the third has none and is not counted."""
    layout = build_layout(np.array([10, 4, 0]))
    keep = torch.cat([torch.full((10,), 0.6, dtype=F64), torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=F64)])
    for term, wanted in (
        (losses.token_count(keep, layout), 1.1),
        (losses.sparsity(keep, layout, 1, "tokens"), 0.25 + 0.0625),
        (losses.binarisation(keep, layout), 0.24 - 0.125),
    ):
        assert term[1] == 2
        assert float(term[0]) == pytest.approx(wanted, abs=1e-14)


@pytest.mark.promise("vqa.prune-losses")
def test_binarisation_is_lowest_where_tokens_are_kept_or_not():
    layout = build_layout(np.array([4]))
    torch.manual_seed(0)
    for m in (torch.rand(4, dtype=F64), torch.full((4,), 0.5, dtype=F64)):
        wanted = (m * (1 - m)).mean() - m.var(correction=0) / 2
        assert float(losses.binarisation(m, layout)[0]) == pytest.approx(float(wanted), abs=1e-15)
    halves = [float(losses.binarisation(torch.tensor(m, dtype=F64), layout)[0]) for m in ([1.0, 1, 0, 0], [0.5] * 4)]
    assert halves == pytest.approx([-0.125, 0.25], abs=1e-15)
    decided = losses.binarisation(torch.tensor([1.0, 1, 1, 0], dtype=F64), layout)[0]
    for _ in range(50):  # no other way to keep three of four is as low
        m = torch.rand(4, dtype=F64)
        m = m * 3 / m.sum()
        if bool((m <= 1).all()):
            assert losses.binarisation(m, layout)[0] > decided


LOSSES: dict[str, Callable[[Tensor, Layout], losses.Term]] = {
    "sparsity": lambda keep, layout: losses.sparsity(keep, layout, 0.1, "ratio"),
    "two-sided": lambda keep, layout: losses.sparsity(keep, layout, 3, "tokens", one_sided=False),
    "token count": losses.token_count,
    "binarisation": losses.binarisation,
}


@pytest.mark.promise("vqa.prune-losses")
@pytest.mark.parametrize("name", list(LOSSES))
def test_the_sum_over_a_batch_is_the_sum_over_its_samples(name):
    samples = make_samples()
    keep = torch.sigmoid(samples.vision[:, 0])
    total, count = LOSSES[name](keep, samples.vision_layout)
    alone = [
        LOSSES[name](keep[start:stop], build_layout(np.array([stop - start])))
        for start, stop in bounds_of(samples.vision_layout)
    ]
    torch.testing.assert_close(total, sum(term[0] for term in alone), rtol=1e-12, atol=1e-14)
    assert count == sum(term[1] for term in alone) == 6
    (together,) = torch.autograd.grad(total, samples.vision, retain_graph=True)
    (apart,) = torch.autograd.grad(sum(term[0] for term in alone), samples.vision)
    torch.testing.assert_close(together, apart, rtol=1e-11, atol=1e-14)
    nothing = LOSSES[name](keep[:0], build_layout(np.zeros(0, int)))
    assert (float(nothing[0].detach()), nothing[1]) == (0.0, 0)


# --------------------------------------------------------------------------- pooled text


@pytest.mark.promise("vqa.text-pool")
def test_weights_rise_from_the_first_real_token_to_the_last():
    samples = make_samples()
    pooled = losses.TextPool().eval()(samples.question, samples.question_layout)
    for row, (start, stop) in zip(pooled, bounds_of(samples.question_layout), strict=True):
        weights = torch.linspace(0.3, 1.0, stop - start, dtype=F64)
        x = samples.question[start:stop]
        wanted = (weights[:, None] * x).sum(0) / weights.sum() if stop > start else torch.zeros(WIDTH, dtype=F64)
        torch.testing.assert_close(row, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.promise("vqa.text-pool")
def test_noise_falls_along_the_text_and_eval_has_none():
    layout = build_layout(np.array([3]))
    x = torch.zeros(3, 20000, dtype=F64)
    torch.manual_seed(0)
    pool = losses.TextPool()
    noise = pool(x, layout)
    weights = torch.tensor([0.3, 0.65, 1.0], dtype=F64)
    wanted = (weights * torch.tensor([0.05, 0.03, 0.01], dtype=F64)).square().sum().sqrt() / weights.sum()
    assert float(noise.std()) == pytest.approx(float(wanted), rel=0.02)
    assert not torch.equal(noise, pool(x, layout))
    assert (pool.eval()(x, layout) == 0).all()


# --------------------------------------------------------------------------- the adversary


def pooled(num: int, seed: int) -> Tensor:
    return torch.randn(num, LAYERS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.promise("vqa.discriminator")
def test_one_backward_pass_gives_each_side_only_its_own_gradients():
    judge = losses.Discriminator(WIDTH, LAYERS, 8).double().eval()
    real, fake = (pooled(5, seed).requires_grad_() for seed in (0, 1))
    own = torch.autograd.grad(
        losses.discriminator_terms(judge, real, fake)["discriminator"][0], list(judge.parameters())
    )
    assert all(g.norm() > 0 for g in own)
    losses.adversarial(judge, fake)[0].backward()
    assert (fake.grad.flatten(1).norm(dim=1) > 0).all()
    assert all(p.grad is None for p in judge.parameters())
    generators, fake.grad = fake.grad, None
    (losses.discriminator_terms(judge, real, fake)["discriminator"][0] + losses.adversarial(judge, fake)[0]).backward()
    for parameter, wanted in zip(judge.parameters(), own, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)
    torch.testing.assert_close(fake.grad, generators)
    assert real.grad is None


@pytest.mark.promise("vqa.discriminator")
def test_terms_are_their_closed_forms():
    judge = moved(losses.Discriminator(WIDTH, LAYERS, 8))
    real, fake = pooled(7, 0), pooled(7, 1)
    on_real, on_fake = judge(real), judge(fake)
    terms = losses.discriminator_terms(judge, real, fake)
    wanted = -torch.sigmoid(on_real).log().sum() - (1 - torch.sigmoid(on_fake)).log().sum()
    torch.testing.assert_close(terms["discriminator"][0], wanted)
    assert [count for _, count in terms.values()] == [7, 7, 7]
    assert int(terms["real_accuracy"][0]) == int((on_real > 0).sum())
    assert int(terms["fake_accuracy"][0]) == int((on_fake < 0).sum())
    total, count = losses.adversarial(judge, fake)
    assert count == 7
    torch.testing.assert_close(total, -torch.sigmoid(on_fake).log().sum())


@pytest.mark.promise("vqa.discriminator")
@pytest.mark.parametrize("size", [10, 1, 0.03])
def test_it_learns_to_tell_a_fixed_pair_apart(size):
    """Hidden states of any size that differ in their mean, 60 steps; on states it has not seen."""
    torch.manual_seed(0)
    judge = losses.Discriminator(WIDTH, LAYERS, 16).double().train()
    optimizer = torch.optim.Adam(judge.parameters(), lr=5e-3)
    for step in range(60):
        terms = losses.discriminator_terms(
            judge, size * (pooled(32, step) + 0.5), size * (pooled(32, 1000 + step) - 0.5)
        )
        optimizer.zero_grad()
        (terms["discriminator"][0] / terms["discriminator"][1]).backward()
        optimizer.step()
    terms = losses.discriminator_terms(judge.eval(), size * (pooled(200, 5000) + 0.5), size * (pooled(200, 6000) - 0.5))
    for name in ("real_accuracy", "fake_accuracy"):
        assert float(terms[name][0]) / terms[name][1] > 0.9


@pytest.mark.promise("vqa.reinit")
def test_reinitialising_draws_all_weights_anew():
    judge = moved(losses.Discriminator(WIDTH, LAYERS, 8), torch.float32)
    before = {name: p.detach().clone() for name, p in judge.named_parameters()}
    torch.manual_seed(3)
    judge.reinitialise()
    torch.manual_seed(3)
    fresh = losses.Discriminator(WIDTH, LAYERS, 8)
    drawn = dict(judge.named_parameters())
    for name, p in drawn.items():
        assert not torch.equal(p, before[name]), name
    torch.manual_seed(3)
    fresh.reinitialise()
    for name, p in fresh.named_parameters():
        assert torch.equal(p, drawn[name])


def test_bf16_stays_near_fp64_and_gives_gradients():
    exact, judge = moved(losses.Discriminator(WIDTH, LAYERS, 8)), losses.Discriminator(WIDTH, LAYERS, 8).eval()
    judge.load_state_dict(exact.state_dict())
    fake = (30 * pooled(6, 0)).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = losses.adversarial(judge, fake)
    total.backward()
    assert total.dtype == torch.float32
    assert all(p.grad is None for p in judge.parameters())
    assert float(total.detach()) == pytest.approx(
        float(losses.adversarial(exact, fake.detach().double())[0].detach()), rel=0.05
    )
