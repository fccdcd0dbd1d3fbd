"""Attention with the scores of other programs' models: scale, window, cap and sinks, against the definition."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.grid import pairs
from unpad.batching.layout import build_layout
from unpad.nn import attention
from unpad.nn.attend import Attend
from unpad.nn.attention import ragged_attention
from unpad.nn.native import library

LENGTHS = [3, 17, 1, 40, 17, 0, 9]


def definition(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """One sequence, one head and one query at a time."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype)
    serves = q.shape[1] // k.shape[1]
    for start, stop in pairwise(np.cumsum([0, *lengths]).tolist()):
        for head in range(q.shape[1]):
            for place in range(start, stop):
                first = max(start, place - window + 1) if window else start
                scores = k[first : place + 1, head // serves] @ q[place, head] * scale
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                scores = scores if sinks is None else torch.cat([scores, sinks[head, None]])
                out[place, head] = scores.softmax(0)[: place + 1 - first] @ v[first : place + 1, head // serves]
    return out


@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "value_dim", "native", "whole"),
    pairs([None, 1, 5, 100], [None, 1.5], [False, True], [16, 8], [True, False], [512, 8]),
)
def test_scores_follow_the_definition(window, softcap, sinks, value_dim, native, whole, monkeypatch):
    monkeypatch.setattr(attention, "WHOLE_LENGTH", whole)  # below it blocks of queries are computed apart
    monkeypatch.setattr(attention, "BLOCK_CELLS", 400)
    torch.manual_seed(0)
    shapes = [(sum(LENGTHS), 4, 16), (sum(LENGTHS), 2, 16), (sum(LENGTHS), 2, value_dim)]
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    extra = torch.randn(4, dtype=torch.float64, requires_grad=True) if sinks else None
    leaves = [q, k, v, *([extra] if extra is not None else [])]
    wanted = definition(q, k, v, LENGTHS, 0.3, window, softcap, extra)
    grad = torch.randn_like(wanted)
    layout = build_layout(np.array(LENGTHS))
    options = {"scale": 0.3, "window": window, "softcap": softcap, "sinks": extra}
    if native:
        got = ragged_attention(q, k, v, layout, Attend(**options))
    else:
        with library.switched_off():
            got = ragged_attention(q, k, v, layout, Attend(**options))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    gradients = (torch.autograd.grad(out, leaves, grad) for out in (got, wanted))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_the_scale_is_that_of_the_head_by_default():
    q, k, v = (torch.randn(9, 2, 16, dtype=torch.float64) for _ in range(3))
    layout = build_layout(np.array([4, 5]))
    expected = definition(q, k, v, [4, 5], 1 / math.sqrt(16), None, None, None)
    torch.testing.assert_close(ragged_attention(q, k, v, layout, Attend()), expected, rtol=1e-10, atol=1e-12)


def test_dropout_of_a_window_drops_weights_and_keeps_their_sum_on_average():
    torch.manual_seed(0)
    q, k = (torch.zeros(600, 1, 16) for _ in range(2))
    v = torch.ones(600, 1, 16)
    out = ragged_attention(q, k, v, build_layout(np.array([600])), Attend(window=20, dropout=0.5))
    assert 0.95 < float(out.mean()) < 1.05
    assert float(out.std()) > 0.1
