"""Events, sets and latents: what the layers of the set encoder promise one by one."""

import math

import pytest
import torch
from torch import Tensor

from tests.helpers.samples import CONFIG, SIZES, WIDTH, bounds_of, members_of, moved
from unpad.errors import RecipeError
from unpad.models.set_sequence import encoder as encoders
from unpad.nn.block import init_weights

POINTS, LATENT = 3, 5


def events(num: int) -> Tensor:
    return torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(num), dtype=torch.float64).requires_grad_()


# --------------------------------------------------------------------------- one event


def test_value_features_rise_from_knot_to_knot():
    values = torch.tensor([-9.0, -4.0, -0.25, 0.0, 2.5, 4.0, 1e30], dtype=torch.float64)
    features = encoders.value_features(values)
    assert features.shape == (7, len(encoders.KNOTS))
    torch.testing.assert_close(features[:, 0], values.asinh())
    climbed = features[:, 1:]
    torch.testing.assert_close(climbed.sum(1)[:4], torch.tensor([0, 0, 5.5, 6], dtype=torch.float64))
    assert climbed[4].tolist() == [1] * 10 + [0.5, 0]
    assert climbed[5:].tolist() == [[1] * 12] * 2
    assert torch.isfinite(features).all()


def test_no_value_an_average_one_and_a_raw_zero_are_three_things():
    embed = moved(encoders.EventEmbedding(4, WIDTH, None))
    codes = torch.tensor([2, 2, 2, 2])
    values = torch.tensor([0.0, 0.0, -1.7, 3.3])  # a raw zero lies 1.7 deviations below this code's mean
    out = embed(codes, values, torch.tensor([False, True, True, False]))
    assert torch.equal(out[0], out[3])  # what stands where there is no value does not matter
    assert torch.equal(out[0], embed.table.weight[2])
    assert all((out[i] - out[j]).norm() > 0.1 for i, j in ((0, 1), (0, 2), (1, 2)))


def test_codes_may_come_with_vectors():
    embed = moved(encoders.EventEmbedding(4, WIDTH, 3))
    vectors = torch.tensor([[3.0, 0, 0], [0, 0.5, 0], [1, 1, 0], [0, 0, 0]])
    embed.load_code_vectors(vectors)
    torch.testing.assert_close(embed.code_vectors.norm(dim=1), torch.tensor([1, 1, 1, 0], dtype=torch.float64))
    assert "code_vectors" in embed.state_dict()
    out = embed(torch.tensor([0, 2]), torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    unit = torch.tensor([[1, 0, 0], [0.5**0.5, 0.5**0.5, 0]], dtype=torch.float64)
    torch.testing.assert_close(out, unit @ embed.from_vector.weight.T + embed.from_vector.bias)


@pytest.mark.parametrize(("size", "expects"), [(None, "expects none"), (4, "expects 4")])
def test_vectors_of_another_length_are_refused(size, expects):
    with pytest.raises(RecipeError, match=f"vectors of 3 numbers, and the model {expects}") as error:
        encoders.EventEmbedding(2, WIDTH, size).load_code_vectors(torch.ones(2, 3))
    assert error.value.where == "model.code_vectors"


@pytest.mark.parametrize("vector_size", [None, 32])
def test_embeddings_start_as_long_as_one(vector_size):
    torch.manual_seed(0)
    embed = encoders.EventEmbedding(200, 64, vector_size)
    init_weights(embed, 1)
    embed.reset()
    if vector_size is not None:
        embed.load_code_vectors(torch.randn(200, vector_size))
    codes, values = torch.arange(200), torch.randn(200)
    bare = embed(codes, values, torch.zeros(200, dtype=torch.bool)).norm(dim=1)
    told = embed(codes, values, torch.ones(200, dtype=torch.bool)).norm(dim=1)
    assert 0.9 < bare.mean() < 1.1
    assert 1.0 < told.mean() < 3.0


# --------------------------------------------------------------------------- the events of a set


def test_a_set_has_no_more_points_than_events():
    pairs = encoders.pair_members(members_of([1, 40, 2, 3]), POINTS)
    assert pairs.points.tolist() == [0, 0, 1, 2, 0, 1, 0, 1, 2]
    assert (pairs.gather.num_queries, pairs.gather.num_keys) == (9, 46)
    assert (pairs.spread.num_queries, pairs.spread.num_keys) == (46, 9)


def attend(attention: torch.nn.Module, x: Tensor, context: Tensor) -> Tensor:
    """Multi-head attention of one set, by definition."""
    heads = attention.heads
    q = attention.to_q(x).unflatten(-1, (heads, -1))
    k, v = attention.to_kv(context).unflatten(-1, (2, heads, -1)).unbind(1)
    weights = (torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])).softmax(-1)
    return attention.to_out(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))


@pytest.mark.promise("patients.sets")
def test_a_block_is_two_residual_attentions_through_the_points():
    block, members = moved(encoders.InducedBlock(CONFIG, POINTS)), members_of(SIZES)
    x = events(sum(SIZES))
    got = torch.stack(block(x, None, encoders.pair_members(members, POINTS))).sum(0)
    wanted = []
    for start, stop in bounds_of(members):
        seen = block.norm_events(x[start:stop])[1]
        points = block.points[: stop - start]
        points = points + attend(block.gather, block.norm_points(points)[1], seen)
        points = points + block.feed_points(block.norm_gathered(points)[1])
        y = x[start:stop] + attend(block.spread, seen, block.norm_summary(points)[1])
        wanted.append(y + block.feed_events(block.norm_spread(y)[1]))
    torch.testing.assert_close(got, torch.cat(wanted), rtol=1e-11, atol=1e-12)


# --------------------------------------------------------------------------- latents


def encoder(levels: int = 2) -> encoders.SetEncoder:
    return moved(encoders.SetEncoder(CONFIG, levels, POINTS, LATENT, sample=True))


def flat(latents: list[encoders.Latent]) -> Tensor:
    """(num_sets, levels * 2 * LATENT)."""
    return torch.cat([part for latent in latents for part in (latent.mean, latent.log_var)], 1)


def test_the_order_of_events_changes_nothing_and_their_number_does():
    module, x = encoder(), events(9)
    order = torch.tensor([4, 0, 8, 2, 6, 1, 3, 7, 5])
    before, after = (flat(module(given, members_of([9]))) for given in (x, x[order]))
    torch.testing.assert_close(before, after, rtol=1e-12, atol=1e-12)
    # As many points in both, and attention to equal events is the same however many there are.
    few, many = (flat(module(x[:1].expand(num, -1), members_of([num]))) for num in (POINTS, 2 * POINTS))
    assert (few - many).abs().max() > 1e-3


def test_a_deeper_latent_rests_on_the_one_before():
    module, x = encoder(), events(9)
    before = module(x, members_of([4, 5]))
    module.heads[0].to_latent.bias.data += 1
    assert not torch.equal(before[1].mean, module(x, members_of([4, 5]))[1].mean)
    module.tell[0].weight.data.zero_()
    untold = module(x, members_of([4, 5]))[1].mean
    module.heads[0].to_latent.bias.data += 1
    assert torch.equal(module(x, members_of([4, 5]))[1].mean, untold)


def test_training_draws_and_eval_takes_the_mean():
    module, x = encoder(), events(9)
    assert all(torch.equal(latent.z, latent.mean) for latent in module(x, members_of([4, 5])))
    module.train()
    assert all(not torch.equal(latent.z, latent.mean) for latent in module(x, members_of([4, 5])))


def test_log_variances_are_clamped_softly():
    raw = torch.tensor([-1e4, -3.0, 0.0, 0.1, 1e4], dtype=torch.float64, requires_grad=True)
    out = encoders.soft_clamp(raw)
    assert out.abs().max() <= encoders.LOG_VAR_LIMIT
    torch.testing.assert_close(out[2:4], raw[2:4], rtol=1e-4, atol=0)
    out[1].backward()
    assert raw.grad[1] > 0.8
