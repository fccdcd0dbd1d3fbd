"""Low-precision copies of weights are never older than the weights."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conftest import random_batch, tiny_model
from tests.helpers.paths import needs_kernels
from unpad.models.contract import WEIGHTS
from unpad.nn import block, linear
from unpad.nn.linear import Linear, apart, computing_copy, keep_copies, round_rows
from unpad.nn.native import library
from unpad.nn.norm import Norm
from unpad.recipes.training import OptimSettings
from unpad.training.optim import make_optimizer
from unpad.training.step import train_step

BF16 = torch.bfloat16


@pytest.mark.parametrize("num_rows", [0, 1, 9, 16, 129, 1000])
def test_values_and_gradients_are_those_of_autocast(num_rows):
    torch.manual_seed(0)
    layer, x = Linear(16, 24), torch.randn(num_rows, 16)
    grad = torch.randn(num_rows, 24).to(BF16)
    found = []
    for product in (layer, lambda x: F.linear(x, layer.weight, layer.bias)):
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", BF16):
            y = product(inputs)
        found.append((y, *torch.autograd.grad(y, [inputs, layer.weight, layer.bias], grad)))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02 * max(1, num_rows**0.5 / 3))
        assert got.dtype == wanted.dtype


def test_numbers_of_rows_come_again():
    completed = [len(round_rows(torch.zeros(num_rows, 1))) for num_rows in range(3000)]
    assert len(set(completed)) < 60
    for num_rows, rows in enumerate(completed):
        assert num_rows <= rows <= max(num_rows * 9 / 8, num_rows + 15)
    assert len(round_rows(torch.zeros(2048, 1))) == 2048
    assert torch.equal(round_rows(torch.ones(17, 2)), F.pad(torch.ones(17, 2), (0, 0, 0, 15)))


def test_without_low_precision_it_is_the_plain_layer():
    layer, x = Linear(4, 3).double(), torch.randn(5, 4, dtype=torch.float64)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_a_bias_stays_apart_only_where_a_kernel_of_the_same_precision_adds_it():
    class Wrapped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = layer(x) + 1
            return out

    layer, x = Linear(4, 3), torch.randn(5, 4)
    product, bias = apart(layer, x)
    if library.enabled():
        assert bias is layer.bias
        assert torch.equal(product, x @ layer.weight.t())
    with library.switched_off():
        assert apart(layer, x)[1] is None
    with torch.no_grad():
        assert apart(layer, x)[1] is None
    with torch.autocast("cpu", BF16):
        low, none = apart(layer, x)
        assert none is None
        assert torch.equal(low, layer(x))
    assert torch.equal(apart(Wrapped(), x)[0], layer(x) + 1)
    assert apart(Linear(4, 3, bias=False), x)[1] is None


@needs_kernels
def test_biases_apart_change_no_gradient_of_a_model(monkeypatch):
    batch, found, calls = random_batch([9, 5, 30]), [], []

    def whole(layer: Linear, x: Tensor) -> tuple[Tensor, None]:
        calls.append(layer)
        return layer(x), None

    for replaced in (apart, whole):
        monkeypatch.setattr(block, "apart", replaced)
        torch.manual_seed(1)
        model = tiny_model(bias=True, activation="gelu")
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
        model.losses(batch)["cross_entropy"][0].backward()
        found.append([p.grad for p in model.parameters()])
    assert len(calls) == 2 * len(model.blocks)
    torch.testing.assert_close(*found)


@pytest.mark.promise("speed.copies")
def test_a_copy_is_made_anew_when_its_parameter_changes():
    weight = nn.Parameter(torch.ones(3, 3))
    with keep_copies():
        first = computing_copy(weight, BF16)
        assert computing_copy(weight, BF16) is first
        with torch.no_grad():
            weight.mul_(2)
        assert computing_copy(weight, BF16).tolist() == [[2.0] * 3] * 3
        weight.data.fill_(3)  # behind autograd's back
        torch.autograd.graph.increment_version([weight])
        assert computing_copy(weight, BF16).tolist() == [[3.0] * 3] * 3
        assert computing_copy(weight, torch.float16).dtype == torch.float16
    weight.data.fill_(4)
    assert computing_copy(weight, BF16).tolist() == [[4.0] * 3] * 3, "nothing is kept outside"


def test_copies_are_there_again_as_long_as_their_owner():
    weight, owner, other = nn.Parameter(torch.ones(3, 3)), nn.Identity(), nn.Identity()
    found = []
    for who in (owner, owner, other):
        with torch.inference_mode(), keep_copies(who):
            found.append(computing_copy(weight, BF16))
    assert found[0] is found[1]
    assert found[0] is not found[2]


@pytest.mark.promise("speed.copies")
def test_copies_follow_every_update_of_the_optimizer():
    """As where a text is generated meanwhile; torch's fused optimizers do not tell autograd that they write."""
    model, batch, owner = tiny_model(torch.float32), random_batch([5, 9]), nn.Identity()
    optimizer = make_optimizer(model, OptimSettings(lr=1e-2))
    for _ in range(3):
        with torch.inference_mode(), keep_copies(owner):
            for name, parameter in model.named_parameters():
                copy = computing_copy(parameter, BF16)
                assert torch.equal(copy, parameter.to(BF16)), name
                assert computing_copy(parameter, BF16) is copy
        assert train_step(model, [batch], optimizer, weights=WEIGHTS, precision="bf16", clip=1.0).updated


class Quantized(torch.Tensor):
    """Stands for weights in another form than numbers in memory."""


@needs_kernels
def test_kernels_get_no_address_of_a_weight_that_is_not_its_memory():
    layer, norm, x = Linear(16, 24), Norm("rmsnorm", 16, 1e-6), torch.randn(3, 16)
    with torch.no_grad(), linear.independent_rows():
        wanted = layer(x), norm(x)[1]
        for module in (layer, norm):
            module.weight = nn.Parameter(module.weight.as_subclass(Quantized))
            assert not library.is_plain(module.weight)
        calls: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear, "rowwise_linear", lambda *_: calls.append("linear"))
            patch.setattr("unpad.nn.norm.add_norm", lambda *_, **__: calls.append("norm"))
            found = layer(x), norm(x)[1]
    assert calls == []
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.as_subclass(torch.Tensor), right, rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError, match="a Quantized has none of its own"):
        library.pointer(layer.weight)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_a_frozen_weight_in_bf16_computes_as_its_copy_does(num_rows):
    torch.manual_seed(0)
    layer, x = Linear(16, 24).requires_grad_(False), torch.randn(num_rows, 16)
    low = Linear(16, 24).requires_grad_(False).bfloat16()
    low.load_state_dict(layer.state_dict())
    for grad in (False, True):
        found = []
        for one in (layer, low):
            inputs = x.clone().requires_grad_(grad)
            with torch.set_grad_enabled(grad), torch.autocast("cpu", BF16):
                y = one(inputs)
            found.append((y, *(torch.autograd.grad(y.sum(), inputs) if grad else ())))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("recasts", [False, True])
def test_a_layer_that_recasts_keeps_no_copy_of_its_weight_and_has_the_same_gradients(recasts):
    torch.manual_seed(0)
    layer, x, kept = Linear(16, 24), torch.randn(9, 16), list[Tensor]()
    expected = gradients_in_bf16(layer, x)
    layer.recasts = recasts
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        found = gradients_in_bf16(layer, x)
    weights = [tensor for tensor in kept if tensor.shape == layer.weight.shape]
    assert [tensor.dtype for tensor in weights] == [torch.float32 if recasts else BF16]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def gradients_in_bf16(layer: Linear, x: Tensor) -> tuple[Tensor, ...]:
    inputs = x.clone().requires_grad_()
    with torch.autocast("cpu", BF16):
        y = layer(inputs)
    return torch.autograd.grad(y.float().square().sum(), [inputs, *layer.parameters()])
