import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.data.sources.example import SPLIT_NAMES, Example, Turn
from unpad.data.sources.split import (
    Split,
    Wanted,
    assign,
    assign_by_hash,
    components,
    content_key,
    divide,
    groups_on_both_sides,
    mixed,
    numbered,
    share_out,
    split_number,
    take_share,
    taken,
)
from unpad.recipes.data import DataSettings


def undeclared(count: int) -> np.ndarray:
    return np.full(count, -1, np.int8)


def keys(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)


def grouped(groups: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.arange(len(groups)), groups)]


@pytest.mark.promise("data.holdout")
@settings(deadline=None)
@given(st.integers(2, 300), st.floats(0.001, 0.999), st.integers(0, 9))
def test_the_share_is_exact_and_depends_on_the_seed(num: int, holdout: float, seed: int) -> None:
    side = assign(keys(num, seed), undeclared(num), holdout, seed)
    assert side.dtype == np.uint8
    assert int(side.sum()) == min(max(round(holdout * num), 1), num - 1)
    assert assign(keys(40), undeclared(40), 0.25, 0).sum() == 10
    assert not np.array_equal(assign(keys(40), undeclared(40), 0.25, 0), assign(keys(40), undeclared(40), 0.25, 1))


@pytest.mark.promise("data.holdout")
def test_every_class_has_its_share_and_none_is_held_out_as_a_whole() -> None:
    classes = np.repeat([0, 1, 2, 3], [50, 30, 19, 1])
    side = assign(keys(100), undeclared(100), 0.2, 0, classes=classes)
    assert np.bincount(classes[side == 1], minlength=4).tolist() == [10, 6, 4, 0]
    assert share_out(np.array([1, 1, 1]), 3).tolist() == [1, 1, 1]
    assert share_out(np.array([10, 1]), 10).tolist() == [9, 1]
    assert share_out(np.array([1, 9]), 7).tolist() == [0, 7], "no class as a whole, though 0.7 is nearer to 1"
    assert assign(keys(4), undeclared(4), 0.9, 0, classes=np.arange(4)).sum() == 3


@pytest.mark.promise("data.holdout")
@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=40), st.floats(0.05, 0.95), st.integers(0, 5))
def test_groups_stay_whole_and_come_as_near_to_the_share_as_they_allow(groups, holdout, seed):
    group = np.array(groups)
    side = assign(keys(len(group)), undeclared(len(group)), holdout, seed, links=grouped(group))
    assert groups_on_both_sides(group, side) == 0
    sizes = np.bincount(group)[np.unique(group)]
    if len(sizes) > 1:
        sums = {0}
        for size in sizes.tolist():
            sums |= {done + size for done in sums}
        sums -= {0, len(group)}
        assert abs(int(side.sum()) - round(holdout * len(group))) == min(
            abs(one - round(holdout * len(group))) for one in sums
        )


def test_many_large_units_are_chosen_without_looking_at_all_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unpad.data.sources.split.MOST_WORK", 0)
    assert take_share(np.full(50, 7), np.zeros(50, np.int64), 100, 1, 349).sum() == 14


@pytest.mark.parametrize("version", [1, 2])
def test_the_order_of_rows_moves_nobody(version: int) -> None:
    some = keys(500)
    order = np.random.default_rng(2).permutation(500)
    data = DataSettings(holdout=0.1, split_version=version)
    together = np.empty(500, np.uint8)
    together[order] = divide(some[order], undeclared(500), data, 3)
    assert np.array_equal(together, divide(some, undeclared(500), data, 3))


@pytest.mark.promise("data.near-duplicates")
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.sampled_from([-1, 0, 1, 2])), min_size=1),
    st.floats(0, 0.9),
    st.integers(0, 9),
)
def test_declarations_hold_and_equal_documents_share_a_side(documents, holdout, seed):
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


def test_a_group_follows_the_rows_that_declare_a_part_and_is_counted_if_they_disagree() -> None:
    group = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    declared = np.array([1, -1, -1, 2, -1, 0, 1, -1], np.int8)
    side = assign(keys(8), declared, 0.5, 0, links=grouped(group))
    assert side.tolist() == [1, 1, 1, 2, 2, 0, 1, 0]
    assert groups_on_both_sides(group, side) == 1


def test_rows_of_the_test_part_are_taken_only_when_they_are_asked_for() -> None:
    declared = np.array([-1, 0, 1, 2, 2], np.int8)
    data = DataSettings(holdout=0.0)
    assert taken(divide(keys(5), declared, data, 0), Wanted.LEARNING).tolist() == [True, True, True, False, False]
    assert taken(divide(keys(5), declared, data, 0, Wanted.TEST), Wanted.TEST).tolist() == [False] * 3 + [True] * 2
    new = divide(keys(5), declared, data, 0, Wanted.NEW)
    assert new.tolist() == [2, 0, 1, 2, 2]
    assert taken(new, Wanted.NEW).all()


def test_every_name_of_a_part_is_known_in_any_case() -> None:
    assert {name for name, part in SPLIT_NAMES.items() if part == "holdout"} == {
        "valid", "validation", "val", "dev", "tuning", "holdout",
    }  # fmt: skip
    assert [split_number(name) for name in ("Train", " VAL ", "held_out", "test", "some", "")] == [0, 1, 2, 2, -1, -1]
    assert split_number("tuning") == Split.HOLDOUT


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(-1, 8)), max_size=30))
def test_components_equal_a_plain_walk(pairs: list[tuple[int, int]]) -> None:
    rows, links = np.array([row for row, _ in pairs], np.int64), np.array([key for _, key in pairs], np.int64)
    found = components(13, [(rows, links)])
    together = {row: {row} for row in range(13)}
    for key in {key for _, key in pairs} - {-1}:
        merged = set().union(*(together[row] for row, other in pairs if other == key))
        for row in merged:
            together[row] = merged
    for row in range(13):
        assert set(np.flatnonzero(found == found[row]).tolist()) == together[row]
    assert numbered(["b", "", "a", "b", None]).tolist() == [0, -1, 1, 0, -1]


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


def test_groups_are_on_both_sides_whether_the_other_part_is_valid_or_test() -> None:
    groups = numbered(["a", "a", "b", "b", "c", "c", "d", "d", "", ""])
    train, valid, test = Split.TRAIN, Split.HOLDOUT, Split.TEST
    side = np.array([train, test, valid, train, train, train, valid, test, train, test], np.uint8)
    assert groups_on_both_sides(groups, side) == 2


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([-1, -1, -1, 0, 1])), max_size=8),
    st.sampled_from([0.0, 0.001, 0.5, 0.999]),
    st.integers(0, 9),
)
def test_the_rule_of_earlier_runs_equals_its_words(rows: list[tuple[int, int]], holdout: float, seed: int) -> None:
    content = np.array([key for key, _ in rows], np.uint64)
    found = assign_by_hash(content, np.array([side for _, side in rows], np.int8), holdout, seed)
    drawn = mixed(content ^ mixed(np.array([seed], np.uint64))).tolist()
    told = {key: min(side for one, side in rows if one == key and side >= 0) for key, side in rows if side >= 0}
    sides = {key: told.get(key, int(hashed < holdout * 2.0**64)) for (key, _), hashed in zip(rows, drawn, strict=True)}
    free = sorted((hashed, key) for (key, _), hashed in zip(rows, drawn, strict=True) if key not in told)
    after = [side if side >= 0 else sides[key] for key, side in rows]
    if holdout and len(sides) > 1 and free and len(set(after)) == 1:
        moved = free[-1][1] if after[0] else free[0][1]
        after = [1 - side if key == moved else side for side, (key, _) in zip(after, rows, strict=True)]
    assert found.tolist() == after
