"""Low-precision copies of weights are never older than the weights."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.conftest import random_batch, tiny_model
from unpad.native import library
from unpad.nn.linear import Linear, computing_copy, keep_copies, kept_copy, parameters_changed
from unpad.objective import WEIGHTS
from unpad.optim import make_optimizer
from unpad.recipe import Optim
from unpad.step import train_step

BF16 = torch.bfloat16


def test_values_and_gradients_are_those_of_autocast() -> None:
    torch.manual_seed(0)
    layer, x = Linear(16, 24), torch.randn(9, 16)
    grad = torch.randn(9, 24).to(BF16)
    found = []
    for linear in (layer, lambda x: F.linear(x, layer.weight, layer.bias)):
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", BF16):
            y = linear(inputs)
        found.append((y, *torch.autograd.grad(y, [inputs, layer.weight, layer.bias], grad)))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)
        assert got.dtype == wanted.dtype


def test_without_low_precision_it_is_the_plain_layer() -> None:
    layer, x = Linear(4, 3).double(), torch.randn(5, 4, dtype=torch.float64)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_a_copy_is_made_anew_when_its_parameter_changes() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 3))
    with keep_copies():
        first = computing_copy(weight, BF16)
        assert computing_copy(weight, BF16) is first is kept_copy(weight, BF16)
        with torch.no_grad():
            weight.mul_(2)
        assert computing_copy(weight, BF16).tolist() == [[2.0] * 3] * 3
        weight.data.fill_(3)  # behind autograd's back
        parameters_changed([weight])
        assert computing_copy(weight, BF16).tolist() == [[3.0] * 3] * 3
        assert computing_copy(weight, torch.float16).dtype == torch.float16
    weight.data.fill_(4)
    assert computing_copy(weight, BF16).tolist() == [[4.0] * 3] * 3, "nothing is kept outside"
    assert kept_copy(weight, BF16) is None


def test_a_copy_made_for_inference_can_be_trained_with() -> None:
    layer, x = Linear(4, 3), torch.randn(2, 4)
    with keep_copies(), torch.autocast("cpu", BF16):
        with torch.inference_mode():
            layer(x)
        layer(x).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("native", [True, False])
def test_copies_follow_every_update_of_the_optimizer(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if native and not library.enabled():
        pytest.skip("no native kernels here")
    monkeypatch.setattr(library, "_switched_off", not native)
    model, batch = tiny_model(torch.float32), random_batch([5, 9])
    optimizer = make_optimizer(model, Optim(lr=1e-2))
    for _ in range(3):
        train_step(model, [batch], optimizer, weights=WEIGHTS, precision="bf16", clip=1.0)
        with keep_copies(optimizer):
            copies = {name: kept_copy(p, BF16) for name, p in model.named_parameters()}
            assert sum(copy is not None for copy in copies.values()) > 4
            for name, parameter in model.named_parameters():
                if copies[name] is not None:
                    assert torch.equal(computing_copy(parameter, BF16), parameter.to(BF16)), name
                    assert computing_copy(parameter, BF16) is copies[name]
