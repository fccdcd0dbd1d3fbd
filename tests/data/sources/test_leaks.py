import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.work import counted
from unpad.data.sources import leaks
from unpad.data.sources.leaks import N, report


def random_texts(count: int, length: int, seed: int = 0) -> list[str]:
    points = np.random.default_rng(seed).integers(0x4E00, 0x9FA5, (count, length))
    return ["".join(map(chr, row)) for row in points]


def test_planted_duplicates_are_found_and_nothing_else() -> None:
    texts = random_texts(200, 60)
    split = np.zeros(200, np.uint8)
    split[:20] = 1
    texts[0] = texts[100]  # equal
    texts[1] = texts[101][:45] + texts[1][45:]  # 38 of 53 windows
    texts[2] = texts[102][:20] + texts[2][20:]  # 13 of 53 windows
    texts[3] = texts[103]  # equal, but a phrasing of a trained fact on purpose
    groups = [""] * 200
    groups[3] = groups[150] = "fact"
    groups[4] = "alone"
    found = report(texts, split, groups, seed=0)
    assert (found.num_holdout, found.num_exact, found.num_near, found.num_declared) == (20, 1, 1, 1)
    assert [index for index, _ in found.worst] == [0, 1]
    assert found.worst[1][1] == pytest.approx(38 / 53, abs=1e-4)
    assert "1 equal" in found.lines()[0]
    assert "document 1: 72%" in found.lines()[2]


def test_a_short_text_leaks_only_when_it_is_equal() -> None:
    texts = ["你好", "你好", "再见", "他说再见，然后走了，没有回头"]
    found = report(texts, np.array([1, 0, 1, 0], np.uint8), [""] * 4, seed=0)
    assert (found.num_exact, found.num_near) == (1, 0)


@pytest.mark.parametrize("split", [[], [0, 0], [1, 1]])
def test_an_empty_side_leaks_nothing(split: list[int]) -> None:
    found = report(["甲" * 20] * len(split), np.array(split, np.uint8), [""] * len(split), seed=0)
    assert (found.num_exact, found.num_near, found.worst) == (0, 0, [])


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.text("ab", max_size=30), max_size=8),
    st.lists(st.text("ab", max_size=30), max_size=8),
    st.integers(1, 40),
)
def test_shares_equal_a_plain_recount(held: list[str], trained: list[str], chunk: int) -> None:
    windows = {text[i : i + N] for text in trained for i in range(len(text) - N + 1)}
    expected = []
    for text in held:
        own = [text[i : i + N] for i in range(len(text) - N + 1)]
        expected.append(sum(window in windows for window in own) / max(len(own), 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaks, "CHUNK_CHARACTERS", chunk)
        assert leaks._shares(held, trained, seed=1).tolist() == expected


def test_twenty_thousand_documents_take_linear_time() -> None:
    work = []
    for num in (2_000, 20_000):
        texts, split = random_texts(num, 200), (np.arange(num) % 20 == 0).astype(np.uint8)
        found, calls = counted(lambda t=texts, s=split: report(t, s, [""] * len(t), seed=0))
        assert found.num_near == 0
        work.append(calls)
    assert work[1] < 15 * work[0]  # comparing all pairs makes a hundred times as many
