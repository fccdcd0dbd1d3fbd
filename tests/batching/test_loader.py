"""From a plan and tokens to a batch: labels shifted within a sequence, windows counted once, padding as planned."""

import threading
import time
import traceback
from collections.abc import Callable, Generator
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.helpers.corpus import prepare
from tests.helpers.toy import write_toy
from unpad.batching.batch import RaggedBatch, from_padded
from unpad.batching.loader import AHEAD, TokenSource, load_micro, load_steps
from unpad.batching.plan import Micro, Plan, plan
from unpad.data.tokens.token_set import TokenSet
from unpad.recipes.file import load_recipe
from unpad.recipes.training import PlanSettings

PAD, CPU = 0, torch.device("cpu")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenSet:
    folder = tmp_path_factory.mktemp("toy")
    return prepare(load_recipe(str(write_toy(folder))), cache=folder / "cache")[0]


def steps_of(tokens: TokenSource, planned: Plan, first: int = 0) -> Generator[list[RaggedBatch], None, None]:
    return load_steps(partial(load_micro, tokens, pad_id=PAD), planned, CPU, first, group_lengths=False)


def whole(tokens: TokenSet, ids: list[int], pad_to: int = 0, fill_to: int = 0) -> Micro:
    seq_ids = np.array(ids, np.int64)
    starts = np.zeros(len(ids), np.int32)
    return Micro(seq_ids, starts, (tokens.lengths[seq_ids] - 1).astype(np.int32), starts, pad_to, fill_to)


def pieces(batch: RaggedBatch) -> list[tuple[list[int], list[int], list[bool], list[int]]]:
    """Input ids, labels, loss mask and positions of every sequence of a ragged batch."""
    bounds = batch.layout.cu_seqlens.tolist()
    fields = (batch.input_ids, batch.labels, batch.loss_mask, batch.position_ids)
    return [tuple(field[a:b].tolist() for field in fields) for a, b in pairwise(bounds)]


def test_labels_are_shifted_within_each_sequence(tokens):
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


@pytest.mark.promise("train.replies-only")
def test_conversations_count_replies_only(tokens):
    batch = load_micro(tokens, whole(tokens, np.flatnonzero(tokens.kind == 1)[:5].tolist()), PAD)
    assert 0 < batch.num_targets < batch.total_tokens
    batch = load_micro(tokens, whole(tokens, np.flatnonzero(tokens.kind == 0)[:5].tolist()), PAD)
    assert batch.num_targets == batch.total_tokens


def test_positions_that_an_earlier_window_has_shown_are_context(tokens):
    longest = int(np.argmax(tokens.lengths))
    row = tokens.tokens(longest).tolist()
    assert len(row) > 22
    windows = Micro(
        np.array([longest, longest, 1]), np.array([0, 6, 0], np.int32), np.array([10, 16, 4], np.int32),
        np.array([0, 10, 0], np.int32), 0, 0,
    )  # fmt: skip
    first, second, other = pieces(load_micro(tokens, windows, PAD))
    assert first[0] == row[:10]
    assert first[2] == [True] * 10
    assert second[0] == row[6:16]
    assert second[2] == [False] * 4 + [True] * 6
    assert second[1] == [0] * 4 + row[11:17]
    assert second[3] == list(range(10))  # a window starts at position 0
    assert other[2] == [True] * 4


@pytest.mark.promise("llm.windows")
def test_windows_with_stride_show_every_target_once(tokens):
    settings = PlanSettings(max_tokens=12, stride=5, overflow="split", tokens_per_step=60, tokens_per_micro=40)
    planned = plan(tokens.lengths - 1, settings, seed=0, epoch=0, targets=tokens.count_targets)
    steps = list(steps_of(tokens, planned))
    assert sum(batch.num_targets for micros in steps for batch in micros) == tokens.num_targets.sum()
    assert max(batch.layout.max_seqlen for micros in steps for batch in micros) == 12


def test_filler_completes_the_run_and_counts_nothing(tokens):
    plain = load_micro(tokens, whole(tokens, [2, 5]), PAD)
    filled = load_micro(tokens, whole(tokens, [2, 5], fill_to=plain.total_tokens + 9), PAD)
    assert filled.total_tokens == plain.total_tokens + 9
    assert filled.seq_ids.tolist() == [2, 5] + [-1] * 9
    assert pieces(filled)[:2] == pieces(plain)
    assert pieces(filled)[2:] == [([PAD], [0], [False], [0])] * 9
    assert load_micro(tokens, whole(tokens, [2, 5], fill_to=3), PAD).seq_ids.tolist() == [2, 5]


def test_a_rectangle_holds_the_same_tokens(tokens):
    plain = load_micro(tokens, whole(tokens, [2, 95, 7]), PAD)
    padded = load_micro(tokens, whole(tokens, [2, 95, 7], pad_to=80), PAD)
    mask = padded.layout.attention_mask
    assert mask.shape == (3, 80)
    assert padded.num_targets == plain.num_targets
    for name in ("input_ids", "labels", "loss_mask", "position_ids"):
        values = getattr(padded, name).unflatten(0, mask.shape)
        assert torch.equal(from_padded(values, mask), getattr(plain, name)), name
    assert set(padded.input_ids[~mask.flatten()].tolist()) == {PAD}


def test_loading_from_a_step_on_gives_the_rest_of_the_epoch(tokens):
    settings = PlanSettings(tokens_per_step=150, tokens_per_micro=60)
    planned = plan(tokens.lengths - 1, settings, seed=3, epoch=1, targets=tokens.count_targets)
    steps = list(steps_of(tokens, planned))
    assert len(steps) == planned.num_steps > 5
    rest = list(steps_of(tokens, planned, first=4))
    assert len(rest) == planned.num_steps - 4
    for full, later in zip(steps[4:], rest, strict=True):
        assert [batch.input_ids.tolist() for batch in full] == [batch.input_ids.tolist() for batch in later]
    seen = [i for micros in steps for batch in micros for i in batch.seq_ids.tolist()]
    assert sorted(seen) == list(range(len(tokens)))


def test_an_empty_micro_batch_is_legal(tokens):
    batch = load_micro(tokens, whole(tokens, []), PAD)
    assert (batch.total_tokens, batch.num_seqs, batch.num_targets) == (0, 0, 0)


# --------------------------------------------------------------------------- the worker


class Watched:
    """Tokens that say which step they are asked for, and can fail there; a step is one micro-batch here."""

    def __init__(self, tokens: TokenSet, before: Callable[[int], None] = lambda asked: None) -> None:
        self.tokens, self.before, self.asked = tokens, before, 0

    def gather(
        self, seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.asked += 1
        self.before(self.asked)
        return self.tokens.gather(seq_ids, starts, stops)


@pytest.fixture
def one_micro_steps(tokens: TokenSet) -> Plan:
    settings = PlanSettings(tokens_per_step=60, tokens_per_micro=400)
    planned = plan(tokens.lengths - 1, settings, seed=3, epoch=1, targets=tokens.count_targets)
    assert planned.num_micros == planned.num_steps > 3 * AHEAD
    return planned


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("unpad-loader")]


def until(condition: Callable[[], bool]) -> None:
    while not condition():  # what never happens meets the limit of every test
        time.sleep(0.001)


def same_bits(a: RaggedBatch, b: RaggedBatch) -> bool:
    mine, theirs = ({k: v for k, v in vars(x).items() if isinstance(v, torch.Tensor)} for x in (a, b))
    return mine.keys() == theirs.keys() and all(
        torch.equal(value, theirs[name]) and value.dtype == theirs[name].dtype for name, value in mine.items()
    )


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("pad_to", [0, 200])
def test_a_worker_loads_what_loading_in_place_gives(tokens, one_micro_steps, first, pad_to):
    if pad_to:
        settings = PlanSettings(strategy="fixed", batch_size=4, max_tokens=pad_to, tokens_per_step=60)
        planned = plan(tokens.lengths - 1, settings, seed=3, epoch=1, targets=tokens.count_targets)
    else:
        planned = one_micro_steps
    loaded = list(steps_of(tokens, planned, first))
    in_place = [
        [load_micro(tokens, micro, PAD) for micro in planned.step(step)] for step in range(first, planned.num_steps)
    ]
    assert len(loaded) == len(in_place) > AHEAD
    for got, wanted in zip(loaded, in_place, strict=True):
        assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))
        assert all(torch.equal(a.layout.lengths(), b.layout.lengths()) for a, b in zip(got, wanted, strict=True))
    assert workers() == []


def test_the_worker_runs_ahead_by_a_few_steps_and_no_more(tokens, one_micro_steps):
    watched = Watched(tokens)
    steps = steps_of(watched, one_micro_steps)
    for taken in range(1, 4):
        next(steps)
        until(lambda wanted=taken + AHEAD: watched.asked == wanted)
    time.sleep(0.05)  # a worker that went on would be seen
    assert watched.asked == 3 + AHEAD
    steps.close()
    assert workers() == []


@pytest.mark.parametrize("stop", ["close", "forget", "raise"])
def test_no_thread_is_left_when_the_consumer_stops_early(tokens, one_micro_steps, stop):
    steps = steps_of(tokens, one_micro_steps)
    next(steps)
    assert len(workers()) == 1
    if stop == "close":
        steps.close()
    elif stop == "forget":
        del steps
    else:
        with pytest.raises(KeyboardInterrupt):
            steps.throw(KeyboardInterrupt)
    assert workers() == []


def test_what_fails_in_the_worker_is_raised_at_its_step_with_its_traceback(tokens, one_micro_steps):
    def fail(asked: int) -> None:
        if asked == 3:
            raise OSError(5, "the disk went away")

    steps = steps_of(Watched(tokens, fail), one_micro_steps)
    next(steps)
    next(steps)
    with pytest.raises(OSError, match="the disk went away") as caught:
        next(steps)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-2:] == ["gather", "fail"]
    assert workers() == []
    with pytest.raises(StopIteration):
        next(steps)


def test_a_slow_read_is_not_waited_for_while_steps_are_ready(tokens, one_micro_steps):
    reading, go_on = threading.Event(), threading.Event()

    def block(asked: int) -> None:
        if asked == AHEAD + 1:
            reading.set()
            assert go_on.wait(20)

    steps = steps_of(Watched(tokens, block), one_micro_steps)
    next(steps)
    assert reading.wait(20)  # step AHEAD is being read, and those before it are taken meanwhile
    for _ in range(AHEAD - 1):
        next(steps)
    go_on.set()
    next(steps)
    steps.close()


@pytest.mark.parametrize("group_lengths", [True, False])
def test_layouts_come_with_their_length_groups_where_attention_needs_them(tokens, one_micro_steps, group_lengths):
    load, first = partial(load_micro, tokens, pad_id=PAD), one_micro_steps.num_steps - 2
    for micros in load_steps(load, one_micro_steps, CPU, first, group_lengths=group_lengths):
        assert all(("grouped" in vars(batch.layout)) == group_lengths for batch in micros)
