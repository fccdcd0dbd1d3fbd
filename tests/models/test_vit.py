"""The vision transformer gives every image what it gives the image alone, and learns where things are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.image_models import CLASSES, PATCH, SIZES, pack_images, random_images, tiny_vit
from unpad.batching.batch import RaggedBatch, from_padded
from unpad.errors import RecipeError
from unpad.models import build_model, model_config
from unpad.models.contract import WEIGHTS
from unpad.models.vit import Vit, drop_tokens
from unpad.nn.block import Stream
from unpad.nn.native import library
from unpad.training.step import accumulate, train_step

pytestmark = pytest.mark.slow


def gradients(model: Vit, micros: Sequence[RaggedBatch]) -> tuple[dict[str, Tensor], dict[str, float]]:
    model.zero_grad()
    sums, counts = accumulate(model, micros, WEIGHTS, "fp32")
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert grads.keys() == {name for name, _ in model.named_parameters()}
    return {k: v.clone() for k, v in grads.items()}, {k: float(v) / counts[k] for k, v in sums.items()}


def assert_same(
    model: Vit, expected: tuple[dict[str, Tensor], dict[str, float]], micros: Sequence[RaggedBatch]
) -> None:
    grads, terms = expected
    other_grads, other_terms = gradients(model, micros)
    assert set(terms) == set(other_terms) == {"cross_entropy", "nll"}
    for name, value in terms.items():
        assert other_terms[name] == pytest.approx(value, rel=1e-10)
    for name, grad in grads.items():
        error = (other_grads[name] - grad).norm()
        assert error <= 1e-10 * max(float(grad.norm()), 1e-3), name


def outputs(model: Vit, batch: RaggedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of real patches, logits and likelihoods of a batch."""
    with torch.no_grad():
        hidden = model(batch)
        if not hasattr(batch.layout, "cu_seqlens"):
            mask = batch.layout.attention_mask
            hidden = from_padded(hidden.unflatten(0, mask.shape), mask)
        return hidden, model.classify(batch), model.nll(batch)


# --------------------------------------------------------------------------- equalities

KINDS: dict[str, dict[str, Any]] = {
    "mean": {},
    "attention": {"pool": "attention", "norm": "rmsnorm", "activation": "swiglu", "kv_heads": 1},
    "convolutions": {"stem": (4,)},
    "opacity and size": {"stem": (4,), "channels": 4, "size_embed": True},
    "opacity": {"channels": 4},
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_images_of_all_sizes_in_one_batch_equal_each_alone(kind: str, native: bool) -> None:
    model = tiny_vit(**KINDS[kind]).eval()
    model.label_smoothing = 0.1
    batch = random_images(channels=model.config.channels)
    alone = [batch.select([i]) for i in range(batch.num_seqs)]
    if native:
        _assert_all_ways_equal(model, batch, alone)
    else:
        with library.switched_off():
            _assert_all_ways_equal(model, batch, alone)


def _assert_all_ways_equal(model: Vit, batch: RaggedBatch, alone: list[RaggedBatch]) -> None:
    truth = tuple(torch.cat(parts) for parts in zip(*(outputs(model, one) for one in alone), strict=True))
    expected_gradients = gradients(model, alone)
    for other in (batch, batch.pad("right"), batch.pad("left", pad_to=545)):
        for got, expected in zip(outputs(model, other), truth, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
        assert_same(model, expected_gradients, [other])
    split = [batch.select([4, 1]), batch.select([]), batch.select([6, 0, 3, 5, 2])]
    assert_same(model, expected_gradients, split)


def test_the_size_of_an_image_is_known_however_it_is_shown() -> None:
    model, blind, batch = tiny_vit(size_embed=True).eval(), tiny_vit().eval(), random_images()
    assert batch.image_sizes is not None
    sizes = batch.image_sizes.clone()
    sizes[2, 1] += 1
    other = replace(batch, image_sizes=sizes)
    changed = (model.classify(other) - model.classify(batch)).abs().amax(1) > 1e-9
    assert changed.tolist() == [i == 2 for i in range(batch.num_seqs)]
    assert torch.equal(blind.classify(other), blind.classify(batch))


def test_permuting_images_permutes_results() -> None:
    model, batch, order = tiny_vit(pool="attention").eval(), random_images(), [3, 0, 6, 5, 1, 4, 2]
    hidden, logits, nll = outputs(model, batch)
    other_hidden, other_logits, other_nll = outputs(model, batch.select(order))
    parts = hidden.split(batch.layout.lengths().tolist())
    torch.testing.assert_close(other_hidden, torch.cat([parts[i] for i in order]), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(other_logits, logits[order], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(other_nll, nll[order], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_and_no_bit_crosses_between_images(kind: str) -> None:
    model = tiny_vit(**KINDS[kind]).eval()
    batch = random_images(channels=model.config.channels)
    pixels = batch.inputs_embeds.double().requires_grad_()
    model.classify(replace(batch, inputs_embeds=pixels))[3].square().sum().backward()
    start, stop = batch.layout.cu_seqlens[3:5].tolist()
    outside = torch.cat([pixels.grad[:start], pixels.grad[stop:]])
    assert torch.equal(outside, torch.zeros_like(outside))
    assert pixels.grad[start:stop].abs().max() > 0

    model = tiny_vit(torch.float32, **KINDS[kind]).eval()
    changed = batch.inputs_embeds.clone()
    changed[start:stop] += 1
    with torch.no_grad():
        before, after = model.classify(batch), model.classify(replace(batch, inputs_embeds=changed))
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[3], after[3])


def test_what_padding_holds_changes_nothing() -> None:
    model = tiny_vit(pool="attention").eval()
    padded = random_images([(3, 4), (1, 1), (2, 2)]).pad("left", pad_to=14)
    noise = torch.where(padded.layout.attention_mask.flatten()[:, None], padded.inputs_embeds, 1e3)
    for got, expected in zip(outputs(model, replace(padded, inputs_embeds=noise)), outputs(model, padded), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_images_is_legal(kind: str) -> None:
    model = tiny_vit(**KINDS[kind], token_drop=0.5).train()
    empty = random_images(channels=model.config.channels).select([])
    for batch in (empty, empty.pad()):
        assert model(batch).shape == (0, 16)
        assert model.classify(batch).shape == (0, CLASSES)
        assert model.nll(batch).shape == (0,)
        terms = model.losses(batch)
        assert {name: (float(total.detach()), count) for name, (total, count) in terms.items()} == {
            "cross_entropy": (0, 0),
            "nll": (0, 0),
        }
        assert model.count_targets(batch) == {"cross_entropy": 0, "nll": 0}
        terms["cross_entropy"][0].backward()
    assert all(p.grad is None or torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


# --------------------------------------------------------------------------- the model


def test_the_model_is_its_parts_in_order() -> None:
    model, batch = tiny_vit(blocks=1).eval(), random_images([(2, 3)])
    block = model.blocks[0]
    with torch.no_grad():
        x = F.linear(batch.inputs_embeds.double(), model.patch_embed.weight, model.patch_embed.bias)
        x = x + model.positions(batch.position_ids, batch.grid, batch.layout)
        x = x + block.attention(block.norm_1(x)[1], Stream(x, None, batch.layout))
        x = x + block.feed_forward(block.norm_2(x)[1])
        hidden = model.norm(x)[1]
        torch.testing.assert_close(model(batch), hidden, rtol=1e-12, atol=1e-12)
        logits = hidden.mean(0, keepdim=True) @ model.head.weight.T
        torch.testing.assert_close(model.classify(batch), logits, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(model.nll(batch), F.cross_entropy(logits, batch.seq_labels, reduction="none"))


def test_losses_are_sums_over_images_with_and_without_smoothing() -> None:
    model, batch = tiny_vit().eval(), random_images()
    model.label_smoothing = 0.2
    logits = model.classify(batch)
    terms = model.losses(batch)
    assert (
        {name: count for name, (_, count) in terms.items()}
        == model.count_targets(batch)
        == {
            "cross_entropy": 7,
            "nll": 7,
        }
    )
    smoothed = F.cross_entropy(logits, batch.seq_labels, reduction="sum", label_smoothing=0.2)
    torch.testing.assert_close(terms["cross_entropy"][0], smoothed, rtol=1e-12, atol=1e-12)
    plain = F.cross_entropy(logits, batch.seq_labels, reduction="sum")
    torch.testing.assert_close(terms["nll"][0], plain.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.nll(batch).sum(), plain.detach(), rtol=1e-12, atol=1e-12)
    # The loss forms its own gradients; those through the logits are autograd's.
    expected = torch.autograd.grad(smoothed, list(model.parameters()))
    got = torch.autograd.grad(terms["cross_entropy"][0], list(model.parameters()))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_images_without_labels_are_classified() -> None:
    model, batch = tiny_vit().eval(), random_images()
    unlabelled = replace(batch, seq_labels=None)
    with torch.no_grad():
        assert torch.equal(model.classify(unlabelled), model.classify(batch))
    assert model.count_targets(unlabelled) == {"cross_entropy": 0, "nll": 0}


@pytest.mark.parametrize("kind", [{}, {"pool": "attention"}, {"stem": (4,)}])
def test_bf16_stays_close_to_fp64_and_scores_are_fp32(kind: dict[str, Any]) -> None:
    batch = random_images()
    exact = tiny_vit(**kind).eval()
    low = tiny_vit(torch.float32, **kind).eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert low(batch).dtype == torch.bfloat16
        logits = low.classify(batch)
        terms = low.losses(batch)
    terms["cross_entropy"][0].backward()
    assert logits.dtype == terms["nll"][0].dtype == torch.float32
    truth = exact.classify(batch)
    assert (logits.double() - truth).norm() <= 3e-2 * truth.norm()
    exact.losses(batch)["cross_entropy"][0].backward()
    pairs = zip(low.parameters(), exact.parameters(), strict=True)
    got, expected = zip(*((a.grad.double().flatten(), b.grad.flatten()) for a, b in pairs), strict=True)
    assert (torch.cat(got) - torch.cat(expected)).norm() <= 6e-2 * torch.cat(expected).norm()


# --------------------------------------------------------------------------- token dropping


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9, 0.999])
def test_every_image_keeps_its_share_of_patches_in_place_and_at_least_one(share: float) -> None:
    batch = random_images([*SIZES, (0, 0), (1, 3)])
    torch.manual_seed(3)
    thin = drop_tokens(batch, share)
    lengths = batch.layout.lengths().tolist()
    assert thin.layout.lengths().tolist() == [n and max(1, round(n * (1 - share))) for n in lengths]
    assert thin.layout.max_seqlen == max(thin.layout.lengths().tolist())
    kept_of = thin.position_ids.split(thin.layout.lengths().tolist())
    pixels_of = thin.inputs_embeds.split(thin.layout.lengths().tolist())
    for kept, pixels, whole in zip(kept_of, pixels_of, batch.inputs_embeds.split(lengths), strict=True):
        assert bool((kept.diff() > 0).all())
        assert torch.equal(pixels, whole[kept])
    assert len(thin.labels) == len(thin.loss_mask) == thin.total_tokens
    assert torch.equal(thin.grid, batch.grid)
    assert thin.num_targets == batch.num_targets


def test_every_patch_is_dropped_equally_often() -> None:
    batch = random_images([(2, 3), (1, 4)])
    torch.manual_seed(0)
    seen = torch.zeros(10)
    for _ in range(2000):
        thin = drop_tokens(batch, 0.5)
        seen[thin.position_ids + torch.tensor([0, 6])[thin.layout.seq_of_token()]] += 1
    assert (seen / 2000 - 0.5).abs().max() < 0.05  # 4 standard deviations are 0.045


@pytest.mark.parametrize("kind", KINDS)
def test_training_sees_what_is_kept_the_same_again_for_the_same_seed(kind: str) -> None:
    model, batch = (
        tiny_vit(**KINDS[kind], token_drop=0.4).train(),
        random_images(channels=KINDS[kind].get("channels", 3)),
    )
    for given in (batch, batch.pad("left", pad_to=545)):
        torch.manual_seed(11)
        logits = model.classify(given)
        torch.manual_seed(11)
        assert torch.equal(model.classify(given), logits)
        assert not torch.equal(model.classify(given), logits)
        torch.manual_seed(11)
        thin = drop_tokens(batch, 0.4)
        torch.testing.assert_close(logits, model.eval().classify(thin), rtol=1e-10, atol=1e-10)
        model.train()
        torch.manual_seed(11)
        got = model.losses(given)["nll"][0]
        torch.testing.assert_close(got, model.eval().losses(thin)["nll"][0], rtol=1e-10, atol=1e-10)
        model.train()
    torch.manual_seed(11)
    assert model(batch).shape == (thin.total_tokens, 16)


def test_dropping_is_off_in_evaluation() -> None:
    batch = random_images()
    dropping, whole = tiny_vit(token_drop=0.4).eval(), tiny_vit().eval()
    for got, expected in zip(outputs(dropping, batch), outputs(whole, batch), strict=True):
        assert torch.equal(got, expected)


# --------------------------------------------------------------------------- learning


def halves(num: int, patch: int, seed: int) -> RaggedBatch:
    """Noisy images of 2 to 6 patches a side; label 0 is brighter on the left half, 1 on the right."""
    generator = np.random.default_rng(seed)
    images, labels = [], generator.integers(0, 2, num).tolist()
    for label in labels:
        height, width = (generator.integers(2, 7, 2) * patch).tolist()
        image = generator.normal(0, 0.5, (3, height, width))
        image[:, :, width // 2 :] += 1 if label else -1
        images.append(torch.from_numpy(image).float())
    return pack_images(images, labels, patch)


@pytest.mark.parametrize("kind", [{}, {"pool": "attention"}, {"stem": (8, 16)}])
def test_it_learns_which_half_of_an_image_is_bright(kind: dict[str, Any]) -> None:
    sizes = {"kind": "vit", "width": 32, "blocks": 2, "heads": 2, "hidden": 64, "patch": 4, "token_drop": 0.25}
    torch.manual_seed(0)
    model = build_model(model_config({**sizes, **kind}), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        train_step(model, [halves(32, 4, step)], optimizer, weights=WEIGHTS, precision="fp32", clip=1.0)
    model.eval()
    fresh = halves(300, 4, 10_000)
    with torch.no_grad():
        right = model.classify(fresh).argmax(1) == fresh.seq_labels
    assert right.double().mean() > 0.95


# --------------------------------------------------------------------------- configuration


def test_defaults_are_those_of_a_vision_transformer() -> None:
    config = model_config({"kind": "vit"})
    assert (config.norm, config.activation, config.bias, config.causal) == ("layernorm", "gelu", True, False)
    assert (config.patch, config.stem, config.pool, config.token_drop) == (8, (), "mean", 0.0)
    assert config.longest == config.context == 4096
    assert model_config({"kind": "vit", "context": 100}).longest == 100


@pytest.mark.parametrize(
    ("section", "where"),
    [
        ({"patch": 0}, "model.patch"),
        ({"pool": "max"}, "model.pool"),
        ({"token_drop": 1.0}, "model.token_drop"),
        ({"positions": "rotary"}, "model.positions"),
        ({"width": 30, "heads": 4}, "model"),
        ({"patch": 12, "stem": [8, 8, 8]}, "model"),
        ({"stem": [0]}, "model.stem.0"),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_name(section: dict[str, Any], where: str) -> None:
    with pytest.raises(RecipeError) as caught:
        model_config({"kind": "vit", **section})
    assert caught.value.where == where
    assert caught.value.fix


def test_a_fresh_model_has_no_biases_and_small_scores() -> None:
    torch.manual_seed(0)
    model = build_model(model_config({"kind": "vit", "patch": PATCH, "pool": "attention"}), CLASSES)
    assert isinstance(model, Vit)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
    assert model.classify(random_images()).abs().max() < 2
