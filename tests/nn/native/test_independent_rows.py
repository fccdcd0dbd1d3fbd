"""What the kernels of every target give a row, or the beginning of a sequence, has the same bits whatever is beside it
or follows it."""

import pytest
import torch

from tests.helpers.grid import pairs
from tests.helpers.paths import needs_kernels
from tests.helpers.targets import able, has, running
from unpad.batching.layout import Layout
from unpad.nn.attend import Attend
from unpad.nn.attention import self_attention
from unpad.nn.linear import rowwise_linear
from unpad.nn.native import library
from unpad.nn.native.quantized import QuantizedWeight, multiply_int8, to_int8

pytestmark = [needs_kernels, pytest.mark.promise("llm.generation")]

MOST_ROWS = 300
TARGETS = [target for target in able() if target != "avx512_amx"]  # its other functions are those of avx512_bf16
FLOATS = [(target, torch.float32) for target in TARGETS]
FLOATS += [("avx512_bf16", torch.bfloat16)] * ("avx512_bf16" in TARGETS)
DOUBLES = [(target, torch.float64) for target in TARGETS]
BY_TILES = [(target, torch.bfloat16) for target in (library.PLAIN_TILES, "avx512_amx") if has(target)]
# Inputs and outputs with whole and partial vectors; rows of the last are computed in several blocks.
SIZES = [(1, 3), (70, 37), (256, 32), (3000, 5)]


@pytest.mark.parametrize(("kernels", "sizes", "threads"), pairs(FLOATS + DOUBLES, SIZES, [1, 2]))
def test_every_number_of_rows_gives_the_rows_of_the_most(kernels, sizes, threads):
    torch.manual_seed(0)
    target, dtype = kernels
    width, outputs = sizes
    counts = range(1, MOST_ROWS + 1) if width < 1000 else (1, 2, 3, 20, 21, 43, 44, 87, 170, 299)
    x, weight = torch.randn(MOST_ROWS, width).to(dtype), torch.randn(outputs, width).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    order = torch.randperm(MOST_ROWS)
    with running(target):
        most = rowwise_linear(x, weight, bias)
        torch.set_num_threads(threads)
        for num_rows in counts:
            assert torch.equal(rowwise_linear(x[:num_rows], weight, bias), most[:num_rows]), num_rows
        assert torch.equal(rowwise_linear(x[order], weight, bias), most[order])


QUANTIZED_SIZES = [(1, 3), (70, 37), (256, 32), (3008, 21)]


@pytest.mark.parametrize("sizes", QUANTIZED_SIZES, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_every_number_of_rows_gives_the_rows_of_the_most_for_quantized_weights(target, sizes):
    """On every target, for any number of threads, and without kernels: sums are whole numbers."""
    torch.manual_seed(0)
    width, outputs = sizes
    x, weight = torch.randn(MOST_ROWS, width), torch.randn(outputs, width)
    x[7], x[8] = 0, x[8].sign() * 100  # sums of whole rows of the largest numbers
    weight[0] = x[8].sign()
    held = QuantizedWeight.pack(*to_int8(weight))
    order, counts = torch.randperm(MOST_ROWS), range(1, MOST_ROWS + 1)
    assert held.scales[0] * 127 == 1
    with running(target):
        most = held.native(x)
        assert torch.equal(most, multiply_int8(x, held.whole(), held.scales))
        assert most[8, 0] == 100 * width
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for num_rows in counts if width < 1000 and threads == 1 else (1, 2, 5, 6, 7, 9, 43, 299):
                assert torch.equal(held.native(x[:num_rows]), most[:num_rows]), num_rows
            assert torch.equal(held.native(x[order]), most[order])


@pytest.mark.parametrize("target", TARGETS)
def test_a_row_that_is_not_finite_spoils_its_own_results_alone(target):
    torch.manual_seed(0)
    weight = torch.randn(20, 64)
    x = torch.randn(9, 64)
    x[1, 5], x[3, 63], x[5, 0] = torch.nan, torch.inf, -torch.inf
    x[7] *= 1e-40  # too small for the inverse of its scale
    bad, good = [1, 3, 5], [0, 2, 4, 6, 7, 8]
    held = QuantizedWeight.pack(*to_int8(weight))
    with running(target):
        y = held.native(x)
        assert not y[bad].isfinite().any()
        assert torch.equal(y[good], held.native(x[good]))
        assert y[good].isfinite().all()
        assert torch.equal(y[good], multiply_int8(x, held.whole(), held.scales)[good])


# With the second scale scores are near 2^100: some rows need a shift before exponentiation and others do not. Not in
# fp64, which is for proofs: there the compiler joins products and sums in tiles of some heights only.
@pytest.mark.parametrize(
    ("kernels", "sizes", "window", "scale"),
    pairs(FLOATS + BY_TILES, [(4, 4, 64), (4, 2, 32)], [None, 100], [1.0, 2.7, 40.0]),
)
def test_a_prefix_has_the_same_bits_whatever_follows(kernels, sizes, window, scale):
    (target, dtype), (heads, kv_heads, head_dim) = kernels, sizes
    torch.manual_seed(0)
    qkv = (torch.randn(330, heads + 2 * kv_heads, head_dim) * scale).to(dtype)

    def first(length: int) -> torch.Tensor:
        layout = Layout(torch.tensor([0, length], dtype=torch.int32), length)
        return self_attention(qkv[:length], layout, heads, Attend(window=window))

    with torch.inference_mode(), running(target):
        whole = first(len(qkv))
        assert whole.isfinite().all()
        for length in range(1, len(qkv), 13):
            assert torch.equal(first(length), whole[:length]), length
