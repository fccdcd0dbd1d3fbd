"""The convolutional classifier: every image on its own, one square size, classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.image_models import CLASSES, SIDE, pack_squares, random_squares, small_cnn
from unpad.batching.batch import RaggedBatch, from_padded
from unpad.batching.layout import PaddedLayout
from unpad.errors import RecipeError
from unpad.models import build_model, model_config
from unpad.models.cnn import Cnn
from unpad.models.contract import WEIGHTS
from unpad.training.step import accumulate, train_step


def gradients(model: Cnn, micros: Sequence[RaggedBatch]) -> tuple[Tensor, dict[str, float]]:
    model.zero_grad()
    sums, counts = accumulate(model, micros, WEIGHTS, "fp32")
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert len(grads) == sum(p.numel() for p in model.parameters())
    return grads, {name: float(value) / counts[name] for name, value in sums.items()}


def outputs(model: Cnn, batch: RaggedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Features, logits and likelihoods of the images of a batch."""
    with torch.no_grad():
        features = model(batch)
        if isinstance(batch.layout, PaddedLayout):
            mask = batch.layout.attention_mask
            features = from_padded(features.unflatten(0, mask.shape), mask)
        return features, model.classify(batch), model.nll(batch)


def test_images_in_one_batch_equal_each_alone_however_split_or_padded() -> None:
    model, batch = small_cnn().eval(), random_squares()
    model.label_smoothing = 0.1
    alone = [batch.select([i]) for i in range(batch.num_seqs)]
    truth = tuple(torch.cat(parts) for parts in zip(*(outputs(model, one) for one in alone), strict=True))
    assert truth[0].shape == (7, 128)
    grads, terms = gradients(model, alone)
    for other in (batch, batch.pad("right"), batch.pad("left", pad_to=3)):
        for got, expected in zip(outputs(model, other), truth, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    split = [batch.select([4, 1]), batch.select([]), batch.select([6, 0, 3, 5, 2])]
    for micros in ([batch], split, [batch.pad("left", pad_to=3)]):
        other_grads, other_terms = gradients(model, micros)
        assert other_terms == pytest.approx(terms, rel=1e-10)
        assert (other_grads - grads).norm() <= 1e-10 * grads.norm()


def test_permuting_images_permutes_results() -> None:
    model, batch, order = small_cnn().eval(), random_squares(), [3, 0, 6, 5, 1, 4, 2]
    for got, expected in zip(outputs(model, batch.select(order)), outputs(model, batch), strict=True):
        torch.testing.assert_close(got, expected[order], rtol=1e-10, atol=1e-10)


def test_an_image_does_not_change_another_by_a_bit() -> None:
    model, batch = small_cnn(torch.float32).train(), random_squares()
    changed = batch.inputs_embeds.clone()
    changed[3] += 1
    torch.manual_seed(0)
    before = model.classify(batch)
    torch.manual_seed(0)
    after = model.classify(replace(batch, inputs_embeds=changed))
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[3], after[3])


def test_a_batch_without_images_is_legal() -> None:
    model, empty = small_cnn().train(), random_squares().select([])
    for batch in (empty, empty.pad()):
        assert model(batch).shape == (0, 128)
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


def test_the_model_is_its_parts_in_order() -> None:
    model, batch = small_cnn().eval(), random_squares(3)
    model.label_smoothing = 0.2
    x = batch.inputs_embeds.double().reshape(3, 3, SIDE, SIDE)
    for convolution, channels in zip(model.convolutions, (16, 32, 64, 128), strict=True):
        x = F.max_pool2d(F.conv2d(x, convolution.weight, convolution.bias, padding=1).clamp_min(0), 2)
        assert x.shape[1] == channels
    features = x.flatten(2).mean(2)
    logits = features @ model.head.weight.T
    torch.testing.assert_close(model(batch), features, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.classify(batch), logits, rtol=1e-12, atol=1e-12)
    terms = model.losses(batch)
    smoothed = F.cross_entropy(logits, batch.seq_labels, reduction="sum", label_smoothing=0.2)
    torch.testing.assert_close(terms["cross_entropy"][0], smoothed, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(terms["nll"][0], model.nll(batch).sum(), rtol=1e-12, atol=1e-12)
    assert {name: count for name, (_, count) in terms.items()} == model.count_targets(batch)
    expected = torch.autograd.grad(smoothed, list(model.parameters()))
    got = torch.autograd.grad(terms["cross_entropy"][0], list(model.parameters()))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_dropout_is_on_features_in_training_and_repeats_with_the_seed() -> None:
    model, batch = small_cnn(dropout=0.5), random_squares()
    model.train()
    torch.manual_seed(4)
    first = model.classify(batch)
    torch.manual_seed(4)
    assert torch.equal(model.classify(batch), first)
    assert not torch.equal(model.classify(batch), first)
    with torch.no_grad():  # a head that shows single features: each is dropped, or doubled
        model.head.weight.copy_(torch.eye(CLASSES, 128))
        ratio = model.classify(batch) / model(batch)[:, :CLASSES]
    assert bool(((ratio.abs() < 1e-12) | ((ratio - 2).abs() < 1e-12) | ratio.isnan()).all())
    assert 0 < (ratio.abs() < 1e-12).sum() < ratio.numel()
    plain = small_cnn(dropout=0.0)
    torch.testing.assert_close(plain.train().classify(batch), plain.eval().classify(batch))


def test_bf16_stays_close_to_fp64_and_scores_are_fp32() -> None:
    batch = random_squares()
    exact, low = small_cnn().eval(), small_cnn(torch.float32).eval()
    with torch.autocast("cpu", torch.bfloat16):
        logits, terms = low.classify(batch), low.losses(batch)
    terms["cross_entropy"][0].backward()
    assert logits.dtype == terms["nll"][0].dtype == torch.float32
    truth = exact.classify(batch)
    assert (logits.double() - truth).norm() <= 3e-2 * truth.norm()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in low.parameters())


def halves(num: int, side: int, seed: int) -> RaggedBatch:
    """Noisy images of 8 to 48 pixels a side brought to squares; label 0 is brighter on the left, 1 on the right."""
    generator = np.random.default_rng(seed)
    squares, labels = [], generator.integers(0, 2, num).tolist()
    for label in labels:
        height, width = generator.integers(8, 49, 2).tolist()
        image = generator.normal(0, 0.5, (3, height, width))
        image[:, :, width // 2 :] += 1 if label else -1
        squares.append(F.interpolate(torch.from_numpy(image).float()[None], (side, side), mode="area")[0])
    return pack_squares(torch.stack(squares), labels)


@pytest.mark.slow
def test_it_learns_which_half_of_an_image_is_bright() -> None:
    torch.manual_seed(0)
    model = build_model(model_config({"kind": "cnn", "patch": 16}), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        train_step(model, [halves(32, 16, step)], optimizer, weights=WEIGHTS, precision="fp32", clip=1.0)
    model.eval()
    fresh = halves(300, 16, 10_000)
    with torch.no_grad():
        right = model.classify(fresh).argmax(1) == fresh.seq_labels
    assert right.double().mean() > 0.95


def test_a_fresh_model_lets_the_signal_through() -> None:
    torch.manual_seed(0)
    model = build_model(model_config({"kind": "cnn", "patch": SIDE}), CLASSES)
    assert isinstance(model, Cnn)
    features = model(random_squares())
    assert 0.1 < features.std() < 10
    assert all(torch.equal(c.bias, torch.zeros_like(c.bias)) for c in model.convolutions)


def test_defaults() -> None:
    config = model_config({"kind": "cnn"})
    assert (config.patch, config.dropout, config.longest) == (64, 0.5, 1)


@pytest.mark.parametrize(
    ("section", "where"),
    [({"patch": 8}, "model.patch"), ({"patch": 40}, "model.patch"), ({"dropout": 1.0}, "model.dropout"),
     ({"width": 8}, "model.width")],
)  # fmt: skip
def test_a_model_that_cannot_be_is_refused_by_name(section: dict[str, Any], where: str) -> None:
    with pytest.raises(RecipeError) as caught:
        model_config({"kind": "cnn", **section})
    assert caught.value.where == where
    assert caught.value.fix
