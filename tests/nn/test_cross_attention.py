"""Attention from one run to another is the definition, sequence by sequence, however sequences are grouped."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.largest import Largest
from tests.helpers.samples import VISION, WIDTH, bounds_of, make_samples, moved
from unpad.batching.layout import Layout, build_layout
from unpad.nn import cross_attention as across
from unpad.nn import cross_attention as module
from unpad.nn.linear import independent_rows

HEADS, HEAD_DIM = 4, 6
LENGTHS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8)


def layouts(lengths: list[tuple[int, int]]) -> tuple[Layout, Layout]:
    a, b = (np.array([pair[i] for pair in lengths], int) for i in (0, 1))
    return build_layout(a), build_layout(b)


def inputs(queries: Layout, keys: Layout, kv_heads: int = HEADS) -> list[Tensor]:
    torch.manual_seed(queries.num_seqs)
    num_q, num_k = int(queries.cu_seqlens[-1]), int(keys.cu_seqlens[-1])
    shapes = [(num_q, HEADS, HEAD_DIM), (num_k, kv_heads, HEAD_DIM), (num_k, HEADS, 5), (num_k,)]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def definition(q: Tensor, k: Tensor, bias: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Weights of one sequence, (heads, queries, keys)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1]) + bias
    return (scores if hidden is None else scores.masked_fill(hidden, -math.inf)).softmax(-1)


@settings(deadline=None, max_examples=40)
@given(lengths=LENGTHS)
def test_it_equals_the_definition(lengths):
    queries, keys = layouts(lengths)
    q, k, v, bias = inputs(queries, keys)
    got = across.attention_weights(q, k, across.pair_sequences(queries, keys), key_bias=bias).apply(v)
    parts = [q.new_zeros(0, HEADS, 5)]
    for (a, b), (c, d) in zip(bounds_of(queries), bounds_of(keys), strict=True):
        weights = definition(q[a:b], k[c:d], bias[c:d])
        parts.append(torch.einsum("hqk,khd->qhd", weights, v[c:d]))  # a sum over no keys is zero
    wanted = torch.cat(parts)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)
    probe = torch.randn_like(got)
    if not probe.numel():
        return
    found = [torch.autograd.grad((y * probe).sum(), [q, k, v, bias]) for y in (got, wanted)]
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(lengths=LENGTHS, causal=st.booleans(), kv_heads=st.sampled_from([1, 2, 4]))
def test_what_keys_receive_is_the_mean_of_the_weights(lengths, causal, kv_heads):
    """With shared key heads and places, of which every query sees at least the first."""
    queries, keys = layouts(lengths)
    q, k, _, bias = inputs(queries, keys, kv_heads)
    places = [torch.cat([torch.arange(0), *(torch.arange(b - a) for a, b in bounds_of(x))]) for x in (queries, keys)]
    got = across.received_attention(
        q, k, across.pair_sequences(queries, keys), key_bias=bias, places=(places[0], places[1]) if causal else None
    )
    for (a, b), (c, d) in zip(bounds_of(queries), bounds_of(keys), strict=True):
        hidden = places[1][c:d] > places[0][a:b, None] if causal else None
        weights = definition(q[a:b], k[c:d], bias[c:d], hidden)
        wanted = weights.mean((0, 1)) if b > a else torch.zeros(d - c, dtype=torch.float64)
        torch.testing.assert_close(got[c:d], wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("name", "value"), [("MAX_CELLS", 1), ("MAX_GROUPS", 1), ("LENGTH_STEPS", (1e6,))])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_grouping_changes_nothing(name, value, dropout, monkeypatch):
    """Not even what dropout drops."""
    samples = make_samples()
    q, k, v, _ = inputs(samples.vision_layout, samples.question_layout)
    found = []
    for changed in (False, True):
        if changed:
            monkeypatch.setattr(module, name, value)
        pairs = across.pair_sequences(samples.vision_layout, samples.question_layout)
        torch.manual_seed(3)
        found.append((len(pairs.groups), across.attention_weights(q, k, pairs).apply(v, dropout)))
    assert found[0][0] != found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-12, atol=1e-12)


def test_groups_are_few_and_tight():
    rng = np.random.default_rng(0)
    lengths = [(576, int(n)) for n in rng.integers(10, 100, 300)]
    pairs = across.pair_sequences(*layouts(lengths))
    assert len(pairs.groups) <= module.MAX_GROUPS
    cells = sum(
        group.queries.mask.numel() // len(group.queries.mask) * group.keys.mask.numel() for group in pairs.groups
    )
    assert cells <= 1.25 * sum(a * b for a, b in lengths)
    anything = [(int(a), int(b)) for a, b in rng.integers(1, 200, (500, 2))]
    assert len(across.pair_sequences(*layouts(anything)).groups) <= module.MAX_GROUPS


def test_without_gradient_no_tensor_holds_the_pairs_of_the_whole_batch(monkeypatch):
    monkeypatch.setattr(module, "MAX_CELLS", 2 * 60 * 60)
    layout = build_layout(np.array([60] * 20))
    q, k, _, _ = inputs(layout, layout)
    with torch.no_grad(), Largest() as largest:
        across.received_attention(q, k, across.pair_sequences(layout, layout))
    assert largest.numel <= 2 * HEADS * 60 * 60


def test_inside_independent_rows_a_sequence_has_the_bits_that_it_has_alone():
    lengths = [(4, 4), (1, 7), (10, 10), (11, 11), (9, 2), (4, 4), (1, 40), (36, 37), (40, 40), (3, 0), (10, 11)]
    torch.manual_seed(0)
    q = [torch.randn(num, 3, 32) for num, _ in lengths]
    kv = [torch.randn(num, 2, 3, 32) for _, num in lengths]

    def attended(chosen: list[int]) -> tuple[Tensor, Tensor]:
        pairs = across.pair_sequences(*layouts([lengths[i] for i in chosen]))
        queries, (k, v) = torch.cat([q[i] for i in chosen]), torch.cat([kv[i] for i in chosen]).unbind(1)
        return across.attention_weights(queries, k, pairs).apply(v), across.received_attention(queries, k, pairs)

    with torch.no_grad(), independent_rows():
        whole, received = attended(list(range(len(lengths))))
        alone = [attended([i]) for i in range(len(lengths))]
    assert torch.equal(whole, torch.cat([one for one, _ in alone]))
    assert torch.equal(received, torch.cat([one for _, one in alone]))


@pytest.mark.parametrize("seq", [0, 2, 6])
def test_other_samples_are_never_seen(seq):
    """Not even times zero, as the padding of a rectangle: one NaN would do."""
    attention, samples = moved(across.CrossAttention(WIDTH, 4, 0.0)), make_samples()
    pairs = across.pair_sequences(samples.vision_layout, samples.question_layout)
    before, _ = attention(samples.vision, samples.question, pairs)
    changed = samples.question.detach().clone()
    changed[samples.question_layout.select([seq])[1]] = math.nan
    after, _ = attention(samples.vision, changed, pairs)
    tokens = samples.vision_layout.select([other for other in range(len(VISION)) if other != seq])[1]
    assert torch.equal(before[tokens], after[tokens])
    assert after[samples.vision_layout.select([seq])[1]].isnan().all()


def test_bf16_stays_near_fp64():
    attention = moved(across.CrossAttention(WIDTH, 4, 0.0), torch.float32)
    exact = moved(across.CrossAttention(WIDTH, 4, 0.0))
    exact.load_state_dict(attention.state_dict())
    samples = make_samples()
    pairs = across.pair_sequences(samples.vision_layout, samples.question_layout)
    wanted, _ = exact(samples.vision, samples.question, pairs)
    with torch.autocast("cpu", torch.bfloat16):
        got, weights = attention(samples.vision.float(), samples.question.float(), pairs)
    assert got.dtype == torch.bfloat16
    assert weights.rectangles[0].dtype == torch.float32
    assert (got.double() - wanted).norm() < 0.02 * wanted.norm()
