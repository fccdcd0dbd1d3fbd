"""Pairs of texts that are near-duplicates: by their own windows, and exactly those."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.data.sources import leaks
from unpad.data.sources.leaks import PASSAGE, SHORTEST, TextSearch, near_sets, plain


def windows_of(text: str) -> set[str]:
    """Windows of a text of letters that stand for one each."""
    return {text[i : i + PASSAGE] for i in range(len(text) - PASSAGE + 1)} if len(text) >= SHORTEST else set()


def near_pairs(texts: list[str]) -> set[frozenset[int]]:
    """Every pair of near-duplicates among different texts, compared one by one."""
    number = Counter(window for text in texts for window in windows_of(text))
    sets = [{window for window in windows_of(text) if number[window] <= leaks.MOST_TEXTS} for text in texts]
    found = set()
    for one in range(len(texts)):
        for other in range(one):
            shared = [window for window in sets[one] & sets[other]]
            weight = sum(round(leaks.WHOLE / math.log2(number[window])) for window in shared)
            alone = min(len(sets[one]), len(sets[other])) - len(shared)
            if weight and weight >= leaks.WHOLE * alone:
                found.add(frozenset((one, other)))
    return found


def matched(texts: list[str]) -> set[frozenset[int]]:
    """The pairs that a search finds."""
    search = TextSearch(texts)
    search.count(texts)
    return {frozenset((near.text, near.other)) for near in search.match(texts) if near.text != near.other}


PART = st.sampled_from(["abcdefghijklmnop", "qrstuvwxyzabcdefgh", "aaaaabbbbbcccccddddd", "ab"])


@pytest.mark.promise("data.near-duplicates")
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(PART, max_size=4).map("".join), max_size=12, unique=True),
    st.integers(2, 5), st.integers(1, 40),
)  # fmt: skip
def test_a_search_finds_every_pair_and_no_other(texts: list[str], most: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaks, "MOST_TEXTS", most)
        patch.setattr(leaks, "BLOCK", block)
        pairs = near_pairs(texts)
        assert matched(texts) == pairs
        sets = near_sets(texts)
    assert all(len({int(sets[index]) for index in pair}) == 1 for pair in pairs)
    reach = {index: {index} for index in range(len(texts))}
    for _ in texts:
        for one, other in map(tuple, pairs):
            for index in reach[one] | reach[other]:
                reach[index] = reach[one] | reach[other]
    assert len(set(sets.tolist())) == len({frozenset(those) for those in reach.values()})


SIGNED = "This is only general advice; ask your doctor before you change anything."
DISTINCT = [
    ("Be consistent.", "Perl is designed to give you several ways to do anything, so be consistent."),
    ("Wasting time is an important part of living.", "Time is money, an important part of it wasted; living is not."),
    ("明天去公园散步好吗？", "明天去图书馆看书好吗？"),
    ("What is 17 times 23?", "What is 19 times 21?"),
    ("ตัวอย่างประโยคภาษาไทยสั้น", "อีกประโยคหนึ่งที่ไม่เหมือนกันเลย"),
    ("😀😎🎉🎉🥳🥳👍👍👍", "👍👍👍🥳🥳😎😀😀🎉🎉"),
]
COPIES = [
    ("Never put off until tomorrow what you can avoid altogether.", "Never put off until tomorrow what you can avoid."),
    ("昨天下了一场小雨，院子里的桂花开了。", "昨天下了一场小雨。院子里的桂花全开了！"),
    ("トンネルを抜けるとそこは雪国でした。", "長いトンネルを抜けるとそこは雪国でした"),
    ("안녕하세요, 오늘은 날씨가 아주 좋아서 공원에 갑니다.", "오늘은 날씨가 아주 좋아서 공원에 갑니다"),
    ("วันนี้อากาศดีมากเราจะไปเดินเล่นที่สวนสาธารณะ", "วันนี้อากาศดีเราจะไปเดินเล่นที่สวนสาธารณะ"),
    ("def mean(values):\n    return sum(values) / len(values)", "def mean(values, /): return sum(values)/len(values)"),
    ("我用 unpad 训练了一个小模型，效果很好。", "我用ｕｎｐａｄ训练了一个小模型，效果不错。"),
]  # fmt: skip


@pytest.mark.parametrize("pair", DISTINCT)
def test_short_texts_about_other_things_are_no_near_duplicates(pair: tuple[str, str]) -> None:
    assert len(set(near_sets(list(pair)).tolist())) == 2


@pytest.mark.promise("data.near-duplicates")
@pytest.mark.parametrize("pair", COPIES)
def test_copies_with_a_few_changes_are_near_duplicates_in_every_script(pair: tuple[str, str]) -> None:
    assert len(set(near_sets(list(pair)).tolist())) == 1


@pytest.mark.promise("data.near-duplicates")
def test_a_passage_of_many_texts_makes_no_copies_and_hides_none() -> None:
    random = np.random.default_rng(0)
    bodies = ["".join(map(chr, random.integers(97, 123, 40))) for _ in range(80)]
    texts = [f"{body} {SIGNED}" for body in bodies]
    for number in (12, 80):  # a passage of a few texts weighs little, one of many nothing
        assert len(set(near_sets(texts[:number]).tolist())) == number
    changed = [*texts, bodies[3][:36] + "else" + SIGNED]
    sets = near_sets(changed)
    assert (sets == sets[80]).nonzero()[0].tolist() == [3, 80]


def test_equal_texts_are_near_duplicates_however_short_and_often_they_are() -> None:
    texts = ["Yes.", "yes", *["A sentence that many rows repeat to the letter."] * 100, "no"]
    assert np.bincount(near_sets(texts)).tolist() == [2, 100, 1]
    assert near_sets([]).tolist() == []
    assert plain("Yes.") == plain("yes")
