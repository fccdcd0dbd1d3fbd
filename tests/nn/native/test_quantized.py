"""Weights of 8 bits: the rules of rounding, and the tensor that stands for such a weight in a model."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.conftest import random_sequences, tiny_model
from tests.helpers.paths import PATHS, needs_kernels, on
from tests.helpers.quantized import quantized
from unpad.batching.batch import from_sequences
from unpad.nn.linear import Linear, independent_rows, keep_copies, product
from unpad.nn.native import library
from unpad.nn.native.quantized import QuantizedWeight, plain_copy, to_int8

pytestmark = pytest.mark.promise("models.quantized")
SIZES = [(64, 40), (32, 1), (1120, 17), (96, 16)]  # inputs and outputs


def random_weight(width: int, outputs: int) -> Tensor:
    """Rows of very different sizes, one of zeros, one too small for a scale."""
    torch.manual_seed(0)
    weight = torch.randn(outputs, width) * torch.logspace(-3, 1, outputs)[:, None]
    if outputs > 3:
        weight[1], weight[2] = 0, weight[2] / weight[2].abs().max() * 2.1e-43
    return weight


def packed(weight: Tensor) -> QuantizedWeight:
    return QuantizedWeight.pack(*to_int8(weight))


def widened(numbers: Tensor, scales: Tensor) -> Tensor:
    return numbers * scales[:, None]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_int8_is_off_by_half_a_scale_and_its_numbers_fill_the_range(sizes):
    weight = random_weight(*sizes)
    numbers, scales = to_int8(weight)
    assert (numbers.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (len(weight),))
    away = (widened(numbers, scales) - weight).abs()
    assert (away <= 0.51 * weight.abs().amax(1, keepdim=True) / 127 + 1e-40).all()
    assert (numbers.abs().amax(1)[scales > 0] == 127).all()
    assert len(weight) <= 3 or scales[1:3].tolist() == [0, 0]
    assert torch.equal(to_int8(widened(numbers, scales))[0], numbers)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_who_looks_at_a_quantized_weight_sees_the_widened_one(sizes):
    weight = random_weight(*sizes)
    numbers, scales = to_int8(weight)
    expected = widened(numbers, scales)
    held = torch.nn.Parameter(QuantizedWeight.pack(numbers, scales), requires_grad=False)
    assert type(held) is QuantizedWeight
    assert (held.shape, held.dtype, held.requires_grad) == (weight.shape, torch.float32, False)
    assert torch.equal(held + 0, expected)
    assert torch.equal(held.t().contiguous(), expected.T)
    assert torch.equal(held.double(), expected.double())
    index = torch.tensor([[0, len(weight) - 1], [len(weight) // 2, 0]])
    assert torch.equal(F.embedding(index, held), expected[index])
    assert type(copy.deepcopy(held)) is QuantizedWeight
    assert held.numbers.nbytes + held.scales.nbytes < 0.32 * weight.nbytes or len(weight) % 16
    with pytest.raises(AssertionError, match="would change"):
        held.mul_(2)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_linear_layer_multiplies_by_quantized_weights(dtype, path):
    torch.manual_seed(0)
    layer, x = Linear(1120, 37), torch.randn(70, 1120).to(dtype)
    weight = packed(layer.weight.detach())
    expected = F.linear(x.float(), weight.widened(), layer.bias)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    with on(path), torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = layer(x)
        assert y.dtype == dtype
        # Activations are rounded to 1 / 254 of their largest.
        torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.02)
        with keep_copies(), independent_rows():
            most = layer(x)
            for num_rows in (*range(1, 36), 64, 65):
                assert torch.equal(layer(x[:num_rows]), most[:num_rows]), num_rows
            assert torch.equal(most, y)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_has_the_same_bits_with_and_without_kernels(dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(70, 3000).to(dtype), packed(torch.randn(37, 3000))
    with torch.no_grad():
        native = product(x, weight)
        with library.switched_off():
            assert torch.equal(product(x, weight), native)


def test_a_gradient_of_activations_passes_a_quantized_weight():
    torch.manual_seed(0)
    x, weight = torch.randn(3, 64, requires_grad=True), packed(torch.randn(5, 64))
    product(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.widened().sum(0).expand(3, -1))


def test_a_plain_copy_of_a_quantized_model_computes_nearly_the_same():
    model = quantized(tiny_model(torch.float32, width=64, hidden=64, dropout=0.0)).eval()
    assert any(isinstance(weight, QuantizedWeight) for weight in model.parameters())
    plain = plain_copy(model)
    assert not any(isinstance(weight, QuantizedWeight) for weight in plain.parameters())
    assert all(map(torch.equal, plain.state_dict().values(), (w + 0 for w in model.state_dict().values())))
    batch = from_sequences(random_sequences([5, 9]))
    with torch.no_grad():
        torch.testing.assert_close(model(batch), plain(batch), rtol=0.1, atol=0.1)
