"""Every kernel of torch behind `self_attention` agrees with the definition, forward and backward."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.attention_cases import SEED, Case, definition
from tests.helpers.grid import pairs
from tests.helpers.largest import Largest
from unpad.batching.layout import Layout, PaddedLayout, build_layout
from unpad.nn import attention, kernel
from unpad.nn.attend import Attend
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
        return self_attention(torch.cat([q, k, v], 1), layout, q.shape[1], Attend(causal))


@pytest.mark.promise("batch.any-mask", "batch.attention")
@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    causal=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 4]),
)
def test_groups_equal_the_definition(lengths, causal, kv_heads):
    layout = build_layout(np.array(lengths))
    q, k, v, grad = inputs(lengths, 4, kv_heads, 8, torch.float64)
    expected = reference_attention(q, k, v, layout, Attend(causal))
    wanted = torch.autograd.grad(expected, [q, k, v], grad)
    got = torch_attention(q, k, v, layout, causal)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    if got.numel():
        torch.testing.assert_close(torch.autograd.grad(got, [q, k, v], grad), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True], ids=["fused", "weighted"])
@settings(deadline=None, max_examples=20)
@given(rows=st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=5), window=st.integers(1, 9))
def test_a_window_hides_what_is_further_back_in_every_layout(weighted, rows, window):
    mask = torch.tensor(rows)
    real = mask.flatten()
    layout = build_layout(mask.sum(1).numpy())
    q, k, v, grad = inputs([mask.numel()], 4, 2, 16, torch.float64)
    expected = reference_attention(q[real], k[real], v[real], layout, Attend(window=window))
    wanted = torch.autograd.grad(expected, [q, k, v], grad[real]) if real.any() else ()
    for x, inside in ((torch.cat([q, k, v], 1)[real], layout), (torch.cat([q, k, v], 1), PaddedLayout(mask))):
        with kernel.as_weighted() if weighted else nullcontext():
            got = self_attention(x, inside, 4, Attend(window=window))
        got = got if inside is layout else got[real]
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        for a, b in zip(torch.autograd.grad(got, [q, k, v], grad[real]) if wanted else (), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.promise("batch.any-mask")
@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=5),
    causal=st.booleans(),
    kv_heads=st.sampled_from([1, 4]),
)
def test_a_rectangle_with_real_cells_anywhere_equals_the_definition(rows, causal, kv_heads):
    """Left, right and both-sided padding, gaps and empty rows are all the same mask to it."""
    mask = torch.tensor(rows)
    real = mask.flatten()
    q, k, v, _ = inputs([mask.numel()], 4, kv_heads, 8, torch.float64)
    expected = reference_attention(q[real], k[real], v[real], build_layout(mask.sum(1).numpy()), Attend(causal))
    got = torch_attention(q, k, v, PaddedLayout(mask), causal)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got[real], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("limit", [512, 0])
def test_both_bf16_kernels_stay_within_bf16_of_the_definition(causal, limit, monkeypatch):
    monkeypatch.setattr(kernel, "MATMUL_MAX_LENGTH", limit)
    lengths = [70, 3, 65, 64, 1, 20]
    layout = build_layout(np.array(lengths))
    low = inputs(lengths, 4, 2, 16, torch.bfloat16)
    high = [x.detach().double().requires_grad_(i < 3) for i, x in enumerate(low)]
    expected = reference_attention(*high[:3], layout, Attend(causal))
    got = torch_attention(*low[:3], layout, causal)
    assert (got.double() - expected).norm() <= 0.01 * expected.norm()
    wanted = torch.autograd.grad(expected, high[:3], high[3])
    for a, b in zip(torch.autograd.grad(got, low[:3], low[3]), wanted, strict=True):
        assert (a.double() - b).norm() <= 0.012 * b.norm()


@pytest.mark.promise("batch.attention")
def test_no_quadratic_tensor_is_made_for_a_long_sequence():
    length = 4096
    layout = build_layout(np.array([length]))
    q, k, v, _ = inputs([length], 1, 1, 16, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (_small(t, length), t)[1], lambda t: t):
        torch_attention(q, k, v, layout, True).sum().backward()


def _small(tensor: torch.Tensor, length: int) -> None:
    assert tensor.numel() < length * length, f"a tensor of shape {tuple(tensor.shape)} is kept for backward"


# --------------------------------------------------------------------------- key bias and dropout through torch


def weighted(
    qkv: torch.Tensor, layout: Layout | PaddedLayout, causal: bool, bias: torch.Tensor | None, dropout: float
) -> torch.Tensor:
    """Four query heads on two key heads, with the seed that `_dropped` draws with."""
    with library.switched_off(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "draw", lambda: SEED)
        return self_attention(qkv, layout, 4, Attend(causal, dropout=dropout, key_bias=bias))


def by_definition(
    qkv: torch.Tensor, layout: Layout, causal: bool, bias: torch.Tensor | None, dropout: float
) -> torch.Tensor:
    return definition(Case(qkv, layout.cu_seqlens, 4, 2, causal, None, bias, dropout, qkv))


@pytest.mark.parametrize(("block", "causal", "dropout"), pairs([None, 1, 100, 10_000], [True, False], [0.0, 0.3]))
def test_key_bias_and_dropout_equal_the_definition_whole_and_in_blocks(causal, dropout, block, monkeypatch):
    if block is not None:
        monkeypatch.setattr(attention, "WHOLE_LENGTH", 10)
        monkeypatch.setattr(attention, "BLOCK_CELLS", block)
    torch.manual_seed(0)
    layout = build_layout(np.array([9, 31, 0, 30, 1, 12, 40]))
    qkv = torch.randn(123, 8, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(123, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(123, 4, 8, dtype=torch.float64)
    got, wanted = (make(qkv, layout, causal, bias, dropout) for make in (weighted, by_definition))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        *(torch.autograd.grad(out, [qkv, bias], grad) for out in (got, wanted)), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("block", [None, 50], ids=["whole", "blocks"])
@pytest.mark.parametrize("causal", [True, False])
def test_rectangles_with_empty_rows_stay_finite_with_a_key_bias(causal, block, monkeypatch):
    """A padding query that saw no key would be NaN, and so would everything that reads its cell later."""
    if block is not None:
        monkeypatch.setattr(attention, "WHOLE_LENGTH", 2)
        monkeypatch.setattr(attention, "BLOCK_CELLS", block)
    mask = torch.tensor([[False] * 6, [False] * 2 + [True] * 4, [True] * 3 + [False] * 3, [True] * 6])
    qkv = torch.randn(24, 8, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(24, dtype=torch.float64)
    got, real = weighted(qkv, PaddedLayout(mask), causal, bias, 0.0), mask.flatten()
    assert torch.isfinite(got).all()
    wanted = by_definition(qkv[real], build_layout(mask.sum(1).numpy()), causal, bias[real], 0.0)
    torch.testing.assert_close(got[real], wanted, rtol=1e-10, atol=1e-12)
    assert torch.isfinite(torch.autograd.grad(got.sum(), qkv)[0]).all()


def test_a_key_bias_below_the_digits_of_bf16_counts():
    """Scores of 8 and a bias of log 0.99: in bf16 their sum would be 8."""
    qkv = torch.zeros(2, 8, 16, dtype=torch.bfloat16)
    qkv[:, :6], qkv[0, 6:] = 2**0.5, 1  # the output is the weight of the first key
    out = weighted(qkv, build_layout(np.array([2])), False, torch.tensor([0.99, 1.0]).log(), 0.0)
    torch.testing.assert_close(out.float(), torch.full((2, 4, 16), 0.99 / 1.99), rtol=0, atol=1e-3)


@pytest.mark.promise("batch.attention")
@pytest.mark.parametrize("padded", [False, True])
def test_key_bias_and_dropout_make_no_quadratic_tensor(padded, monkeypatch):
    """Neither forward nor backward; what both keep is no larger than what they make."""
    monkeypatch.setattr(attention, "WHOLE_LENGTH", 64)
    monkeypatch.setattr(attention, "BLOCK_CELLS", 4096)
    length = 300
    layout = PaddedLayout(torch.ones(1, length, dtype=torch.bool)) if padded else build_layout(np.array([length]))
    qkv, bias = torch.randn(length, 8, 8, requires_grad=True), torch.randn(length, requires_grad=True)
    with Largest() as largest:
        weighted(qkv, layout, True, bias, 0.2).sum().backward()
    assert largest.numel <= max(4 * length, qkv.numel())


def kept_bytes(length: int) -> int:
    """Bytes that the graph of attention keeps for backward."""
    layout, sizes = build_layout(np.array([length])), dict[int, int]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    qkv, bias = torch.randn(length, 8, 8, requires_grad=True), torch.randn(length, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        weighted(qkv, layout, True, bias, 0.2)
    return sum(sizes.values())


@pytest.mark.promise("batch.attention")
def test_what_is_kept_for_backward_grows_with_the_length(monkeypatch):
    monkeypatch.setattr(attention, "WHOLE_LENGTH", 64)
    assert kept_bytes(2000) <= 2.2 * kept_bytes(1000)
