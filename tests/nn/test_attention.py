"""Every kernel of torch behind `self_attention` agrees with the definition, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.batching.layout import Layout, PaddedLayout, build_layout
from unpad.nn import kernel
from unpad.nn.attention import reference_attention, self_attention
from unpad.nn.native import library


def inputs(lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(sum(lengths))
    total = sum(lengths)
    shapes = [(total, heads, dim), (total, kv_heads, dim), (total, kv_heads, dim), (total, heads, dim)]
    return [torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_(i < 3) for i, s in enumerate(shapes)]


def torch_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout | PaddedLayout, causal: bool
) -> torch.Tensor:
    with library.switched_off():
        return self_attention(torch.cat([q, k, v], 1), layout, q.shape[1], causal)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    causal=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 4]),
)
def test_groups_equal_the_definition(lengths: list[int], causal: bool, kv_heads: int) -> None:
    layout = build_layout(np.array(lengths))
    q, k, v, grad = inputs(lengths, 4, kv_heads, 8, torch.float64)
    expected = reference_attention(q, k, v, layout, causal)
    wanted = torch.autograd.grad(expected, [q, k, v], grad)
    got = torch_attention(q, k, v, layout, causal)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    if got.numel():
        for a, b in zip(torch.autograd.grad(got, [q, k, v], grad), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=5),
    causal=st.booleans(),
    kv_heads=st.sampled_from([1, 4]),
)
def test_a_rectangle_with_real_cells_anywhere_equals_the_definition(
    rows: list[list[bool]], causal: bool, kv_heads: int
) -> None:
    """Left, right and both-sided padding, gaps and empty rows are all the same mask to it."""
    mask = torch.tensor(rows)
    real = mask.flatten()
    q, k, v, _ = inputs([mask.numel()], 4, kv_heads, 8, torch.float64)
    layout = build_layout(mask.sum(1).numpy())
    expected = reference_attention(q[real], k[real], v[real], layout, causal)
    got = torch_attention(q, k, v, PaddedLayout(mask), causal)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got[real], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("limit", [512, 0])
def test_both_bf16_kernels_stay_within_bf16_of_the_definition(
    causal: bool, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "MATMUL_MAX_LENGTH", limit)
    lengths = [70, 3, 65, 64, 1, 20]
    layout = build_layout(np.array(lengths))
    low = inputs(lengths, 4, 2, 16, torch.bfloat16)
    high = [x.detach().double().requires_grad_(i < 3) for i, x in enumerate(low)]
    expected = reference_attention(*high[:3], layout, causal)
    got = torch_attention(*low[:3], layout, causal)
    assert (got.double() - expected).norm() <= 0.01 * expected.norm()
    wanted = torch.autograd.grad(expected, high[:3], high[3])
    for a, b in zip(torch.autograd.grad(got, low[:3], low[3]), wanted, strict=True):
        assert (a.double() - b).norm() <= 0.012 * b.norm()


def test_no_quadratic_tensor_is_made_for_a_long_sequence() -> None:
    length = 4096
    layout = build_layout(np.array([length]))
    q, k, v, _ = inputs([length], 1, 1, 16, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (_small(t, length), t)[1], lambda t: t):
        torch_attention(q, k, v, layout, True).sum().backward()


def _small(tensor: torch.Tensor, length: int) -> None:
    assert tensor.numel() < length * length, f"a tensor of shape {tuple(tensor.shape)} is kept for backward"
