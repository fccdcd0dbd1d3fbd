"""Weights of 8 and 4 bits: the rules of rounding, and tensors that stand for such weights in a model."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.conftest import random_sequences, tiny_model
from tests.helpers.paths import PATHS, on
from tests.helpers.quantized import quantized
from unpad.batching.batch import from_sequences
from unpad.nn.linear import Linear, independent_rows, keep_copies, product
from unpad.nn.native import library
from unpad.nn.native import quantized as quantizeds

pytestmark = pytest.mark.promise("models.quantized")
KINDS: tuple[quantizeds.Kind, ...] = ("int8", "int4")
SIZES = [(64, 40), (32, 1), (1120, 17), (96, 16)]  # inputs and outputs


def random_weight(width: int, outputs: int) -> Tensor:
    """Rows of very different sizes, one of zeros, one too small for fp16."""
    torch.manual_seed(0)
    weight = torch.randn(outputs, width) * torch.logspace(-3, 1, outputs)[:, None]
    if outputs > 3:
        weight[1], weight[2] = 0, weight[2] * 1e-10
    return weight


def packed(weight: Tensor, kind: quantizeds.Kind) -> quantizeds.QuantizedWeight:
    return quantizeds.PACKED[kind].pack(*(quantizeds.to_int8(weight) if kind == "int8" else quantizeds.to_int4(weight)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16], ids=str)
def test_int8_is_off_by_half_a_scale_and_its_numbers_fill_the_range(sizes, scale_dtype):
    weight = random_weight(*sizes)
    numbers, scales = quantizeds.to_int8(weight, scale_dtype)
    assert (numbers.dtype, scales.dtype, scales.shape) == (torch.int8, scale_dtype, (len(weight),))
    away = (quantizeds.from_int8(numbers, scales) - weight).abs()
    assert (away <= 0.51 * weight.abs().amax(1, keepdim=True) / 127 + 1e-6 * (scale_dtype == torch.float16)).all()
    assert (numbers.abs().amax(1)[scales > 0] == 127).all()
    again = quantizeds.to_int8(quantizeds.from_int8(numbers, scales), scale_dtype)
    assert torch.equal(again[0], numbers)
    assert scale_dtype == torch.float32 or torch.equal(again[1], scales)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_int4_is_q4_0_of_gguf(sizes):
    gguf = pytest.importorskip("gguf")
    weight = random_weight(*sizes)
    numbers, scales = quantizeds.to_int4(weight)
    assert (numbers.shape, scales.shape) == ((len(weight), sizes[0] // 2), (len(weight), sizes[0] // quantizeds.GROUP))
    blocks = torch.cat(
        [scales[..., None].view(torch.uint8), numbers.unflatten(1, (-1, quantizeds.GROUP // 2))], 2
    ).flatten(1)
    read = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.Q4_0)
    assert torch.equal(torch.from_numpy(read), quantizeds.from_int4(numbers, scales))
    of_groups = quantizeds.int4_numbers(numbers).unflatten(1, (-1, quantizeds.GROUP))
    assert (of_groups.amin(2)[scales != 0] == 0).all(), "the farthest from zero is at -8"
    most = weight.unflatten(1, (-1, quantizeds.GROUP)).abs().amax(2, keepdim=True)
    away = (
        quantizeds.from_int4(numbers, scales).unflatten(1, (-1, quantizeds.GROUP))
        - weight.unflatten(1, (-1, quantizeds.GROUP))
    ).abs()
    assert (away <= most / 8 * 1.01 + 4e-6).all()  # 8 itself, beyond the range, is off by a whole scale
    assert all(map(torch.equal, quantizeds.to_int4(quantizeds.from_int4(numbers, scales)), (numbers, scales)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_who_looks_at_a_quantized_weight_sees_the_widened_one(kind, sizes):
    weight = random_weight(*sizes)
    numbers, scales = quantizeds.to_int8(weight) if kind == "int8" else quantizeds.to_int4(weight)
    expected = quantizeds.from_int8(numbers, scales) if kind == "int8" else quantizeds.from_int4(numbers, scales)
    held = torch.nn.Parameter(quantizeds.PACKED[kind].pack(numbers, scales), requires_grad=False)
    assert type(held) is quantizeds.PACKED[kind]
    assert (held.shape, held.dtype, held.requires_grad) == (weight.shape, torch.float32, False)
    assert torch.equal(held + 0, expected)
    assert torch.equal(held.t().contiguous(), expected.T)
    assert torch.equal(held.double(), expected.double())
    index = torch.tensor([[0, len(weight) - 1], [len(weight) // 2, 0]])
    assert torch.equal(F.embedding(index, held), expected[index])
    assert type(copy.deepcopy(held)) is quantizeds.PACKED[kind]
    assert held.num_bytes < (0.32 if kind == "int8" else 0.17) * weight.nbytes or len(weight) % 16
    with pytest.raises(AssertionError, match="would change"):
        held.mul_(2)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_layer_multiplies_by_quantized_weights(kind, dtype, path):
    torch.manual_seed(0)
    layer, x = Linear(1120, 37), torch.randn(70, 1120).to(dtype)
    weight = packed(layer.weight.detach(), kind)
    expected = F.linear(x.float(), weight.widened(), layer.bias)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    with on(path), torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = layer(x)
        assert y.dtype == dtype
        # int8 rounds activations to 1 / 254 of their largest.
        torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.02)
        with keep_copies(), independent_rows():
            most = layer(x)
            for num_rows in (*range(1, 36), 64, 65):
                assert torch.equal(layer(x[:num_rows]), most[:num_rows]), num_rows
            assert kind == "int4" or torch.equal(most, y)


@pytest.mark.skipif(not library.enabled(), reason=library.describe())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_has_the_same_bits_with_and_without_kernels(dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(70, 3000).to(dtype), packed(torch.randn(37, 3000), "int8")
    with torch.no_grad():
        native = product(x, weight)
        with library.switched_off():
            assert torch.equal(product(x, weight), native)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_activations_passes_a_quantized_weight(kind):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 64, requires_grad=True), packed(torch.randn(5, 64), kind)
    product(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.widened().sum(0).expand(3, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_copy_of_a_quantized_model_computes_nearly_the_same(kind):
    model = quantized(tiny_model(torch.float32, width=64, hidden=64, dropout=0.0), kind).eval()
    kinds = {type(weight) for weight in model.parameters()}
    assert kinds >= ({quantizeds.Int8Weight} if kind == "int8" else {quantizeds.Int8Weight, quantizeds.Int4Weight})
    plain = quantizeds.plain_copy(model)
    assert not any(isinstance(weight, quantizeds.QuantizedWeight) for weight in plain.parameters())
    assert all(map(torch.equal, plain.state_dict().values(), (w + 0 for w in model.state_dict().values())))
    batch = from_sequences(random_sequences([5, 9]))
    with torch.no_grad():
        torch.testing.assert_close(model(batch), plain(batch), rtol=0.1, atol=0.1)
