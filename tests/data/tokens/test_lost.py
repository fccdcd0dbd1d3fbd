"""Characters that no known token covers."""

import pytest

from unpad.data.tokens.lost import uncovered

UNKNOWN = 1


@pytest.mark.parametrize(
    ("ids", "offsets", "spaces_count", "lost"),
    [
        ([5, 6], [(0, 1), (2, 3)], False, ""),  # the decoder writes the blank
        ([5, 6], [(0, 1), (2, 3)], True, " "),
        ([5, UNKNOWN, 6], [(0, 1), (1, 2), (2, 3)], False, " "),  # the blank has become the unknown token
        ([5, UNKNOWN], [(0, 1), (1, 3)], False, " b"),
        ([UNKNOWN, 7], [(0, 1), (0, 3)], True, ""),
        ([], [], False, "ab"),
    ],
)
def test_a_blank_is_lost_where_it_became_the_unknown_token(ids, offsets, spaces_count, lost):
    assert uncovered("a b", ids, offsets, UNKNOWN, spaces_count) == lost
