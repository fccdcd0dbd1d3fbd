"""Soft removal ends where hard removal begins, heads see their own sample only, and rankings rank by what they say."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.paths import PATHS, on
from tests.helpers.samples import WIDTH, bounds_of, make_samples, moved
from unpad.batching.layout import Layout, build_layout
from unpad.models.vision_language import prune
from unpad.models.vision_language.visual import last_tokens
from unpad.nn.attend import Attend
from unpad.nn.attention import scale_values, self_attention
from unpad.nn.rope import Rotary, rotary_frequencies, rotary_table, rotate

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def head(**settings: Any) -> prune.PrunerHead:
    torch.manual_seed(0)
    return prune.PrunerHead(WIDTH, prune.PruneConfig(layers=[0], inner=8, heads=2, **settings))


# --------------------------------------------------------------------------- heads


@pytest.mark.promise("vqa.temperature")
@pytest.mark.parametrize("logit", [-1.5, 0.0, 2.0])
def test_noise_keeps_a_token_as_often_as_the_logit_says(logit):
    """At any temperature a binary concrete variable exceeds one half with probability sigmoid(logit)."""
    torch.manual_seed(0)
    logits = torch.full((40000,), logit, dtype=torch.float64)
    layout = build_layout(np.array([40000]))
    for noise in (prune.fresh_noise(logits, layout), prune.drawn_noise(3, torch.arange(40000), torch.float64)):
        for temperature in (1.0, 0.1):
            kept = prune.keep_probability(logits + noise, temperature)
            assert float((kept > 0.5).double().mean()) == pytest.approx(1 / (1 + math.exp(-logit)), abs=0.01)
        assert float(((kept > 0.01) & (kept < 0.99)).double().mean()) < 0.5, "a low temperature decides"


@pytest.mark.promise("vqa.prune-heads", "vqa.temperature")
def test_the_draw_of_evaluation_depends_on_layer_and_place_alone():
    place = torch.tensor([0, 1, 2, 0, 1, 5])
    noise = prune.drawn_noise(2, place, torch.float64)
    assert torch.equal(noise[:2], noise[3:5])
    assert torch.equal(noise[5:], prune.drawn_noise(2, torch.tensor([5]), torch.float64))
    assert not torch.isclose(noise, prune.drawn_noise(1, place, torch.float64)).any()
    for layer in range(8):
        many = prune.drawn_noise(layer, torch.arange(4096), torch.float32)
        assert many.abs().max() < 16
        assert float((many > 0).float().mean()) == pytest.approx(0.5, abs=0.03)


@pytest.mark.promise("vqa.prune-attention")
def test_the_attention_signal_is_added_as_it_is():
    samples = make_samples()
    signal = torch.rand(len(samples.vision), dtype=torch.float64)
    plain = head().double().eval()(samples)
    fixed, learned = head(attention_weight="fixed").double().eval(), head(attention_weight="learned").double().eval()
    for pruner in (fixed, learned):
        torch.testing.assert_close(pruner(replace(samples, received=signal)), plain + 0.5 * signal)
        assert float(pruner.state_dict()["attention_weight"]) == 0.5
    assert "attention_weight" in dict(learned.named_parameters())
    assert "attention_weight" not in dict(fixed.named_parameters())
    with pytest.raises(AssertionError):
        fixed(samples)


def test_bf16_stays_near_fp64():
    exact = moved(head())
    low = head().eval()
    low.load_state_dict({name: value.float() for name, value in exact.state_dict().items()})
    samples = make_samples()
    wanted = exact(samples)
    with torch.autocast("cpu", torch.bfloat16):
        got = low(replace(samples, vision=samples.vision.float(), question=samples.question.float()))
    assert got.dtype == torch.float32
    assert (got.double() - wanted).norm() < 0.05 * wanted.norm()


# --------------------------------------------------------------------------- soft removal


@pytest.fixture(params=PATHS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with on(request.param):
        yield request.param


def run_of(lengths: list[int]) -> tuple[Tensor, Layout, Tensor]:
    """Queries, keys and values; the layout; and vision tokens from the third token of each sequence on, but the last
    two."""
    torch.manual_seed(4)
    layout = build_layout(np.array(lengths))
    qkv = torch.randn(sum(lengths), HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.float64)
    place = torch.cat([torch.arange(n) for n in lengths])
    return qkv, layout, (place >= 2) & (place < torch.cat([torch.full((n,), n) for n in lengths]) - 2)


def rotary_of(layout: Layout) -> Rotary:
    places = torch.cat([torch.arange(stop - start) for start, stop in bounds_of(layout)])
    return rotary_table(places, rotary_frequencies(HEAD_DIM, 10000.0, "none", 1.0), torch.float64)


@pytest.mark.promise("vqa.prune-layers", "vqa.hard-pruning")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_probability_zero_is_removal(causal, scaled, kernels):
    """Every other token's output is that of the run without the token, at its old position; and one is no change."""
    qkv, layout, is_vision = run_of([30, 1, 9, 70])
    rotary = rotary_of(layout)
    probability = (torch.rand(int(is_vision.sum())) > 0.4).double()
    bias = prune.soft_bias(probability, is_vision)
    softly = scale_values(qkv, KV_HEADS, probability, is_vision) if scaled else qkv
    soft = self_attention(softly, layout, HEADS, Attend(causal, rotary=rotary, key_bias=bias))
    stays = torch.ones_like(is_vision)
    stays[is_vision] = probability > 0
    kept_rotary = rotary[0][stays], rotary[1][stays]
    hard = self_attention(qkv[stays], layout.keep(stays), HEADS, Attend(causal, rotary=kept_rotary))
    torch.testing.assert_close(soft[stays], hard, rtol=0, atol=1e-12)
    whole = self_attention(qkv, layout, HEADS, Attend(causal, rotary=rotary))
    ones = prune.soft_bias(torch.ones_like(probability), is_vision)
    torch.testing.assert_close(
        self_attention(qkv, layout, HEADS, Attend(causal, rotary=rotary, key_bias=ones)), whole, rtol=0, atol=1e-12
    )
    assert (soft - whole).abs().max() > 0.1


def test_a_sequence_may_begin_with_removed_tokens(kernels):
    """Its first tokens see nothing but each other; without a finite bias they would be NaN, and spread."""
    qkv, layout, _ = run_of([8])
    is_vision = torch.arange(8) < 5
    probability = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    x = qkv.clone().requires_grad_()
    out = self_attention(x, layout, HEADS, Attend(key_bias=prune.soft_bias(probability, is_vision)))
    found = torch.autograd.grad(out.sum(), [x, probability])
    assert all(torch.isfinite(y).all() for y in (out, *found))
    alone = self_attention(qkv[5:], build_layout(np.array([3])), HEADS, Attend())
    torch.testing.assert_close(out[5:], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_logarithm_is_safe_at_zero(dtype):
    tiny = torch.finfo(dtype).tiny
    p = torch.tensor([0.0, tiny / 4, tiny, 1e-3, 1.0], dtype=dtype, requires_grad=True)
    logs = prune.log_keep(p)
    torch.testing.assert_close(logs[2:], p[2:].log())
    assert logs[:2].tolist() == [prune.REMOVED, prune.REMOVED]
    assert logs[2] > prune.REMOVED
    (grad,) = torch.autograd.grad(logs.sum(), p)
    assert grad[:2].tolist() == [0, 0]
    torch.testing.assert_close(grad[2:], 1 / p[2:].detach())


@pytest.mark.promise("vqa.prune-layers")
def test_heads_together_keep_what_each_of_them_keeps():
    torch.manual_seed(0)
    heads = [torch.rand(9, dtype=torch.float64).requires_grad_() for _ in range(3)]
    together = prune.cumulative_keep(heads)
    torch.testing.assert_close(together, heads[0] * heads[1] * heads[2])
    torch.testing.assert_close(prune.log_keep(together), sum(prune.log_keep(p) for p in heads))
    gone = [p.detach().clone().requires_grad_() for p in heads]
    gone[1].data[4] = 0
    grads = torch.autograd.grad(prune.cumulative_keep(gone).sum(), gone)
    assert all(torch.isfinite(g).all() for g in grads)
    torch.testing.assert_close(grads[1][4], gone[0][4].detach() * gone[2][4].detach())


# --------------------------------------------------------------------------- hard removal


@pytest.mark.promise("vqa.hard-pruning")
def test_a_threshold_removes_and_leaves_the_best():
    layout = build_layout(np.array([4, 3, 0, 1]))
    probability = torch.tensor([0.5, 0.51, 0.9, 0.1, 0.2, 0.4, 0.4, 0.0])
    kept = prune.hard_keep(probability, layout, 0.5)
    assert kept.tolist() == [False, True, True, False, False, True, False, True]
    assert layout.keep(kept).lengths().tolist() == [2, 1, 0, 1]
    probability[0] = 0.0
    assert prune.hard_keep(probability, layout, 0.0).all(), "a probability of 0 is one that has underflowed"


@pytest.mark.promise("vqa.hard-pruning")
def test_a_budget_is_kept_per_sample():
    layout = build_layout(np.array([4, 3, 0, 1]))
    scores = torch.tensor([0.5, 0.51, 0.9, 0.1, 0.2, 0.4, 0.4, 0.0])
    assert prune.keep_top(scores, layout, torch.tensor([1.2, 0.0, 3.0, 5.0])).nonzero().flatten().tolist() == [
        1,
        2,
        5,
        7,
    ]
    assert prune.keep_top(scores, layout, torch.tensor([3, 2, 1, 1])).nonzero().flatten().tolist() == [0, 1, 2, 5, 6, 7]
    many = build_layout(np.array([100]))
    assert int(prune.keep_top(torch.rand(100), many, torch.tensor([0.07 * 100], dtype=torch.float64)).sum()) == 7


# --------------------------------------------------------------------------- attention as a signal


@pytest.mark.promise("vqa.prune-attention")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_the_signal_is_the_mean_of_the_layers_own_weights(causal, biased):
    """Recovered from the layer itself: its output for values that are one-hot at a vision token is that weight."""
    lengths = [9, 1, 20, 5]
    qkv, layout, is_vision = run_of(lengths)
    is_text = ~is_vision
    rotary = rotary_of(layout)
    bias = torch.randn(sum(lengths), dtype=torch.float64) if biased else None
    q, k, _ = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
    got = prune.text_to_vision_attention(
        rotate(q, *rotary), rotate(k, *rotary), layout, is_vision, is_text, causal, key_bias=bias
    )
    wanted = []
    for token in is_vision.nonzero().flatten().tolist():
        values = torch.zeros_like(qkv[:, :KV_HEADS])
        values[token] = 1
        out = self_attention(
            torch.cat([q, k, values], 1), layout, HEADS, Attend(causal, rotary=rotary, key_bias=bias)
        )  # (total_tokens, heads, head_dim), in each channel the weight of that token
        start, stop = next((a, b) for a, b in bounds_of(layout) if a <= token < b)
        wanted.append(out[start:stop][is_text[start:stop]].mean())
    torch.testing.assert_close(got, torch.stack(wanted), rtol=1e-11, atol=1e-13)


def test_a_sample_without_text_gives_zeros():
    qkv, layout, is_vision = run_of([9, 6])
    is_vision[:9] = True
    q, k, _ = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
    got = prune.text_to_vision_attention(q, k, layout, is_vision, ~is_vision, True)
    assert (got[:9] == 0).all()
    assert (got[9:] > 0).all()


def test_the_last_token_stands_for_the_text_in_fastv_and_all_tokens_for_a_class_token():
    qkv, layout, is_vision = run_of([9, 0, 6])
    assert last_tokens(layout).nonzero().flatten().tolist() == [8, 14]
    q, k, _ = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
    everything = torch.ones_like(is_vision)
    received = prune.text_to_vision_attention(q, k, layout, everything, everything, False)
    torch.testing.assert_close(received[:9].sum(), torch.tensor(1.0, dtype=torch.float64))
    last = prune.text_to_vision_attention(q, k, layout, is_vision, last_tokens(layout), True)
    assert len(last) == int(is_vision.sum())


# --------------------------------------------------------------------------- rankings


@pytest.mark.promise("vqa.methods")
def test_random_is_decided_by_seed_and_sample_alone():
    lengths, ids = [5, 40, 0, 12], torch.tensor([7, 3, 1 << 40, 9])
    layout = build_layout(np.array(lengths))
    scores = prune.random_order(layout, ids, seed=1)
    for seq, (start, stop) in enumerate(bounds_of(layout)):
        alone = prune.random_order(build_layout(np.array([lengths[seq]])), ids[seq : seq + 1], seed=1)
        assert torch.equal(alone, scores[start:stop])
        assert len(scores[start:stop].unique()) == stop - start
    assert not torch.equal(scores, prune.random_order(layout, ids, seed=2))
    assert not torch.equal(scores, prune.random_order(layout, ids + 1, seed=1))
    one = build_layout(np.array([20000]))
    scores = prune.random_order(one, torch.tensor([5]))
    best = prune.keep_top(scores, one, torch.tensor([5000])).nonzero().flatten().double()
    assert float(best.mean()) == pytest.approx(10000, rel=0.03)


@pytest.mark.promise("vqa.methods")
@pytest.mark.parametrize(("budget", "step"), [(144, 2), (36, 4), (9, 8)])
def test_uniform_keeps_a_lattice(budget, step):
    layout = build_layout(np.array([576]))
    rows, columns = torch.arange(576) // 24, torch.arange(576) % 24
    kept = prune.keep_top(prune.even_order(rows, columns), layout, torch.tensor([budget]))
    assert torch.equal(kept, (rows % step == 0) & (columns % step == 0))
    half = prune.keep_top(prune.even_order(rows, columns), layout, torch.tensor([288]))
    assert torch.equal(half, (rows + columns) % 2 == 0), "like the fields of one colour of a chess board"


@pytest.mark.parametrize("budget", [50, 100, 288, 400])
def test_uniform_is_even_for_any_budget_and_grid(budget):
    height, width = 18, 32
    layout = build_layout(np.array([height * width]))
    rows, columns = torch.arange(height * width) // width, torch.arange(height * width) % width
    kept = prune.keep_top(prune.even_order(rows, columns), layout, torch.tensor([budget]))
    share = kept.double().view(height, width)
    quarters = [share[a : a + 9, b : b + 16].mean() for a in (0, 9) for b in (0, 16)]
    assert max(quarters) - min(quarters) < 0.1
    assert int(kept.sum()) == budget
