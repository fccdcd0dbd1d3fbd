from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.data.sources.example import Example, Turn
from unpad.data.tokens.augment import augment, copies_of, load_synonyms
from unpad.recipes.data import AugmentSettings

SYNONYMS = {"高兴": ("开心", "愉快"), "喜欢": ("喜爱",), "老师": ("教师",), "移动支付": ("手机付款",)}
LONG = "老师喜欢公园，学生高兴地散步。今天天气很好；我们一起读书！" * 40
ALL_ON = AugmentSettings(multiplier=2, synonyms=0.5, delete=0.2, insert=0.3, reorder=0.5)
chinese = st.text(
    st.sampled_from("老师喜欢公园学生高兴今天天气很好我们一起读书，。；！？\n a1😀”"), min_size=1, max_size=60
)


def text(content: str, **fields: Any) -> Example:
    return Example(where="a.txt:1", turns=(Turn("text", content),), **fields)


def only(**rates: float) -> AugmentSettings:
    return AugmentSettings(**{"multiplier": 1, "synonyms": 0.0, **rates})


def changed(content: str, rates: AugmentSettings, seed: int = 0, copy: int = 1) -> str:
    return augment(text(content), rates, SYNONYMS, seed, copy).turns[0].content


@pytest.mark.promise("chinese.synonyms")
def test_zero_rates_change_nothing():
    assert changed(LONG, only()) == LONG


@pytest.mark.promise("chinese.synonyms")
def test_synonyms_at_one_replace_every_known_word():
    result = changed(LONG, only(synonyms=1.0))
    assert not any(word in result for word in SYNONYMS)
    assert (
        result.replace("教师", "老师").replace("喜爱", "喜欢").replace("开心", "高兴").replace("愉快", "高兴") == LONG
    )


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_synonyms_come_at_their_rate(rate):
    content = "老师喜欢。" * 2000
    replaced = sum(changed(content, only(synonyms=rate)).count(word) for word in ("教师", "喜爱"))
    assert abs(replaced / 4000 - rate) < 5 * (rate * (1 - rate) / 4000) ** 0.5


@pytest.mark.promise("chinese.deletion")
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.8])
def test_words_are_deleted_at_their_rate_and_punctuation_stays(rate):
    result = changed("老师喜欢公园，3天！" * 1000, only(delete=rate))
    left = sum(result.count(word) for word in ("老师", "喜欢", "公园", "天"))
    assert abs(left / 4000 - (1 - rate)) < 5 * (rate * (1 - rate) / 4000) ** 0.5
    assert [result.count(mark) for mark in "，！3"] == [1000, 1000, 1000]


@pytest.mark.promise("chinese.deletion")
@settings(deadline=None, max_examples=300)
@given(chinese, st.integers(0, 2**31 - 1))
def test_deletion_never_takes_the_last_word(content, seed):
    result = changed(content, only(delete=0.99), seed)
    assert result
    assert any(map(str.isalpha, result)) == any(map(str.isalpha, content))


@pytest.mark.promise("chinese.insertion")
@pytest.mark.parametrize("rate", [0.1, 0.6, 1.0])
def test_function_words_are_inserted_at_word_ends_at_their_rate(rate):
    content = "老师喜欢公园，ok 12！" * 1000
    inserted = changed(content, AugmentSettings(multiplier=1, synonyms=0.0, insert=rate, insert_words=["呀", "嘛"]))
    assert inserted.replace("呀", "").replace("嘛", "") == content
    count = inserted.count("呀") + inserted.count("嘛")
    assert abs(count / 3000 - rate) <= 5 * (rate * (1 - rate) / 3000) ** 0.5
    assert inserted.count("呀")
    assert inserted.count("嘛")
    pieces = set(inserted.replace("呀", "|").replace("嘛", "|").replace("，", "|").replace("！", "|").split("|"))
    words = ["老师", "喜欢", "公园", "ok 12"]
    runs = {"".join(words[start:end]) for start in range(3) for end in range(start + 1, 4)} | {"", "ok 12"}
    assert pieces <= runs  # never inside a word


@pytest.mark.promise("chinese.clauses")
@settings(deadline=None, max_examples=300)
@given(chinese, st.integers(0, 2**31 - 1))
def test_reordering_keeps_every_character(content, seed):
    assert Counter(changed(content, only(reorder=1.0), seed)) == Counter(content)


@pytest.mark.promise("chinese.clauses")
@pytest.mark.parametrize("content", ["今天天气很好。", "今天天气很好", "\n今天天气很好！\n", "，。！", "好，好。"])
def test_a_single_clause_stays(content):
    assert changed(content, only(reorder=1.0)) == content


@pytest.mark.promise("chinese.deletion")
def test_markers_inside_a_text_stay_in_their_places():
    content = "用户：老师喜欢公园，学生散步。助手：高兴<|endoftext|>老师"
    for seed in range(50):
        result = changed(content, AugmentSettings(multiplier=1, synonyms=1, delete=0.9, insert=1, reorder=1), seed)
        found = [result.find(marker) for marker in ("用户：", "助手：", "<|endoftext|>")]
        assert found[0] == 0
        assert found == sorted(found)
        assert result.count("：") == 2


def conversation() -> Example:
    turns = (
        Turn("system", "你是老师，喜欢读书。"), Turn("user", "老师喜欢公园，学生高兴地散步。"),
        Turn("assistant", "老师喜欢，学生高兴。"), Turn("user", "高兴，散步。"), Turn("assistant", "好。"),
    )  # fmt: skip
    return Example("chat.jsonl:7", turns, split="train", group="g", keywords=("高兴",))


@pytest.mark.promise("chinese.copies")
def test_copies_come_round_after_round():
    examples = [text("老师喜欢，学生高兴。"), conversation()]
    wheres = ["a.txt:1#1", "chat.jsonl:7#1", "a.txt:1#2", "chat.jsonl:7#2"]
    assert [example.where for example in copies_of(examples, ALL_ON, SYNONYMS, 0)] == wheres
    assert copies_of(examples, AugmentSettings(), SYNONYMS, 0) == []


@pytest.mark.promise("chinese.synonyms")
def test_a_copy_depends_on_seed_and_number_and_content_alone():
    one, two = text(LONG), text(LONG + "好")
    copy = partial(augment, settings=ALL_ON, synonyms=SYNONYMS)
    assert copy(one, seed=3, copy=1) == copy(one, seed=3, copy=1)
    versions = [
        copy(one, seed=3, copy=1), copy(one, seed=4, copy=1), copy(one, seed=3, copy=2), copy(two, seed=3, copy=1),
    ]  # fmt: skip
    assert len({version.turns[0].content for version in versions}) == 4
    assert copy(Example("elsewhere:9", one.turns), seed=3, copy=1).turns == versions[0].turns


# --------------------------------------------------------------------------- dictionaries


@pytest.mark.promise("chinese.synonyms")
def test_the_users_groups_win(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes("\ufeff# mine\n\n高兴 乐呵\r\n显卡　图形处理器 GPU\nGPU 加速卡\n".encode())
    synonyms = load_synonyms(path)
    assert synonyms["高兴"] == ("乐呵",)
    assert synonyms["显卡"] == ("图形处理器", "GPU")
    assert synonyms["GPU"] == ("显卡", "图形处理器", "加速卡")
    assert "开心" in synonyms["愉快"]
