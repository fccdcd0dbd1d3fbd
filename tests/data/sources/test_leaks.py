from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.work import counted
from unpad.data.sources import leaks
from unpad.data.sources.alike import changes
from unpad.data.sources.leaks import N, near_pairs, report
from unpad.data.sources.split import Split


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
    assert [(leak.document, leak.source) for leak in found.worst] == [(0, 100), (1, 101)]
    assert found.worst[1].share == pytest.approx(38 / 53, abs=1e-4)
    assert found.num_groups == 1
    assert "1 equal" in found.head()
    assert "of them:" not in found.head(), "all are named"
    assert "(1 groups are on both sides)" in found.head()
    assert "a.jsonl:2: 72% of it occurs in training, most of it in a.jsonl:102" in found.worst[1].describe(
        "a.jsonl:2", "a.jsonl:102"
    )


def test_exactly_half_is_a_near_duplicate_and_less_is_none() -> None:
    text, other = random_texts(2, 100)
    for length, near in ((23, 1), (22, 0)):  # 8 of 16 windows, 7 of 15
        held = text[: length - 8] + other[40:48]
        shared = length - 8 - N + 1
        found = report([held, text], np.array([1, 0], np.uint8), ["", ""], seed=0)
        assert (found.num_near, 2 * shared >= length - N + 1) == (near, bool(near))
        for both in ([held, text], [text, held]):  # as two of a corpus
            assert len(near_pairs(both, seed=0)[0]) == 2 * near


ALTERED = {
    "half-width": lambda text: text.translate(str.maketrans("，。！？", ",.!?")),
    "full-width": lambda text: text.replace("2026", "２０２６").replace("abc", "ＡＢＣ"),
    "spaces": lambda text: " ".join(text),
    "one in six": lambda text: "".join("某" if i % 6 == 3 else c for i, c in enumerate(text)),
}


@pytest.mark.parametrize("how", ALTERED)
def test_altered_copies_are_found_and_name_their_training_row(how: str) -> None:
    base = random_texts(300, 40)
    base = [text[:10] + "，" + text[10:20] + "2026" + text[20:30] + "abc。" + text[30:] for text in base]
    short = ["今天的天气很好，我们去公园。", "小猫喜欢看见红色的花。", "他每天早上都喝热茶，然后上班。"]
    trained = [*base, *short]
    chosen = [*range(7), 300, 301, 302]
    texts = [*trained, *(ALTERED[how](trained[i]) for i in chosen)]
    split = np.array([0] * len(trained) + [1] * 10, np.uint8)
    found = report(texts, split, [""] * len(texts), seed=0)
    assert found.num_exact + found.num_near == 10
    assert {leak.document - len(trained): leak.source for leak in found.worst} == dict(enumerate(chosen))


def test_sentences_of_one_form_about_other_things_are_no_copies() -> None:
    forms = ["{a}加{b}等于多少？{a}加{b}等于{c}。", "请问{a}乘{b}是多少，怎么算？答案是{c}。"]
    numbers = [(a, b) for a in range(11, 19) for b in range(21, 29)]
    texts = [form.format(a=a, b=b, c=a + b) for form in forms for a, b in numbers]
    texts += random_texts(50, 30, seed=1)
    split = (np.arange(len(texts)) % 9 == 0).astype(np.uint8)
    different = [texts[i] for i in np.flatnonzero(split) if i >= 128]
    found = report(texts, split, [""] * len(texts), seed=0)
    assert found.num_exact == 0
    assert different
    assert all(leak.document < 128 for leak in found.worst)


@settings(deadline=None, max_examples=200)
@given(st.text("ab好", max_size=12), st.text("ab好", max_size=12))
def test_changes_equal_those_of_the_table_of_all_prefixes(one: str, other: str) -> None:
    row = list(range(len(other) + 1))
    for i, mine in enumerate(one, 1):
        last, row[0] = row[0], i
        for j, theirs in enumerate(other, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (mine != theirs))
    assert changes(one, other) == row[-1]


def test_near_duplicates_are_tied_together() -> None:
    texts = random_texts(30, 60)
    texts[7] = texts[3][:35] + texts[7][35:]
    texts[9] = ALTERED["one in six"](texts[4])
    rows, keys = near_pairs(texts, seed=0)
    pairs = {frozenset(rows[keys == key].tolist()) for key in set(keys.tolist())}
    assert pairs == {frozenset((3, 7)), frozenset((4, 9))}


@pytest.mark.parametrize("order", [1, -1])
def test_a_text_and_a_beginning_of_it_are_tied_in_either_order(order: int) -> None:
    texts = random_texts(3, 60)
    texts = [texts[0], texts[1][:20], texts[1], texts[2]][::order]
    rows, _ = near_pairs(texts, seed=0)
    assert set(rows.tolist()) == {1, 2}


def test_a_short_text_leaks_only_when_it_is_equal() -> None:
    texts = ["你好", "你好", "再见", "他说再见，然后走了，没有回头"]
    found = report(texts, np.array([1, 0, 1, 0], np.uint8), [""] * 4, seed=0)
    assert (found.num_exact, found.num_near) == (1, 0)


def test_blocks_of_training_documents_give_the_same_report_and_other_parts_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = random_texts(60, 40)
    texts[1], texts[2], texts[3] = texts[50], texts[51][:30] + texts[2][30:], ALTERED["one in six"](texts[52])
    texts[4] = texts[1]
    split = np.array([2] * 4 + [1] + [0] * 55, np.uint8)
    groups = ["a", *[""] * 58, "a"]
    found = report(texts, split, groups, seed=0, part=Split.TEST)
    assert [(leak.document, leak.source) for leak in found.worst] == [(1, 50), (2, 51), (3, 52)]
    assert found.head() == (
        "test part, 4 documents: 1 equal to a trained one, 2 near-duplicates, 1 declared phrasings of trained facts "
        "(1 groups are on both sides)"
    )
    assert [leak.document for leak in report(texts, split, groups, seed=0).worst] == [4]
    monkeypatch.setattr(leaks, "BLOCK_CHARACTERS", 1)  # then a block has four times the characters of the test part
    calls = [0]
    add = leaks._Search.add

    def counting(self: leaks._Search, *block: Any) -> None:
        calls[0] += 1
        add(self, *block)

    monkeypatch.setattr(leaks._Search, "add", counting)
    assert report(texts, split, groups, seed=0, part=Split.TEST) == found
    assert calls[0] == 4


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
        patch.setattr("unpad.data.sources.windows.CHUNK_CHARACTERS", chunk)
        search = leaks._Search(held, seed=1)
        for first in range(0, len(trained), 3):
            search.add(trained[first : first + 3], range(first, first + 3)[: len(trained) - first])
        assert search.shares().tolist() == expected


@pytest.mark.slow
def test_twenty_thousand_documents_take_linear_time() -> None:
    work = []
    for num in (2_000, 20_000):
        texts, split = random_texts(num, 200), (np.arange(num) % 20 == 0).astype(np.uint8)
        found, calls = counted(lambda t=texts, s=split: report(t, s, [""] * len(t), seed=0))
        assert found.num_near == 0
        work.append(calls)
    assert work[1] < 15 * work[0]  # comparing all pairs makes a hundred times as many
