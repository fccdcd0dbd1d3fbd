"""Answers are judged as the official evaluation judges them, and never by a part of them."""

import pytest

from unpad.evaluation.vqa import normalise, vqa_accuracy


@pytest.mark.promise("vqa.answers")
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The Cat!", "cat"), ("a dog", "dog"), ("two", "2"), ("None", "0"), ("1,000", "1000"), ("3.5 m.", "3.5 m"),
        ("dont know", "don't know"), ("red/blue", "red blue"), ("红色。", "红色"), ("  An\tapple\n", "apple"),
    ],
)  # fmt: skip
def test_answers_are_normalised(answer, expected):
    assert normalise(answer) == expected


WITHOUT = (
    "aint arent cant couldnt didnt doesnt dont hadnt hasnt havent hes isnt its shes shouldnt thats theres theyre wasnt "
    "werent whats wont wouldnt youre"
)
WITH = (
    "ain't aren't can't couldn't didn't doesn't don't hadn't hasn't haven't he's isn't it's she's shouldn't that's "
    "there's they're wasn't weren't what's won't wouldn't you're"
)
COUNTED = "none zero one two three four five six seven eight nine ten"


def test_every_contraction_number_article_and_mark_is_known():
    assert normalise(WITHOUT) == normalise(WITH) == WITH
    assert normalise(COUNTED) == "0 0 1 2 3 4 5 6 7 8 9 10"
    assert normalise("a an the A An The") == "a an the a an the", "an answer of nothing else stays"
    for mark in ';/[]"{}()=+\\_-><@`,?!。，、？！；：“”（）《》\n\t':
        assert normalise(f"red{mark}blue") == "red blue", mark
    assert normalise("10,000.5 a.m.") == "10000.5 am"
    assert normalise("it's 5'") == "it's 5'", "an apostrophe stays"


@pytest.mark.promise("vqa.answers")
def test_three_who_agree_are_enough_and_each_is_left_out_once():
    people = ["yes"] * 3 + ["no"] * 7
    # Of ten subsets of nine people, three have two "yes" left and seven have all three.
    assert vqa_accuracy("Yes.", people) == pytest.approx((3 * 2 / 3 + 7 * 1) / 10)
    assert vqa_accuracy("no", people) == 1.0
    assert vqa_accuracy("maybe", people) == 0.0
    assert vqa_accuracy("no", ["no", "no"]) == vqa_accuracy("no", ["no"] * 3) == 1.0
    assert vqa_accuracy("no", ["no", "yes"]) == 0.5
    assert vqa_accuracy("yes", ["yes", *["no"] * 9]) == pytest.approx((0 + 9 / 3) / 10)


@pytest.mark.promise("vqa.answers")
def test_a_part_of_an_answer_earns_nothing():
    assert vqa_accuracy("it is a cat on a mat", ["cat"] * 10) == 0.0
    assert vqa_accuracy("cat", ["catfish"]) == 0.0
    assert vqa_accuracy("a cat", ["Cat"]) == 1.0


@pytest.mark.promise("vqa.answers")
def test_an_empty_reply_is_never_right_and_signs_have_a_meaning():
    assert [vqa_accuracy("", [label]) for label in ("A", "the", "?", "")] == [0.0] * 4
    assert vqa_accuracy(" ", ["a"] * 10) == 0.0
    same = [("a.", "A"), ("(-5)", "-5"), ("o-", "O-"), ("< 5", "<5"), ("it is C++.", "it is c++"), ("5-3", "5 3")]
    assert [vqa_accuracy(given, [label]) for given, label in same] == [1.0] * len(same)
    other = [("5", "-5"), ("O-", "O+"), ("O", "O+"), ("C", "C++"), ("<5", ">5"), ("b", "A")]
    assert [vqa_accuracy(given, [label]) for given, label in other] == [0.0] * len(other)
