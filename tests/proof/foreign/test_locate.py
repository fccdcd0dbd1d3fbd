"""Sequences are found in batches by their content."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unpad
from tests.proof.foreign.toy import Causal, flat, padded
from unpad.proof.foreign.update import Cells, Span, locate

tokens = st.lists(st.integers(1, 4), min_size=1, max_size=6)  # so few that sequences occur within others
MODEL = Causal(width=8)


@pytest.mark.promise("proof.formats")
@given(st.lists(tokens, min_size=2, max_size=6), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=80)
def test_whole_sequences_are_found_between_their_boundaries(sequences, random):
    order = list(range(len(sequences)))
    random.shuffle(order)  # type: ignore[attr-defined]
    row = [token for index in order for token in sequences[index]]
    starts, at = [], 0
    for index in order:
        starts.append((0, at))
        at += len(sequences[index])
    pieces = locate(Cells([row], starts), sequences)
    assert sorted(piece.sequence for piece in pieces) == sorted(order)
    assert {(0, piece.start) for piece in pieces} == set(starts)
    for piece in pieces:
        assert row[piece.start : piece.start + piece.length] == sequences[piece.sequence]


@pytest.mark.promise("proof.formats")
@given(st.lists(tokens, min_size=2, max_size=5), st.sampled_from(["packed", "right", "left"]))
@settings(deadline=None, max_examples=25)
def test_repeated_and_nested_sequences_raise_no_alarm(sequences, kind):
    if all(len(one) == 1 for one in sequences):
        sequences[0] = [1, 2]
    collate = {"packed": flat, "right": padded, "left": lambda rows: padded(rows, "left")}[kind]
    certificate = unpad.prove_callable(MODEL, collate, sequences)
    failed = {finding.kind for finding in certificate.failed}
    assert failed <= ({"padding", "logits", "loss", "gradient"} if kind == "left" else set()), str(certificate)


def test_cut_and_torn_sequences_are_found_in_pieces():
    whole = list(range(10, 22))
    rows: list[list[int | None]] = [[1, 2, 3, *whole[:5]], [*whole[5:9], 1, 2, 4, 5]]
    pieces = locate(Cells(rows), [whole, [1, 2, 3], [1, 2, 4, 5]])
    assert set(pieces) == {Span(1, 0, 0, 0, 3), Span(2, 0, 1, 4, 4), Span(0, 0, 0, 3, 5), Span(0, 5, 1, 0, 4)}


def test_a_missing_sequence_has_no_piece_and_masked_cells_are_no_tokens():
    assert locate(Cells([[None, 5, 6, 7]]), [[4, 5, 6, 7], [8, 9]]) == [Span(0, 1, 0, 1, 3)]
