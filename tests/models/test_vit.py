"""The vision transformer gives every image what it gives the image alone, and learns where things are."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from tests.helpers.image_models import CLASSES, PATCH, SIZES, VITS, outputs, random_images, tiny_vit
from unpad.models import build_model, model_config
from unpad.models.vit import drop_tokens
from unpad.nn.block import Stream

# --------------------------------------------------------------------------- equalities


@pytest.mark.promise("images.own-size")
def test_the_size_of_an_image_is_known_however_it_is_shown():
    model, blind, batch = tiny_vit(size_embed=True).eval(), tiny_vit().eval(), random_images()
    sizes = batch.image_sizes.clone()
    sizes[2, 1] += 1
    other = replace(batch, image_sizes=sizes)
    changed = (model.classify(other) - model.classify(batch)).abs().amax(1) > 1e-9
    assert changed.tolist() == [i == 2 for i in range(batch.num_seqs)]
    assert torch.equal(blind.classify(other), blind.classify(batch))


def test_what_padding_holds_changes_nothing():
    model = tiny_vit(pool="attention").eval()
    padded = random_images([(3, 4), (1, 1), (2, 2)]).pad("left", pad_to=14)
    noise = torch.where(padded.layout.attention_mask.flatten()[:, None], padded.inputs_embeds, 1e3)
    for got, expected in zip(outputs(model, replace(padded, inputs_embeds=noise)), outputs(model, padded), strict=True):
        assert torch.equal(got, expected)


# --------------------------------------------------------------------------- the model


def test_the_model_is_its_parts_in_order():
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


def test_images_without_labels_are_classified():
    model, batch = tiny_vit().eval(), random_images()
    unlabelled = replace(batch, seq_labels=None)
    with torch.no_grad():
        assert torch.equal(model.classify(unlabelled), model.classify(batch))
    assert model.count_targets(unlabelled) == {"cross_entropy": 0, "nll": 0}


# --------------------------------------------------------------------------- token dropping


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9, 0.999])
def test_every_image_keeps_its_share_of_patches_in_place_and_at_least_one(share):
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


def test_every_patch_is_dropped_equally_often():
    batch = random_images([(2, 3), (1, 4)])
    torch.manual_seed(0)
    seen = torch.zeros(10)
    for _ in range(2000):
        thin = drop_tokens(batch, 0.5)
        seen[thin.position_ids + torch.tensor([0, 6])[thin.layout.seq_of_token()]] += 1
    assert (seen / 2000 - 0.5).abs().max() < 0.05  # 4 standard deviations are 0.045


@pytest.mark.parametrize("kind", VITS)
def test_training_sees_what_is_kept_the_same_again_for_the_same_seed(kind):
    model, batch = (
        tiny_vit(**VITS[kind], token_drop=0.4).train(),
        random_images(channels=VITS[kind].get("channels", 3)),
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


# --------------------------------------------------------------------------- learning


# --------------------------------------------------------------------------- configuration


def test_a_fresh_model_has_no_biases_and_small_scores():
    torch.manual_seed(0)
    model = build_model(model_config({"kind": "vit", "patch": PATCH, "pool": "attention"}), CLASSES)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
    assert model.classify(random_images()).abs().max() < 2
