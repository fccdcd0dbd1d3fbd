from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.plans import contents
from unpad.batching.grouping import Grouping
from unpad.batching.plan import Micro, Plan, _without_short_last_step, plan, rows_digest
from unpad.batching.strategies import bucket, budget
from unpad.batching.strategies.rows import best_fit_decreasing
from unpad.errors import PlanError
from unpad.recipes.training import PlanSettings, strategy_names
from unpad.trials.strategy_table import length_correlation

LENGTHS = st.lists(st.integers(0, 60), max_size=60)
ALL = tuple(strategy_names())


def many(num: int, seed: int = 0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(4, 0.8, num), 1, 512).astype(np.int64)


@st.composite
def cases(draw):
    chosen = PlanSettings(
        strategy=draw(st.sampled_from(ALL)),
        tokens_per_step=draw(st.integers(1, 150)),
        tokens_per_micro=draw(st.integers(1, 100)),
        batch_size=draw(st.integers(1, 9)),
        bucket_width=draw(st.integers(1, 20)),
        row_tokens=draw(st.integers(20, 60)),
        max_tokens=draw(st.integers(1, 20)),
        overflow=draw(st.sampled_from(["split", "truncate_right", "truncate_left", "drop"])),
        drop_last=draw(st.booleans()),
    )
    if chosen.strategy not in ("pack", "rows"):
        chosen = chosen.model_copy(update={"batches_per_step": draw(st.none() | st.integers(1, 4))})
    return np.array(draw(LENGTHS), np.int64), chosen


def micros_of(planned: Plan) -> list:
    return [micro for i in range(planned.num_steps) for micro in planned.step(i)]


def triples(micros) -> list[tuple[int, int, int]]:
    return [t for m in micros for t in zip(m.seq_ids.tolist(), m.starts.tolist(), m.stops.tolist(), strict=True)]


@pytest.mark.promise("batch.buckets")
@given(cases())
@settings(deadline=None, max_examples=200)
def test_every_piece_is_planned_exactly_once(case):
    lengths, chosen = case
    chosen = chosen.model_copy(update={"drop_last": False})
    planned = plan(lengths, chosen, seed=1, epoch=2)
    pieces = planned.pieces
    everything = zip(pieces.seq_ids.tolist(), pieces.starts.tolist(), pieces.stops.tolist(), strict=True)
    assert sorted(triples(micros_of(planned))) == sorted(everything)
    assert all(planned.step(i) for i in range(planned.num_steps))
    assert all(len(micro.seq_ids) for micro in micros_of(planned))


@given(cases())
@settings(deadline=None, max_examples=200)
def test_the_numbers_of_a_plan_equal_a_recount(case):
    lengths, chosen = case
    planned = plan(lengths, chosen, seed=1, epoch=2)
    real = cells = trained = 0
    for micro in micros_of(planned):
        sizes = (micro.stops - micro.starts).tolist()
        real += sum(sizes)
        trained += int((micro.stops - micro.first_target).sum())
        if micro.pad_to:
            assert max(sizes) <= micro.pad_to
            cells += micro.pad_to * len(sizes)
        else:
            assert micro.fill_to == 0 or micro.fill_to >= sum(sizes)
            cells += micro.fill_to or sum(sizes)
    assert (planned.real_tokens, planned.padded_tokens) == (real, cells)
    assert planned.pad_share == pytest.approx(1 - real / cells if cells else 0)
    assert planned.ledger.tokens("trained") == trained
    assert planned.ledger.total == lengths.sum()


@pytest.mark.promise("batch.buckets")
@pytest.mark.parametrize("strategy", ALL)
def test_the_same_seed_and_epoch_give_the_same_plan_and_others_another(strategy):
    lengths, chosen = many(500), PlanSettings(strategy=strategy)

    def found(seed, epoch):
        return contents(plan(lengths, chosen, seed=seed, epoch=epoch))

    assert found(3, 0) == found(3, 0)
    assert len({found(3, 0), found(3, 1), found(4, 0), found(1, 3)}) == 4


@pytest.mark.promise("receipts.rows")
def test_the_digest_of_rows_knows_spans_and_not_their_order():
    chosen = PlanSettings(tokens_per_step=300, tokens_per_micro=300, max_tokens=40)
    (whole,) = plan(many(20), chosen, seed=0, epoch=0).step(0)
    columns = (whole.seq_ids, whole.starts, whole.stops, whole.first_target)
    halves = [Micro(*(column[part] for column in columns), 0, 0) for part in (slice(5, None), slice(5))]
    nothing = Micro(*np.zeros((4, 0), np.int64), 0, 0)
    assert rows_digest([whole]) == rows_digest(halves) == rows_digest([nothing, *halves])
    others = {rows_digest([whole])}
    for place in range(4):
        changed = [column.copy() for column in columns]
        changed[place][3] += 1
        others.add(rows_digest([Micro(*changed, 0, 0)]))
    assert len(others) == 5
    assert all(len(digest) == 16 for digest in others)


@pytest.mark.promise("vqa.row-by-row")
@given(LENGTHS, st.integers(1, 150), st.integers(1, 100))
@settings(deadline=None)
def test_pack_never_exceeds_its_budgets_unless_with_a_single_sequence(lengths, per_step, per_micro):
    chosen = PlanSettings(strategy="pack", tokens_per_step=per_step, tokens_per_micro=per_micro)
    planned = plan(np.array(lengths, np.int64), chosen, seed=0, epoch=0)
    assert planned.pad_share == 0
    for i in range(planned.num_steps):
        micros = planned.step(i)
        sizes = [(m.stops - m.starts).tolist() for m in micros]
        flat = [size for part in sizes for size in part]
        assert sum(flat) <= per_step or len(flat) == 1
        assert all(sum(part) <= per_micro or len(part) == 1 for part in sizes)
        assert flat == sorted(flat, reverse=True)
        following = [size[0] for size in sizes[1:]]
        assert all(sum(part) + first > per_micro for part, first in zip(sizes, following, strict=False))


@pytest.mark.parametrize("strategy", ["fixed", "dynamic", "bucket", "budget"])
def test_padded_steps_end_when_they_hold_enough_tokens(strategy):
    planned = plan(many(400), PlanSettings(strategy=strategy, tokens_per_step=1000), seed=0, epoch=0)
    for i in range(planned.num_steps):
        tokens = [int((m.stops - m.starts).sum()) for m in planned.step(i)]
        assert sum(tokens[:-1]) < 1000
        assert sum(tokens) >= 1000 or i == planned.num_steps - 1


@pytest.mark.parametrize("strategy", ALL)
def test_a_step_is_complete_with_exactly_its_tokens(strategy):
    chosen = PlanSettings(strategy=strategy, tokens_per_step=30, tokens_per_micro=10, batch_size=1, row_tokens=10)
    planned = plan(np.full(12, 10), chosen, seed=0, epoch=0)
    assert [sum(len(m.seq_ids) for m in planned.step(i)) for i in range(planned.num_steps)] == [3, 3, 3, 3]


@pytest.mark.promise("batch.pad-share")
def test_fixed_pads_to_the_cap_and_dynamic_to_the_longest_of_the_batch():
    lengths, ids = np.array([2, 3, 4]), np.array([0, 1, 2])
    fixed = plan(lengths, PlanSettings(strategy="fixed"), seed=0, epoch=0, max_tokens=16, seq_ids=ids)
    assert [m.pad_to for m in micros_of(fixed)] == [16]
    assert [m.pad_to for m in micros_of(plan(lengths, PlanSettings(strategy="fixed"), seed=0, epoch=0))] == [4]
    dynamic = plan(lengths, PlanSettings(strategy="dynamic"), seed=0, epoch=0, max_tokens=16)
    assert [m.pad_to for m in micros_of(dynamic)] == [4]
    assert dynamic.pad_share == pytest.approx(1 - 9 / 12)
    assert all(
        len(m.seq_ids) == 8 for m in micros_of(plan(many(80), PlanSettings(strategy="dynamic"), seed=0, epoch=0))
    )


@pytest.mark.promise("batch.buckets")
@given(st.lists(st.integers(1, 60), max_size=60), st.integers(1, 20), st.integers(1, 9))
@settings(deadline=None)
def test_a_batch_comes_from_one_bucket_and_no_bucket_has_two_short_ones(lengths, width, batch_size):
    lengths = np.array(lengths, np.int64)
    chosen = PlanSettings(bucket_width=width, batch_size=batch_size)
    grouping = bucket.group(lengths, chosen, np.random.default_rng(0))
    for start, stop in zip(grouping.micro_offsets, grouping.micro_offsets[1:], strict=False):
        part = lengths[grouping.order[start:stop]]
        assert 1 <= len(part) <= batch_size
        assert len(set((part // width).tolist())) == 1
    counts = np.bincount(lengths // width)
    assert len(grouping.micro_offsets) - 1 == (-(-counts // batch_size)).sum()


@pytest.mark.promise("batch.buckets")
@pytest.mark.parametrize("strategy", ALL)
def test_lengths_do_not_drift_over_an_epoch(strategy):
    planned = plan(many(20_000), PlanSettings(strategy=strategy, tokens_per_step=512), seed=0, epoch=0)
    assert abs(length_correlation(planned)) < 0.1


@given(st.lists(st.integers(1, 60), max_size=60), st.integers(1, 200))
@settings(deadline=None)
def test_budget_holds_for_padded_tokens(lengths, limit):
    lengths = np.array(lengths, np.int64)
    grouping = budget.group(lengths, PlanSettings(tokens_per_micro=limit), np.random.default_rng(0))
    for start, stop, pad_to in zip(grouping.micro_offsets, grouping.micro_offsets[1:], grouping.pad_to, strict=False):
        assert pad_to == lengths[grouping.order[start:stop]].max()
        assert pad_to * (stop - start) <= limit or stop - start == 1


def test_budget_mixes_neighbouring_batches_anew_in_every_epoch():
    lengths, drawn = many(400), []
    for epoch in range(2):
        grouping = budget.group(lengths, PlanSettings(tokens_per_micro=2000), np.random.default_rng(epoch))
        batches = [grouping.order[a:b] for a, b in pairwise(grouping.micro_offsets)]
        drawn.append({frozenset(batch.tolist()) for batch in batches})
    assert len(drawn[0] & drawn[1]) < len(drawn[0]) / 2


def best_fit_one_by_one(lengths: np.ndarray, size: int) -> list[int]:
    """Space left in every row after best-fit decreasing, by the book."""
    spaces: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [space for space in spaces if space >= length]
        space = min(fitting) if fitting else size
        if fitting:
            spaces.remove(space)
        spaces.append(space - length)
    return sorted(spaces)


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 90))
@settings(deadline=None, max_examples=200)
def test_rows_equal_best_fit_decreasing_one_by_one(lengths, size):
    lengths = np.array(lengths, np.int64)
    used = np.bincount(best_fit_decreasing(lengths, size), weights=lengths)
    assert sorted((size - used).astype(int).tolist()) == best_fit_one_by_one(lengths, size)


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 90), st.integers(1, 400), st.integers(1, 400))
@settings(deadline=None)
def test_rows_fill_whole_rows_within_the_budgets(lengths, size, per_step, per_micro):
    lengths = np.array(lengths, np.int64)
    chosen = PlanSettings(strategy="rows", row_tokens=size, tokens_per_step=per_step, tokens_per_micro=per_micro)
    planned = plan(lengths, chosen, seed=0, epoch=0)
    assert planned.padded_tokens == len(best_fit_one_by_one(lengths, size)) * size
    for i in range(planned.num_steps):
        micros = planned.step(i)
        assert all(m.fill_to % size == 0 and size <= m.fill_to <= max(per_micro, size) for m in micros)
        real = sum(int((m.stops - m.starts).sum()) for m in micros)
        assert real <= per_step or sum(m.fill_to for m in micros) == size


def test_a_piece_longer_than_a_row_is_refused_with_the_fix():
    with pytest.raises(PlanError, match="600 tokens does not fit a row of 512") as caught:
        plan(np.array([600]), PlanSettings(strategy="rows"), seed=0, epoch=0)
    assert "plan.row_tokens" in caught.value.fix


@pytest.mark.promise("batch.buckets")
@pytest.mark.parametrize("strategy", ALL)
def test_drop_last_leaves_out_a_short_last_step_and_says_so(strategy):
    lengths = np.append(np.full(50, 10), 7)
    masks = np.arange(51) % 2  # every other sequence has a single target, the rest one per position

    def targets(seq_ids, starts, stops):
        return np.where(masks[seq_ids] == 1, 1, stops - starts)

    chosen = PlanSettings(
        strategy=strategy, tokens_per_step=120, tokens_per_micro=60, batch_size=4, row_tokens=30, max_tokens=10
    )
    kept = plan(lengths, chosen, seed=0, epoch=0, targets=targets)
    planned = plan(lengths, chosen.model_copy(update={"drop_last": True}), seed=0, epoch=0, targets=targets)
    last = triples(kept.step(kept.num_steps - 1))
    tokens = sum(stop - start for _, start, stop in last)
    if tokens + 7 > 120:  # full: not even the shortest would fit
        assert planned.num_steps == kept.num_steps
        return
    assert planned.num_steps == kept.num_steps - 1
    assert triples(micros_of(planned)) + last == triples(micros_of(kept))
    assert planned.ledger.dropped == {"last_step": tokens}
    assert planned.ledger.first_ids["last_step"] == tuple(sorted({seq_id for seq_id, _, _ in last})[:5])
    assert planned.ledger.total == kept.ledger.total == 507


def test_the_smaller_of_two_limits_holds():
    chosen = PlanSettings(max_tokens=8)
    assert plan(np.array([20]), chosen, seed=0, epoch=0, max_tokens=16).pieces.lengths.max() == 8
    assert plan(np.array([20]), chosen, seed=0, epoch=0, max_tokens=4).pieces.lengths.max() == 4


@pytest.mark.parametrize("strategy", ALL)
def test_a_corpus_without_targets_gives_an_empty_plan(strategy):
    planned = plan(np.array([0, 0]), PlanSettings(strategy=strategy, drop_last=True), seed=0, epoch=0)
    assert (planned.num_steps, planned.num_micros, planned.padded_tokens, planned.pad_share) == (0, 0, 0, 0.0)
    assert planned.ledger.sequences == {"no_target": 2}


@pytest.mark.parametrize("strategy", ["fixed", "dynamic", "bucket", "budget"])
def test_batches_per_step_are_counted_whatever_they_hold(strategy):
    lengths = many(50)
    chosen = PlanSettings(strategy=strategy, batch_size=4, tokens_per_micro=1000, batches_per_step=3)
    planned = plan(lengths, chosen, seed=0, epoch=0)
    counts = np.diff(planned.step_offsets)
    assert set(counts[:-1]) == {3}
    assert 1 <= counts[-1] <= 3
    shorter = plan(lengths, chosen.model_copy(update={"drop_last": True}), seed=0, epoch=0)
    assert set(np.diff(shorter.step_offsets)) == {3}
    assert shorter.num_steps == planned.num_micros // 3


@pytest.mark.parametrize("strategy", ["pack", "rows"])
def test_batches_per_step_are_refused_where_there_are_no_batches(strategy):
    with pytest.raises(ValueError, match="tokens_per_step"):
        PlanSettings(strategy=strategy, batches_per_step=2)


def test_a_last_step_with_room_for_exactly_the_shortest_piece_is_dropped():
    """Steps of 12 tokens: 5 + 7 fill one, 5 + 2 leave room for 5, and 8 alone for 4, in which no piece fits."""
    chosen = PlanSettings(tokens_per_step=12, tokens_per_micro=12, drop_last=True)
    exactly = Grouping(*(np.array(x) for x in ([0, 1, 2], [0, 2, 3], [0, 1, 2], [0, 0], [0, 0])))
    for lengths, is_dropped in (
        ([6, 6, 6], True),
        ([5, 7, 7], True),
        ([5, 7, 8], False),
        ([6, 6, 7], False),
        ([0, 12, 12], False),
    ):
        _, found = _without_short_last_step(exactly, np.array(lengths), chosen)
        assert found.tolist() == [False, False, is_dropped]


def test_two_epochs_draw_differently():
    seeds = [plan(many(20), PlanSettings(), seed=3, epoch=epoch).micro(0).epoch_seed for epoch in (0, 1)]
    assert seeds == [(3, 0), (3, 1)]


def test_the_ledger_of_a_dropped_step_of_overlapping_windows_counts_targets_once():
    chosen = PlanSettings(overflow="split", max_tokens=10, stride=6, drop_last=True, tokens_per_step=30)
    ledger = plan(np.array([43, 25]), chosen, seed=0, epoch=0).ledger
    assert ledger.total == 68
    assert ledger.tokens("dropped") > 0
