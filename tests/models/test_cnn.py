"""The convolutional classifier: every image on its own, one square size, classes."""

import torch
from torch.nn import functional as F

from tests.helpers.image_models import CLASSES, SIDE, random_squares, small_cnn
from unpad.models import build_model, model_config


def test_the_model_is_its_parts_in_order():
    model, batch = small_cnn().eval(), random_squares(3)
    x = batch.inputs_embeds.double().reshape(3, 3, SIDE, SIDE)
    for convolution, channels in zip(model.convolutions, (16, 32, 64, 128), strict=True):
        x = F.max_pool2d(F.conv2d(x, convolution.weight, convolution.bias, padding=1).clamp_min(0), 2)
        assert x.shape[1] == channels
    features = x.flatten(2).mean(2)
    logits = features @ model.head.weight.T
    torch.testing.assert_close(model(batch), features, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.classify(batch), logits, rtol=1e-12, atol=1e-12)


def test_dropout_is_on_features_in_training_and_repeats_with_the_seed():
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


def test_a_fresh_model_lets_the_signal_through():
    torch.manual_seed(0)
    model = build_model(model_config({"kind": "cnn", "patch": SIDE}), CLASSES)
    features = model(random_squares())
    assert 0.1 < features.std() < 10
    assert all(torch.equal(c.bias, torch.zeros_like(c.bias)) for c in model.convolutions)
