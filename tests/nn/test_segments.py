"""Operations within sequences are those of the sequences one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.samples import bounds_of
from unpad.batching.layout import build_layout
from unpad.nn.segments import segment_mean, segment_place, segment_softmax, segment_sum, segment_top_k

LENGTHS = st.lists(st.integers(0, 9), max_size=6)


@settings(deadline=None, max_examples=40)
@given(lengths=LENGTHS, channels=st.sampled_from([(), (3,), (2, 3)]))
def test_sums_means_and_softmax_are_those_of_each_sequence(lengths, channels):
    layout = build_layout(np.array(lengths, int))
    torch.manual_seed(sum(lengths))
    x = torch.randn(sum(lengths), *channels, dtype=torch.float64).requires_grad_()
    cut = [x[start:stop] for start, stop in bounds_of(layout)]
    nothing = x.new_zeros(0, *channels)
    for got, rows in (
        (segment_sum(x, layout), [c.sum(0) for c in cut]),
        (segment_mean(x, layout), [c.mean(0) if len(c) else c.sum(0) for c in cut]),
        (segment_softmax(x, layout), [c.softmax(0) for c in cut]),
    ):
        wanted = torch.stack(rows) if got.shape[0] == layout.num_seqs and rows and rows[0].dim() < x.dim() else None
        wanted = torch.cat([nothing, *rows]) if wanted is None else wanted
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        if got.numel():
            probe = torch.randn_like(got)
            a, b = (torch.autograd.grad((y * probe).sum(), x)[0] for y in (got, wanted))
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, data=st.data())
def test_the_best_are_those_of_each_sequence(lengths, data):
    """Few different scores make ties, which the earlier token wins."""
    layout = build_layout(np.array(lengths, int))
    scores = data.draw(st.lists(st.integers(0, 3), min_size=sum(lengths), max_size=sum(lengths)))
    k = data.draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    top = segment_top_k(torch.tensor(scores, dtype=torch.float32), layout, torch.tensor(k, dtype=torch.int64)).tolist()
    for (start, stop), most in zip(bounds_of(layout), k, strict=True):
        best = sorted(range(start, stop), key=lambda token: (-scores[token], token))
        assert {token for token in range(start, stop) if top[token]} == set(best[:most])
    assert segment_place(layout).tolist() == [place for n in lengths for place in range(n)]


@pytest.mark.parametrize("reduce", [segment_sum, segment_mean, segment_softmax])
def test_low_precision_is_summed_in_fp32(reduce):
    assert callable(reduce)
    layout = build_layout(np.array([3000, 2]))
    x = torch.full((3002,), 0.1, dtype=torch.bfloat16)
    got: Tensor = reduce(x, layout)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), reduce(x.double(), layout), rtol=1e-5, atol=1e-9)


def test_softmax_of_low_scores_beside_high_ones_keeps_its_weights():
    layout = build_layout(np.array([2, 2]))
    got = segment_softmax(torch.tensor([0.0, 0.0, -2000.0, -2000.0]), layout)
    assert got.tolist() == [0.5, 0.5, 0.5, 0.5]
