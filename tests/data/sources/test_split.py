import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.data.sources.example import Example, Turn
from unpad.data.sources.split import assign, content_key


def undeclared(count: int) -> np.ndarray:
    return np.full(count, -1, np.int8)


def keys(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)


def test_the_share_is_about_right_and_depends_on_the_seed() -> None:
    many = np.arange(100_000, dtype=np.uint64)
    side = assign(many, undeclared(100_000), 0.05, seed=1)
    assert side.dtype == np.uint8
    assert abs(side.mean() - 0.05) < 0.004
    assert np.array_equal(side, assign(many, undeclared(100_000), 0.05, seed=1))
    assert not np.array_equal(side, assign(many, undeclared(100_000), 0.05, seed=2))


def test_other_documents_and_their_order_move_nobody() -> None:
    some, more = keys(500), keys(700, seed=1)
    alone = assign(some, undeclared(500), 0.1, seed=3)
    both = np.concatenate([more, some])
    order = np.random.default_rng(2).permutation(1200)
    together = np.empty(1200, np.uint8)
    together[order] = assign(both[order], undeclared(1200), 0.1, seed=3)
    assert np.array_equal(together[700:], alone)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.sampled_from([-1, 0, 1])), min_size=1),
    st.floats(0, 0.9),
    st.integers(0, 9),
)
def test_declarations_hold_and_equal_documents_share_a_side(
    documents: list[tuple[int, int]], holdout: float, seed: int
) -> None:
    content = np.array([key for key, _ in documents], np.uint64)
    declared = np.array([side for _, side in documents], np.int8)
    side = assign(content, declared, holdout, seed)
    assert np.array_equal(side[declared >= 0], declared[declared >= 0])
    for key in set(content.tolist()):
        same = content == key
        said = set(declared[same & (declared >= 0)].tolist())
        free = set(side[same & (declared == -1)].tolist())
        assert len(free) <= 1
        if said and free:
            assert free == {min(said)}
    contents_of_free = set(content[declared == -1].tolist())
    if holdout > 0 and len(contents_of_free) > 1 and (declared == -1).all():
        assert set(side.tolist()) == {0, 1}
    if holdout == 0 and (declared == -1).all():
        assert not side.any()


def test_two_documents_are_enough_to_hold_one_out() -> None:
    for seed in range(20):
        assert assign(keys(2, seed), undeclared(2), 0.001, seed).sum() == 1
        assert assign(keys(2, seed), undeclared(2), 0.999, seed).sum() == 1
    assert assign(keys(1), undeclared(1), 0.001, 0).sum() == 0
    assert assign(keys(0), undeclared(0), 0.5, 0).shape == (0,)


@pytest.mark.parametrize(
    "other",
    [
        (Turn("user", "甲"), Turn("assistant", "丙")),
        (Turn("system", "甲"), Turn("assistant", "乙")),
        (Turn("user", "甲乙"),),
        (Turn("user", "甲"), Turn("assistant", "乙"), Turn("user", "丁")),
    ],
)
def test_the_key_is_of_roles_and_contents_only(other: tuple[Turn, ...]) -> None:
    turns = (Turn("user", "甲"), Turn("assistant", "乙"))
    key = content_key(Example("a:1", turns))
    assert key == content_key(Example("b:2", turns, "train", "group", ("word",)))
    assert 0 <= key < 2**64
    assert key != content_key(Example("a:1", other))
