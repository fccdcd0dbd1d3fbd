import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.batching.ledger import COLUMNS, Ledger
from unpad.batching.pieces import Pieces, TargetCount, account, check_lengths, cut_and_count
from unpad.batching.plan import plan
from unpad.errors import PlanError
from unpad.recipes.training import PlanSettings

LENGTHS = st.lists(st.integers(0, 40), max_size=30)
POLICIES = ("split", "truncate_right", "truncate_left", "drop")


def targets_of(masks: list[np.ndarray]):
    """A TargetCount over loss masks, one array of bools per sequence."""

    def count(seq_ids, starts, stops):
        spans = zip(seq_ids.tolist(), starts.tolist(), stops.tolist(), strict=True)
        return np.array([masks[i][start:stop].sum() for i, start, stop in spans], np.int64)

    return count


@st.composite
def corpora(draw):
    lengths = draw(LENGTHS)
    masks = [np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool) for n in lengths]
    return np.array(lengths, np.int32), masks


def cut(
    lengths: np.ndarray, targets: TargetCount | None = None, ids: np.ndarray | None = None, **settings
) -> tuple[Pieces, Ledger]:
    """The pieces that a plan would have, and its account of every token."""
    lengths, wanted = np.asarray(lengths), PlanSettings(**settings)
    pieces, counts, lost = cut_and_count(lengths, ids, wanted, targets)
    return pieces, lost + account(pieces, counts, lengths, wanted.overflow)


def spans(pieces: Pieces) -> list[tuple[int, int, int, int]]:
    columns = (pieces.seq_ids, pieces.starts, pieces.stops, pieces.first_target)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.promise("batch.too-long")
@given(corpora(), st.integers(1, 12), st.sampled_from(POLICIES), st.integers(1, 12), st.booleans())
@settings(deadline=None)
def test_the_ledger_equals_a_walk_over_every_position(corpus, limit, overflow, stride, masked):
    lengths, masks = corpus
    stride = min(stride, limit)
    if not masked:
        masks = [np.ones(n, bool) for n in lengths]
    targets = targets_of(masks) if masked else None
    pieces, ledger = cut(lengths, targets, max_tokens=limit, overflow=overflow, stride=stride)
    trained = context = repeated = 0
    seen = [np.zeros(n, int) for n in lengths]
    for seq_id, start, stop, first_target in spans(pieces):
        assert 0 <= start <= first_target < stop <= lengths[seq_id]
        assert stop - start <= limit
        assert masks[seq_id][first_target:stop].any()
        trained += masks[seq_id][first_target:stop].sum()
        context += (~masks[seq_id][first_target:stop]).sum()
        repeated += first_target - start
        seen[seq_id][first_target:stop] += 1
    assert all((s <= 1).all() for s in seen)
    assert (ledger.tokens("trained"), ledger.tokens("context"), ledger.repeated) == (trained, context, repeated)
    over = lengths[lengths > limit]
    truncated = (over - limit).sum() if overflow.startswith("truncate") else 0
    too_long = over.sum() if overflow == "drop" else 0
    assert ledger.tokens("truncated") == truncated
    assert ledger.dropped.get("too_long", 0) == too_long
    assert sum(ledger.tokens(c) for c in COLUMNS) == ledger.total == lengths.sum()


@given(corpora(), st.integers(1, 12), st.integers(1, 12))
@settings(deadline=None)
def test_windows_cover_every_target_exactly_once(corpus, limit, stride):
    lengths, masks = corpus
    stride = min(stride, limit)
    pieces, ledger = cut(lengths, targets_of(masks), max_tokens=limit, overflow="split", stride=stride)
    seen = [np.zeros(n, int) for n in lengths]
    for seq_id, _, stop, first_target in spans(pieces):
        seen[seq_id][first_target:stop] += 1
    assert all((s[m] == 1).all() for s, m in zip(seen, masks, strict=True))
    assert ledger.tokens("trained") == sum(int(m.sum()) for m in masks)


def test_a_sequence_without_positions_stays_where_it_has_a_target():
    def one_each(seq_ids, starts, stops):
        return (starts == 0).astype(np.int64)

    pieces, ledger = cut(np.array([3, 0, 2]), one_each, max_tokens=8, overflow="error")
    assert spans(pieces) == [(0, 0, 3, 0), (1, 0, 0, 0), (2, 0, 2, 0)]
    assert (ledger.trained, ledger.context, ledger.total) == ({"whole": 2}, {"no_loss": 3}, 5)
    assert ledger.sequences == {"whole": 3, "no_loss": 2}
    pieces, ledger = cut(np.array([3, 0, 2]), max_tokens=8, overflow="error")
    assert (spans(pieces), ledger.dropped) == ([(0, 0, 3, 0), (2, 0, 2, 0)], {"no_target": 0})


@pytest.mark.promise("llm.windows")
def test_windows_start_every_stride_and_keep_the_tail():
    pieces, ledger = cut(np.array([10]), max_tokens=4, overflow="split")
    assert spans(pieces) == [(0, 0, 4, 0), (0, 4, 8, 4), (0, 8, 10, 8)]
    assert (ledger.trained, ledger.repeated, ledger.sequences) == ({"split": 10}, 0, {"split": 1})
    pieces, ledger = cut(np.array([9]), max_tokens=4, overflow="split", stride=2)
    assert spans(pieces) == [(0, 0, 4, 0), (0, 2, 6, 4), (0, 4, 8, 6), (0, 6, 9, 8)]
    assert (ledger.trained, ledger.repeated) == ({"split": 9}, 6)


@pytest.mark.promise("batch.too-long")
def test_each_truncation_keeps_its_side():
    lengths = np.array([3, 7])
    right, ledger = cut(lengths, max_tokens=4, overflow="truncate_right")
    assert spans(right) == [(0, 0, 3, 0), (1, 0, 4, 0)]
    assert ledger.truncated == {"truncate_right": 3}
    assert ledger.trained == {"whole": 3, "rest": 4}
    assert ledger.first_ids["truncate_right"] == (1,)
    left, _ = cut(lengths, max_tokens=4, overflow="truncate_left")
    assert spans(left) == [(0, 0, 3, 0), (1, 3, 7, 3)]


def test_error_names_the_first_long_sequence_its_length_the_limit_and_the_fix():
    with pytest.raises(PlanError, match="sequence 2 has 9 tokens, the limit is 4") as caught:
        cut(np.array([1, 9, 9]), ids=np.array([0, 2, 1]), max_tokens=4, overflow="error")
    assert caught.value.fix.startswith("set plan.overflow to split,")
    assert caught.value.fix.endswith("or raise plan.max_tokens")
    pieces, _ = cut(np.array([1, 4]), max_tokens=4, overflow="error")
    assert len(pieces) == 2


@pytest.mark.parametrize(
    ("most", "context", "named"),
    [
        (4, None, "plan.max_tokens"), (4, 8, "plan.max_tokens"), (None, 4, "model.language.context"),
        (8, 4, "model.language.context"), (4, 4, "plan.max_tokens and model.language.context"),
    ],
)  # fmt: skip
def test_a_sequence_that_is_too_long_is_answered_with_the_field_that_limits_it(most, context, named):
    settings = PlanSettings(overflow="error", max_tokens=most)
    with pytest.raises(PlanError) as caught:
        plan([1, 9], settings, seed=0, epoch=0, max_tokens=context, context_field="model.language.context")
    assert caught.value.what == f"sequence 1 has 9 tokens, the limit is 4 of {named}"
    assert caught.value.fix.endswith(f" or raise {named}")


def test_a_stride_that_leaves_gaps_is_refused():
    with pytest.raises(PlanError, match="leave tokens out"):
        cut(np.array([10]), max_tokens=4, overflow="split", stride=5)


@pytest.mark.promise("batch.labels")
def test_documents_of_one_token_and_pieces_without_a_target_are_counted():
    masks = [np.zeros(0, bool), np.array([True, False]), np.array([False] * 3)]
    pieces, ledger = cut(np.array([0, 2, 3]), targets_of(masks), overflow="split")
    assert spans(pieces) == [(1, 0, 2, 0)]
    assert ledger.dropped == {"no_target": 3}
    assert ledger.sequences == {"no_target": 2, "whole": 1, "no_loss": 1}
    assert ledger.first_ids["no_target"] == (0, 2)
    assert ledger.context == {"no_loss": 1}


def test_sequences_are_chosen_and_repeated_by_id():
    pieces, ledger = cut(np.array([5, 6, 7]), ids=np.array([2, 0, 2]), overflow="split")
    assert spans(pieces) == [(2, 0, 7, 0), (0, 0, 5, 0), (2, 0, 7, 0)]
    assert ledger.total == 19
    assert ledger.sequences == {"whole": 2}
    assert pieces.seq_ids.dtype == np.int64
    assert all(span.dtype == np.int32 for span in (pieces.starts, pieces.stops, pieces.first_target))


@pytest.mark.parametrize("lengths", [[-1], [1.5], [[1, 2]], [2**31]])
def test_lengths_that_are_no_counts_are_refused(lengths):
    with pytest.raises(PlanError, match=r"has length|lengths are"):
        check_lengths(np.array(lengths), np.arange(1))


def test_sequence_ids_outside_the_lengths_are_refused():
    with pytest.raises(PlanError, match="the data has 2 sequences"):
        cut(np.array([1, 1]), ids=np.array([2]), max_tokens=4, overflow="split")


@given(LENGTHS, st.integers(1, 12), st.sampled_from(POLICIES))
@settings(deadline=None)
def test_ledgers_of_two_halves_add_up_to_the_whole(lengths, limit, overflow):
    lengths = np.array(lengths, np.int64)
    ids, middle = np.arange(len(lengths)), len(lengths) // 2
    parts = [cut(lengths, ids=part, max_tokens=limit, overflow=overflow)[1] for part in (ids[:middle], ids[middle:])]
    assert parts[0] + parts[1] == cut(lengths, max_tokens=limit, overflow=overflow)[1]


def test_a_ledger_prints_as_rows_and_json():
    _, ledger = cut(np.array([3, 9]), max_tokens=4, overflow="truncate_right")
    assert ledger.rows() == [
        ("trained", "whole", 3, 0.25, 1, (0,)),
        ("trained", "rest", 4, pytest.approx(1 / 3), 1, (1,)),
        ("truncated", "truncate_right", 5, pytest.approx(5 / 12), 1, (1,)),
    ]
    values = ledger.to_json()
    assert values["total"] == 12
    assert values["truncated"] == {"truncate_right": 5}
    assert values["first_ids"]["rest"] == [1]
    assert Ledger().rows() == []
