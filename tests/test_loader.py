"""From a plan and tokens to a batch: labels shifted within a sequence, windows counted once, padding as planned."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.toy import write_toy
from unpad.batch import RaggedBatch, from_padded
from unpad.layout import PaddedLayout
from unpad.loader import load_micro, load_steps
from unpad.plan.plan import Micro, plan
from unpad.recipe import PlanSettings, load_recipe
from unpad.tokens.corpus import TokenSet, prepare

PAD = 0


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenSet:
    folder = tmp_path_factory.mktemp("toy")
    return prepare(load_recipe(str(write_toy(folder))), cache=folder / "cache")[0]


def whole(tokens: TokenSet, ids: list[int], pad_to: int = 0, fill_to: int = 0) -> Micro:
    seq_ids = np.array(ids, np.int64)
    starts = np.zeros(len(ids), np.int32)
    stops = (tokens.lengths[seq_ids] - 1).astype(np.int32)
    return Micro(seq_ids, starts, stops, starts, pad_to, fill_to)


def pieces(batch: RaggedBatch) -> list[tuple[list[int], list[int], list[bool], list[int]]]:
    """Input ids, labels, loss mask and positions of every sequence of a ragged batch."""
    bounds = batch.layout.cu_seqlens.tolist()
    fields = (batch.input_ids, batch.labels, batch.loss_mask, batch.position_ids)
    return [tuple(field[a:b].tolist() for field in fields) for a, b in pairwise(bounds)]


def test_labels_are_shifted_within_each_sequence(tokens: TokenSet) -> None:
    ids = [3, 95, 0, 61]  # texts and conversations in no order
    batch = load_micro(tokens, whole(tokens, ids), PAD)
    assert batch.seq_ids.tolist() == ids
    for i, (inputs, labels, mask, positions) in zip(ids, pieces(batch), strict=True):
        row, counts = tokens.tokens(i), tokens.loss_mask(i)
        assert inputs == row[:-1].tolist()
        assert mask == counts[1:].tolist()
        assert labels == np.where(counts[1:], row[1:], 0).tolist()
        assert positions == list(range(len(row) - 1))
    assert batch.num_targets == tokens.num_targets[ids].sum()
    assert batch.target_index.tolist() == batch.loss_mask.nonzero().flatten().tolist()


def test_conversations_count_replies_only(tokens: TokenSet) -> None:
    chats = np.flatnonzero(tokens.kind == 1)[:5].tolist()
    batch = load_micro(tokens, whole(tokens, chats), PAD)
    assert 0 < batch.num_targets < batch.total_tokens
    texts = np.flatnonzero(tokens.kind == 0)[:5].tolist()
    batch = load_micro(tokens, whole(tokens, texts), PAD)
    assert batch.num_targets == batch.total_tokens


def test_positions_that_an_earlier_window_has_shown_are_context(tokens: TokenSet) -> None:
    longest = int(np.argmax(tokens.lengths))
    row = tokens.tokens(longest).tolist()
    assert len(row) > 22
    made = Micro(
        np.array([longest, longest, 1]), np.array([0, 6, 0], np.int32), np.array([10, 16, 4], np.int32),
        np.array([0, 10, 0], np.int32), 0, 0,
    )  # fmt: skip
    first, second, other = pieces(load_micro(tokens, made, PAD))
    assert first[0] == row[:10]
    assert first[2] == [True] * 10
    assert second[0] == row[6:16]
    assert second[2] == [False] * 4 + [True] * 6
    assert second[1] == [0] * 4 + row[11:17]
    assert second[3] == list(range(10))  # a window starts at position 0
    assert other[2] == [True] * 4


def test_windows_with_stride_show_every_target_once(tokens: TokenSet) -> None:
    settings = PlanSettings(max_tokens=12, stride=5, overflow="split", tokens_per_step=60, tokens_per_micro=40)
    made = plan(tokens.lengths - 1, settings, seed=0, epoch=0, targets=tokens.count_targets)
    steps = list(load_steps(tokens, made, PAD, torch.device("cpu")))
    assert sum(batch.num_targets for micros in steps for batch in micros) == tokens.num_targets.sum()
    assert max(batch.layout.max_seqlen for micros in steps for batch in micros) == 12


def test_filler_completes_the_run_and_counts_nothing(tokens: TokenSet) -> None:
    plain = load_micro(tokens, whole(tokens, [2, 5]), PAD)
    filled = load_micro(tokens, whole(tokens, [2, 5], fill_to=plain.total_tokens + 9), PAD)
    assert filled.total_tokens == plain.total_tokens + 9
    assert filled.seq_ids.tolist() == [2, 5] + [-1] * 9
    assert pieces(filled)[:2] == pieces(plain)
    assert pieces(filled)[2:] == [([PAD], [0], [False], [0])] * 9
    assert load_micro(tokens, whole(tokens, [2, 5], fill_to=3), PAD).seq_ids.tolist() == [2, 5]


def test_a_rectangle_holds_the_same_tokens(tokens: TokenSet) -> None:
    plain = load_micro(tokens, whole(tokens, [2, 95, 7]), PAD)
    padded = load_micro(tokens, whole(tokens, [2, 95, 7], pad_to=80), PAD)
    assert isinstance(padded.layout, PaddedLayout)
    mask = padded.layout.attention_mask
    assert mask.shape == (3, 80)
    assert padded.num_targets == plain.num_targets
    for name in ("input_ids", "labels", "loss_mask", "position_ids"):
        values = getattr(padded, name).unflatten(0, mask.shape)
        assert torch.equal(from_padded(values, mask), getattr(plain, name)), name
    assert set(padded.input_ids[~mask.flatten()].tolist()) == {PAD}


def test_loading_from_a_step_on_gives_the_rest_of_the_epoch(tokens: TokenSet) -> None:
    settings = PlanSettings(tokens_per_step=150, tokens_per_micro=60)
    made = plan(tokens.lengths - 1, settings, seed=3, epoch=1, targets=tokens.count_targets)
    steps = list(load_steps(tokens, made, PAD, torch.device("cpu")))
    assert len(steps) == made.num_steps > 5
    rest = list(load_steps(tokens, made, PAD, torch.device("cpu"), first=4))
    assert len(rest) == made.num_steps - 4
    for full, later in zip(steps[4:], rest, strict=True):
        assert [batch.input_ids.tolist() for batch in full] == [batch.input_ids.tolist() for batch in later]
    seen = [i for micros in steps for batch in micros for i in batch.seq_ids.tolist()]
    assert sorted(seen) == list(range(len(tokens)))


def test_an_empty_micro_batch_is_legal(tokens: TokenSet) -> None:
    batch = load_micro(tokens, whole(tokens, []), PAD)
    assert (batch.total_tokens, batch.num_seqs, batch.num_targets) == (0, 0, 0)
