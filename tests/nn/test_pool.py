"""Pooling gives every sequence what it gives the sequence alone, whatever else is in the run."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from unpad.batching.batch import to_padded
from unpad.batching.layout import Layout, PaddedLayout, build_layout
from unpad.nn.segments import AttentionPool, reduce_runs, segment_mean, segment_sum

Pool = Callable[[Tensor, Layout | PaddedLayout], Tensor]
LENGTHS = [5, 0, 1, 300, 0, 17]
WIDTH = 8


def attention_pool(dtype: torch.dtype = torch.float64) -> AttentionPool:
    torch.manual_seed(1)
    pool = AttentionPool(WIDTH, 2)
    for parameter in pool.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=dtype)
    return pool


def pools() -> dict[str, Pool]:
    return {"sum": segment_sum, "mean": segment_mean, "attention": attention_pool()}


def flat_run(lengths: list[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Layout]:
    torch.manual_seed(2)
    return torch.randn(sum(lengths), WIDTH, dtype=dtype), build_layout(np.array(lengths, np.int64))


def by_definition(name: str, x: Tensor) -> Tensor:
    """What one sequence (length, width) pools into, (width,)."""
    if len(x) == 0:
        return x.new_zeros(WIDTH)
    if name == "sum":
        return x.sum(0)
    if name == "mean":
        return x.mean(0)
    pool = attention_pool()
    weights = (x @ pool.query.weight.T / math.sqrt(WIDTH)).softmax(0)  # (length, heads)
    return torch.einsum("lh,lhd->hd", weights, (x @ pool.to_value.weight.T).unflatten(1, (2, 4))).flatten()


@pytest.mark.parametrize("name", pools())
def test_a_pool_of_many_sequences_is_the_definition_for_each(name):
    x, layout = flat_run(LENGTHS)
    expected = torch.stack([by_definition(name, part) for part in x.split(LENGTHS)])
    torch.testing.assert_close(pools()[name](x, layout), expected, rtol=1e-12, atol=1e-12)
    for side in ("left", "right"):
        padded, mask = to_padded(x, layout, side, pad_to=310, fill=math.nan)
        got = pools()[name](padded.flatten(0, 1), PaddedLayout(mask))
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", [LENGTHS, [], [0, 0]])
def test_the_sum_of_accelerators_is_that_of_the_processor(lengths):
    x, layout = flat_run(lengths)
    here, there = x.clone().requires_grad_(), x.clone().requires_grad_()
    sums = segment_sum(here, layout), reduce_runs(there, "sum", layout.lengths())
    torch.testing.assert_close(*sums, rtol=1e-12, atol=1e-12)
    for total in sums:
        total.square().sum().backward()
    torch.testing.assert_close(here.grad, there.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", pools())
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_what_is_empty_pools_into_zeros_and_passes_gradients(name, lengths):
    x, layout = flat_run(lengths)
    x.requires_grad_()
    pooled = pools()[name](x, layout)
    assert torch.equal(pooled, torch.zeros(len(lengths), WIDTH, dtype=torch.float64))
    pooled.sum().backward()
    assert x.grad.shape == (0, WIDTH)


@pytest.mark.parametrize("name", pools())
def test_gradients_equal_finite_differences(name):
    pool, layout = pools()[name], build_layout(np.array([3, 1, 0, 4]))
    torch.manual_seed(3)
    x = torch.randn(8, WIDTH, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: pool(x, layout), x)
    padded, mask = to_padded(x.detach(), layout, "left", pad_to=5)
    assert gradcheck(lambda x: pool(x, PaddedLayout(mask)), padded.flatten(0, 1).requires_grad_())


@pytest.mark.parametrize("name", pools())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_does_not_change_another_by_a_bit(name, dtype):
    pool = attention_pool(dtype) if name == "attention" else pools()[name]
    x, layout = flat_run(LENGTHS, dtype)
    before = pool(x, layout)
    changed = x.clone()
    changed[6:306] *= 1000  # the sequence of 300
    after = pool(changed, layout)
    others = [0, 1, 2, 4, 5]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[3], after[3])


def test_low_precision_is_summed_in_fp32_and_fp64_stays():
    x = torch.ones(4097, WIDTH, dtype=torch.bfloat16)  # a number that bf16 does not have
    layout = build_layout(np.array([4097]))
    torch.testing.assert_close(segment_sum(x, layout), torch.full((1, WIDTH), 4097.0), rtol=0, atol=0)
    torch.testing.assert_close(segment_mean(x, layout), torch.ones(1, WIDTH), rtol=0, atol=0)
    pool = attention_pool(torch.bfloat16)
    pool.to_value.weight.data = torch.eye(WIDTH, dtype=torch.bfloat16)
    torch.testing.assert_close(pool(x, layout), torch.ones(1, WIDTH))
    for name in pools():
        assert pools()[name](*flat_run(LENGTHS)).dtype == torch.float64
