"""Dropout keeps the stated share, by seed and place alone, and natively the same values as in torch."""

import pytest
import torch

from tests.conftest import random_batch, tiny_model
from tests.helpers.paths import PATHS, needs_kernels, on
from unpad.nn.draws import draw, dropout, kept
from unpad.nn.native import library


def test_the_share_is_kept_and_the_mean_too():
    x = torch.ones(400, 500)
    y = dropout(x, 0.3, draw())
    assert float((y == 0).double().mean()) == pytest.approx(0.3, abs=0.005)
    assert float(y.mean()) == pytest.approx(1.0, abs=0.01)
    assert dropout(x, 0.0, 1) is x


def test_bits_are_a_function_of_seed_and_place():
    places = torch.arange(1000)
    first = kept(5, places[:, None], places[:64], 0.5)
    assert torch.equal(first, kept(5, places[:, None], places[:64], 0.5))
    assert torch.equal(first[7:9, 3:5], kept(5, places[7:9, None], places[3:5], 0.5))
    for other in (kept(6, places[:, None], places[:64], 0.5), kept(5 + (1 << 40), places[:, None], places[:64], 0.5)):
        assert 0.45 < float((first == other).double().mean()) < 0.55
    columns = first.double() - 0.5
    assert float((columns[:, :-1] * columns[:, 1:]).mean(0).abs().max()) < 0.05, "neighbours are independent"


@pytest.mark.parametrize("path", PATHS)
def test_evaluation_drops_nothing(path):
    drops, never = (tiny_model(dropout=share, attention_dropout=share, width=32, heads=2) for share in (0.4, 0.0))
    batch = random_batch([7, 1, 20, 3])
    with on(path):
        assert torch.equal(drops.eval()(batch), never.eval()(batch))
        assert not torch.equal(drops.train()(batch), drops(batch))


@pytest.mark.promise("speed.model")
@needs_kernels
@pytest.mark.parametrize("causal", [True, False])
def test_native_kernels_drop_what_torch_drops(causal):
    """Outputs and gradients of a whole model in training, both kinds of dropout on."""
    model = tiny_model(
        torch.float64, dropout=0.2, attention_dropout=0.3, causal=causal, width=32, heads=2, kv_heads=1
    ).train()
    batch = random_batch([7, 1, 20, 3])
    found = []
    for off in (False, True):
        torch.manual_seed(11)
        model.zero_grad()
        with library.switched_off() if off else torch.enable_grad():
            loss = model.losses(batch)["cross_entropy"][0]
            loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)
    torch.manual_seed(12)
    assert float(model.losses(batch)["cross_entropy"][0].detach()) != float(found[0][0])
