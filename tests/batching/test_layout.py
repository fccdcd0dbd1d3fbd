"""A layout says where sequences are, and its length groups hold every token exactly once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.batching import layout as layout_module
from unpad.batching.layout import PaddedLayout, build_layout

LENGTHS = st.lists(st.integers(0, 60), max_size=40)


@settings(deadline=None)
@given(lengths=LENGTHS)
def test_groups_hold_every_token_once_and_in_place(lengths):
    layout = build_layout(np.array(lengths, np.int64))
    total = sum(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    tokens = torch.arange(total)
    ordered = tokens if layout.grouped.by_length is None else tokens[layout.grouped.by_length]
    seen: list[int] = []
    for group in layout.grouped.groups:
        rectangle = ordered[group.start : group.stop] if group.cells is None else ordered[group.cells]
        assert rectangle.numel() == group.num_seqs * group.longest
        real = rectangle if group.real is None else rectangle[group.real]
        assert real.numel() == group.stop - group.start
        seen += real.tolist()
        rows = sequence[rectangle].view(group.num_seqs, group.longest)
        assert bool((rows == rows[:, :1]).all()), "a row holds one sequence"
        if group.key_mask is not None:
            assert group.key_mask.sum(1).tolist() == [lengths[i] for i in rows[:, 0].tolist()]
            assert group.real.tolist() == group.key_mask.flatten().nonzero()[:, 0].tolist()
    assert sorted(seen) == list(range(total))
    out = torch.tensor(seen, dtype=torch.int64)
    assert torch.equal(out if layout.grouped.undo is None else out[layout.grouped.undo], tokens)


@settings(deadline=None)
@given(lengths=LENGTHS)
def test_boundaries_are_the_running_sum_of_lengths(lengths):
    layout = build_layout(np.array(lengths, np.int64))
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.cu_seqlens.tolist() == np.cumsum([0, *lengths]).tolist()
    assert layout.max_seqlen == max(lengths, default=0)
    assert layout.num_seqs == len(lengths)
    assert layout.lengths().tolist() == lengths


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_but_empty_sequences_is_a_layout_without_groups(lengths):
    layout = build_layout(np.array(lengths, np.int64))
    assert layout.grouped.groups == ()
    assert layout.num_seqs == len(lengths)
    assert layout.max_seqlen == 0


def test_empty_sequences_between_others_keep_their_boundaries():
    layout = build_layout(np.array([0, 3, 0, 5, 0]))
    assert layout.cu_seqlens.tolist() == [0, 0, 3, 3, 8, 8]
    assert sum(group.num_seqs for group in layout.grouped.groups) == 2


def test_runs_that_are_longest_first_already_are_not_moved():
    assert build_layout(np.array([9, 9, 4, 1, 0])).grouped.by_length is None
    assert build_layout(np.array([4, 9])).grouped.by_length is not None


def test_groups_are_made_once_and_only_for_those_who_ask(monkeypatch):
    made: list[int] = []
    count = layout_module.length_groups
    monkeypatch.setattr(layout_module, "length_groups", lambda lengths: made.append(len(lengths)) or count(lengths))
    layout = build_layout(np.array([2, 3, 9]))
    assert (layout.max_seqlen, layout.lengths().tolist(), layout.num_seqs) == (9, [2, 3, 9], 3)
    assert made == []
    assert layout.grouped.groups is layout.grouped.groups
    assert layout.grouped.by_length is not None
    assert layout.to(torch.device("meta")).grouped.undo is not None
    assert made == [3]


@pytest.mark.parametrize("lengths", [[3, 0, 5, 1], [0, 2, 4, 0], [0, 0], []])
def test_some_of_the_tokens_have_a_layout_of_their_own(lengths):
    layout = build_layout(np.array(lengths, int))
    kept = torch.arange(sum(lengths)) % 3 != 1
    left = [int(part.sum()) for part in kept.split(lengths)] if lengths else []
    for found in (layout.keep(kept), layout.restrict(kept.nonzero().flatten())):
        assert (found.lengths().tolist(), found.max_seqlen) == (left, max(left, default=0))
        assert found.cu_seqlens.dtype == torch.int32


def test_a_negative_length_is_refused():
    with pytest.raises(AssertionError, match="negative"):
        build_layout(np.array([3, -1]))


def test_a_rectangle_counts_its_real_cells():
    mask = torch.tensor([[True, True, False], [False, True, False], [False, False, False]])
    layout = PaddedLayout(mask)
    assert layout.num_seqs == 3
    assert layout.lengths().tolist() == [2, 1, 0]


def test_moving_takes_every_tensor_along_and_moves_nothing_that_is_there():
    layout = build_layout(np.array([2, 3, 9]))
    assert layout.to(torch.device("cpu")) is layout
    assert len(layout.grouped.groups) > 1
    elsewhere = layout.to(torch.device("meta"))
    fields = [value for group in elsewhere.grouped.groups for value in vars(group).values()]
    fields += [elsewhere.cu_seqlens, elsewhere.grouped.by_length, elsewhere.grouped.undo]
    tensors = [value for value in fields if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 3
    assert {value.device.type for value in tensors} == {"meta"}
    assert (elsewhere.max_seqlen, len(elsewhere.grouped.groups)) == (9, len(layout.grouped.groups))


def test_groups_made_in_inference_serve_training_later():
    layout = build_layout(np.array([3, 9, 8]))
    with torch.inference_mode():
        _ = layout.grouped
    x = torch.randn(20, 2, requires_grad=True)
    grouped = layout.grouped
    assert grouped.by_length is not None
    x.index_select(0, grouped.by_length).index_select(0, grouped.groups[0].cells).sum().backward()  # saves both indices
    assert x.grad is not None
