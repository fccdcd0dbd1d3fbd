"""The equalities the project lives by: alone = padded = packed = split, in outputs, loss terms and every gradient."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import random_batch, tiny_model
from tests.helpers.gradients import assert_same_update, gradients
from tests.helpers.tiny_models import DECODERS
from unpad.batching.batch import RaggedBatch, from_padded

pytestmark = pytest.mark.slow

KINDS = {**DECODERS, "both ways": {"causal": False}}
LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=8)


@pytest.mark.promise("batch.any-mask")
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=15)
@given(lengths=LENGTHS, seed=st.integers(0, 100))
def test_alone_padded_packed_and_split_are_equal(kind, lengths, seed):
    model = tiny_model(**KINDS[kind]).eval()
    batch = random_batch(lengths, seed)
    alone = [batch.select([i]) for i in range(batch.num_seqs)]
    order = np.random.default_rng(seed).permutation(batch.num_seqs).tolist()
    cut = len(order) // 2
    padded = ([batch.pad("right"), batch.select([])], [batch.pad("left", pad_to=25, pad_id=7)])
    split = [batch.select(order[:cut]), batch.select([]), batch.select(order[cut:])]
    assert_same_update(model, alone, [batch], *padded, split, atol=1e-12)
    with torch.no_grad():
        hidden = model(batch)
        torch.testing.assert_close(torch.cat([model(one) for one in alone]), hidden, rtol=1e-10, atol=1e-10)
        for padded in (batch.pad("right"), batch.pad("left", pad_to=30)):
            mask = padded.layout.attention_mask
            torch.testing.assert_close(
                from_padded(model(padded).unflatten(0, mask.shape), mask), hidden, rtol=1e-10, atol=1e-10
            )


@settings(deadline=None, max_examples=10)
@given(lengths=st.lists(st.integers(2, 60), min_size=2, max_size=6), seed=st.integers(0, 50))
def test_fp32_agrees_with_one_at_a_time_to_its_own_precision(lengths, seed):
    model = tiny_model(torch.float32).eval()
    batch = random_batch(lengths, seed, share=1.0)
    grads, _ = gradients(model, [batch.select([i]) for i in range(batch.num_seqs)])
    packed, _ = gradients(model, [batch])
    for name in grads:
        assert (grads[name] - packed[name]).norm() <= 1e-5 * grads[name].norm() + 1e-9


def test_embeddings_in_place_of_tokens_are_equal_too():
    model = tiny_model(causal=False).eval()
    batch = random_batch([9, 1, 14, 5])
    embeds = model.embed(batch.input_ids).detach()
    given_embeds = RaggedBatch(**{**vars(batch), "input_ids": None, "inputs_embeds": embeds})
    with torch.no_grad():
        torch.testing.assert_close(model(given_embeds), model(batch))
    alone, padded = [given_embeds.select([i]) for i in range(4)], [given_embeds.pad("left"), given_embeds.select([])]
    assert_same_update(model, alone, padded, atol=1e-12)


@pytest.mark.promise("batch.pad-contents", "batch.pad-gradient")
def test_what_padding_holds_changes_nothing_and_receives_no_gradient():
    model = tiny_model().eval()
    batch = random_batch([3, 9, 5])
    a, b = batch.pad(pad_id=0), batch.pad(pad_id=33)
    mask = a.layout.attention_mask.flatten()
    with torch.no_grad():
        assert torch.equal(model(a)[mask], model(b)[mask])
    embeds = model.embed(a.input_ids).detach().requires_grad_()
    terms = model.losses(RaggedBatch(**{**vars(a), "input_ids": None, "inputs_embeds": embeds}))
    terms["cross_entropy"][0].backward()
    assert torch.equal(embeds.grad[~mask], torch.zeros_like(embeds.grad[~mask]))
    assert torch.isfinite(model(a)).all()


def test_a_step_of_nothing_is_legal():
    model = tiny_model()
    grads, terms = gradients(model, [random_batch([]), random_batch([0, 1]), random_batch([5], share=0.0)])
    assert terms == {}
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads.values())
    assert model(random_batch([])).shape == (0, 16)
