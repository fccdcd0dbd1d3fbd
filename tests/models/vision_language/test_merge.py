"""Mergers leave the tokens they promise, each a mean of the sample's own, and learn what they choose by."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.samples import VISION, WIDTH, bounds_of, make_samples, moved
from unpad.batching.layout import Layout, build_layout
from unpad.models.vision_language import merge
from unpad.models.vision_language.visual import VisionTokens
from unpad.nn.segments import segment_top_k

SLOTS = 4
KINDS = ["simple", "question", "slots", "similarity"]


def make(kind: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    left = {"slots": SLOTS} if kind == "slots" else {"ratio": 0.4}
    config = merge.MergeConfig(variant=kind, inner=8, heads=2, dropout=dropout, **left)
    return merge.make_merger(config, WIDTH, WIDTH)


def run(merger: nn.Module, samples: VisionTokens) -> merge.Merged:
    merged = merger(samples)
    assert isinstance(merged, merge.Merged)
    return merged


def dense(merged: merge.Merged, num_vision: int) -> Tensor:
    """Weights as one matrix, (total_out, num_vision)."""
    return merged.average(torch.eye(num_vision, dtype=torch.float64))


def test_slots_have_any_width_that_their_heads_divide():
    config = merge.MergeConfig(variant="slots", slots=2, inner=6, heads=3)
    assert merge.PoolMerger(WIDTH, WIDTH, config).attention.heads == 3


@pytest.mark.promise("vqa.merge-simple", "vqa.merge-slots")
@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_tokens_is_the_promised_one(kind):
    merged = run(make(kind).double().eval(), make_samples())
    wanted = [SLOTS if n else 0 for n in VISION] if kind == "slots" else [2, 1, 16, 4, 0, 1, 17]
    assert merged.layout.lengths().tolist() == wanted
    assert merged.layout.max_seqlen == max(wanted)
    assert len(merged.features) == sum(wanted)


@pytest.mark.promise("vqa.merge-simple")
def test_a_ratio_gives_the_integer_it_means():
    lengths = [100, 576, 1, 0, 3]
    layout = build_layout(np.array(lengths))
    assert merge.num_merged(layout, 0.29).tolist() == [29, 167, 1, 0, 1]
    assert merge.num_merged(layout, 1.0).tolist() == lengths


@pytest.mark.promise("vqa.merge-simple")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_weights_are_means_of_the_samples_own_tokens(kind, training):
    samples = make_samples()
    merged = run(moved(make(kind, 0.1 * training)).train(training), samples)
    weights = dense(merged, len(samples.vision))
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(len(weights), dtype=torch.float64))
    for (a, b), (c, d) in zip(bounds_of(merged.layout), bounds_of(samples.vision_layout), strict=True):
        torch.testing.assert_close(weights[a:b, c:d].sum(1), torch.ones(b - a, dtype=torch.float64))


@pytest.mark.promise("vqa.merge-slots")
@pytest.mark.parametrize("kind", KINDS)
def test_at_the_start_tokens_are_convex_means_of_raw_features(kind):
    """So whatever follows, frozen and trained on raw features, sees features of their size."""
    samples = make_samples()
    merged = run(make(kind).double().eval(), samples)
    torch.testing.assert_close(merged.features, dense(merged, len(samples.vision)) @ samples.vision)
    same = make_samples()
    same.vision.data.fill_(3.0)
    torch.testing.assert_close(run(make(kind).double().eval(), same).features, torch.full_like(merged.features, 3.0))


@pytest.mark.promise("vqa.merge-question")
@pytest.mark.parametrize("size", [3, 0.02])  # embeddings begin with a deviation of 0.02
def test_a_different_question_chooses_different_tokens(size, monkeypatch):
    torch.manual_seed(0)
    merger, samples = make("question").double().eval(), make_samples([40], [6])
    chosen = []

    def top_k(scores: Tensor, layout: Layout, k: Tensor) -> Tensor:
        chosen.append(segment_top_k(scores, layout, k))
        return chosen[-1]

    monkeypatch.setattr(merge, "segment_top_k", top_k)
    for seed in range(2):
        merger(replace(samples, question=size * make_samples([40], [6], seed=seed).question.detach()))
    assert [int(choice.sum()) for choice in chosen] == [16, 16]
    assert not torch.equal(chosen[0], chosen[1])


@pytest.mark.promise("vqa.merge-question")
@pytest.mark.parametrize("kind", ["question", "slots"])
def test_without_a_question_its_layers_do_nothing(kind):
    merger, samples = moved(make(kind)), make_samples([9, 5], [0, 0])
    names = [name for name, _ in merger.named_parameters() if "question" in name]
    merged = run(merger, samples)
    found = torch.autograd.grad(merged.features.square().sum(), [merger.get_parameter(name) for name in names])
    assert all((g == 0).all() for g in found)
    assert names


@pytest.mark.promise("vqa.merge-simple")
@pytest.mark.parametrize("kind", KINDS)
def test_eval_draws_nothing_and_training_by_torchs_generator(kind):
    merger, samples = moved(make(kind)), make_samples()
    state = torch.get_rng_state()
    first = run(merger, samples).features
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, run(merger, samples).features)
    merger.train()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(run(merger, samples).features)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2]) == (kind in ("slots", "similarity"))
    if kind in ("slots", "similarity"):
        torch.testing.assert_close(found[0], first)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_gives_means_and_finite_gradients(kind):
    """Not the same means as in fp64: other tokens may be the best."""
    merger = moved(make(kind), torch.float32)
    samples = make_samples([40, 44, 9], [4, 0, 3], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        merged = run(merger, samples)
    merged.features.square().sum().backward()
    assert merged.features.dtype == torch.float32
    assert torch.isfinite(merged.features).all()
    leaves = [samples.vision, *merger.parameters()]
    assert all(leaf.grad is not None and torch.isfinite(leaf.grad).all() for leaf in leaves)
    weights = merged.average(torch.eye(93))
    torch.testing.assert_close(weights.sum(1), torch.ones(len(weights)))


# --------------------------------------------------------------------------- similarity


def merge_by_hand(x: Tensor, budget: int) -> Tensor:
    """ToMe of one sample as its paper writes it, with size-weighted averages round by round."""
    sizes = torch.ones(len(x), 1, dtype=x.dtype)
    while len(x) > max(budget, 1):
        unit = F.normalize(x, dim=1)
        likeness, partner = (unit[::2] @ unit[1::2].T).max(1)
        merged = likeness.argsort(descending=True, stable=True)[: min(len(x) - budget, len(x) // 2)]
        total = x * sizes
        for token in merged.tolist():
            total[2 * partner[token] + 1] += total[2 * token]
            sizes[2 * partner[token] + 1] += sizes[2 * token]
        stays = torch.ones(len(x), dtype=torch.bool)
        stays[2 * merged] = False
        x, sizes = (total / sizes)[stays], sizes[stays]
    return x


@pytest.mark.promise("vqa.methods")
@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5), data=st.data())
def test_similar_tokens_merge_as_the_paper_says(lengths, data):
    budget = [data.draw(st.integers(1, n + 2)) for n in lengths]
    samples = make_samples(lengths, [0] * len(lengths))
    merged = merge.similarity_merge(samples.vision, samples.vision_layout, torch.tensor(budget))
    parts = [
        merge_by_hand(samples.vision[start:stop].detach(), most)
        for (start, stop), most in zip(bounds_of(samples.vision_layout), budget, strict=True)
    ]
    assert merged.layout.lengths().tolist() == [min(a, b) for a, b in zip(lengths, budget, strict=True)]
    torch.testing.assert_close(merged.features, torch.cat(parts), rtol=1e-10, atol=1e-12)
