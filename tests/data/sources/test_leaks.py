"""Near-duplicates of training documents in other parts: which are reported, and that none is left."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.data.sources import leaks
from unpad.data.sources.leaks import NEW, Document, compare, near_sets, report
from unpad.data.sources.split import Split


def random_texts(count: int, length: int, seed: int = 0) -> list[str]:
    points = np.random.default_rng(seed).integers(0x4E00, 0x9FA5, (count, length))
    return ["".join(map(chr, row)) for row in points]


@pytest.mark.promise("data.near-duplicates")
def test_planted_duplicates_are_found_and_nothing_else() -> None:
    texts = random_texts(200, 60)
    split = np.zeros(200, np.uint8)
    split[:20] = 1
    texts[0] = texts[100]  # equal
    texts[1] = texts[101][:45] + texts[1][45:]  # 41 of 56 windows
    texts[2] = texts[102][:20] + texts[2][20:]  # 16 of 56
    texts[3] = texts[103]  # equal, but a phrasing of a trained fact on purpose
    texts[5] = texts[105][:30] + "，" + texts[105][30:]
    groups = [""] * 200
    groups[3] = groups[150] = "fact"
    groups[4] = "alone"
    found = report(texts, split, groups)
    assert (found.num_holdout, found.num_exact, found.num_near, found.num_declared) == (20, 1, 2, 1)
    assert [(leak.document, leak.source, leak.how) for leak in found.worst] == [
        (0, 100, "equal"), (5, 105, "alike"), (1, 101, "shares"),
    ]  # fmt: skip
    assert found.worst[2].share == pytest.approx(41 / 56, abs=1e-4)
    assert found.num_groups == 1
    assert "1 equal" in found.head()
    assert "of them:" not in found.head(), "all are named"
    assert "(1 group on both sides)" in found.head()
    assert replace(found, places=[("a:1", "a:9")] * 3).lines()[1:] == [
        "  a:1: equal to a:9",
        "  a:1: equal to a:9 but for punctuation, spaces, case or width",
        "  a:1: has 73% of the shorter text in common with a:9",
        "  do: set data.near_duplicates=together; if rows of both parts declare theirs with split, correct or remove "
        "these",
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_a_text_and_a_beginning_of_it_are_near_duplicates_in_either_order(order: int) -> None:
    texts = random_texts(3, 60)
    texts = [texts[0], texts[1][:20], texts[1], texts[2]][::order]
    sets = near_sets(texts)
    assert sets[1] == sets[2]
    assert len(np.unique(sets)) == 3
    for held in (1, 2):
        split = (np.arange(4) == held).astype(np.uint8)
        assert report(texts, split, [""] * 4).num_near == 1


def test_blocks_of_training_documents_give_the_same_report_and_other_parts_are_named(monkeypatch):
    texts = random_texts(60, 40)
    texts[1], texts[2], texts[3] = texts[50], texts[51][:30] + texts[2][30:], " ".join(texts[52])
    texts[4] = texts[1]
    split = np.array([2] * 4 + [1] + [0] * 55, np.uint8)
    groups = ["a", *[""] * 58, "a"]
    found = report(texts, split, groups, part=Split.TEST)
    assert [(leak.document, leak.source) for leak in found.worst] == [(1, 50), (3, 52), (2, 51)]
    assert found.head() == (
        "test part, 4 documents: 1 equal to a trained one, 2 near-duplicates, 1 declared phrasing of trained facts "
        "(1 group on both sides)"
    )
    assert [leak.document for leak in report(texts, split, groups).worst] == [4]
    monkeypatch.setattr(leaks, "BLOCK_CHARACTERS", 100)
    assert report(texts, split, groups, part=Split.TEST) == found


@pytest.mark.promise("data.near-duplicates")
def test_new_texts_that_the_corpus_holds_get_the_report_of_training() -> None:
    words = random_texts(12, 9, seed=5)
    draw = np.random.default_rng(2)
    texts = ["".join(words[i] for i in draw.integers(0, 12, 4)) for _ in range(60)]
    split = (np.arange(60) % 5 == 0).astype(np.uint8)
    mine = report(texts, split, [""] * 60)
    assert 0 < mine.num_near < 12
    held = np.flatnonzero(split).tolist()
    documents = [Document(i, text, "", split[i] == Split.TRAIN) for i, text in enumerate(texts)]
    new = compare([texts[i] for i in held], [""] * len(held), lambda: documents, NEW, numbers=held)
    assert (new.num_exact, new.num_near, new.worst) == (mine.num_exact, mine.num_near, mine.worst)
    assert "leave these rows out" in replace(new, places=[("a", "b")] * len(new.worst)).lines()[-1]


@pytest.mark.parametrize("split", [[], [0, 0], [1, 1]])
def test_an_empty_side_leaks_nothing(split: list[int]) -> None:
    found = report(["甲" * 20] * len(split), np.array(split, np.uint8), [""] * len(split))
    assert (found.num_exact, found.num_near, found.worst) == (0, 0, [])


PHRASES = [
    "the early worm gets the bird ",
    "what this country needs is a ",
    "good five cent ",
    "nickel ",
    "小楼昨夜又东风 ",
]


@pytest.mark.promise("data.near-duplicates")
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from(PHRASES), max_size=6).map("".join), min_size=2, max_size=20),
    st.integers(0, 2**20 - 1),
)
def test_no_report_has_a_near_duplicate_where_they_are_kept_together(texts: list[str], drawn: int) -> None:
    sets = near_sets(texts)
    split = np.array([drawn >> number & 1 for number in sets.tolist()], np.uint8)
    found = report(texts, split, [""] * len(texts))
    assert (found.num_exact, found.num_near) == (0, 0)
    for one in range(len(texts)):  # and what is not together may be reported: each alone on its side
        alone = report(texts, (np.arange(len(texts)) == one).astype(np.uint8), [""] * len(texts))
        assert alone.num_exact + alone.num_near == int((sets == sets[one]).sum() > 1)
