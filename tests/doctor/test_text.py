"""Characters and conversations: garbled, cut or contradicting ones, and sound ones of many kinds."""

import json
import random

import pytest

from tests.doctor.sentences import CHINESE, RUSSIAN, WORDS, lines_of
from unpad.doctor.rows import Labelled, clashing_labels, constant_labels
from unpad.doctor.text import cut_alike, garbled, given_answer, mistaken_encoding, reworded

PLAIN, FIELD = [word for word in WORDS if word.isascii()], ("data.text",)
SCRIPTS = pytest.mark.parametrize("words", [WORDS, list(CHINESE), RUSSIAN], ids=["French", "Chinese", "Russian"])


def rows(texts: list[str]) -> list[tuple[str, str]]:
    return [(text, f"a:{number}") for number, text in enumerate(texts)]


def talks(pairs: list[tuple[str, str]]) -> list[Labelled]:
    return [Labelled(ask, say, f"a:{number}") for number, (ask, say) in enumerate(pairs)]


@SCRIPTS
def test_utf8_that_was_read_in_another_encoding_is_named_and_sound_text_is_not(words):
    lines = lines_of(words, between="" if words == list(CHINESE) else " ")
    assert garbled(rows(lines), FIELD) == []
    assert mistaken_encoding(" ".join(lines)) == ""
    for encoding in ("latin-1", "cp1252", "gb18030", "cp437", "cp1251", "mac_roman"):
        assert garbled(rows([line.encode().decode(encoding, errors="ignore") for line in lines]), FIELD), encoding


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("\\u4f60\\u597d{0}", "backslash"), ("{0}\ufffd", "U+FFFD"),
        ("<p class='a'>{0}<br>&nbsp;", "strip the tags"),
    ],
)  # fmt: skip
def test_traces_of_programs_are_named(form, words):
    (found,) = garbled(rows([form.format(line) for line in lines_of(PLAIN)]), FIELD)
    assert words in " ".join(found.sentences("en"))


@pytest.mark.promise("doctor.questions")
def test_texts_that_end_at_one_length_are_named_and_those_that_may_are_not():
    lines = [f"The {line[:-1]}, {line}" for line in lines_of(WORDS)]
    for cut in ([line[:50] for line in lines], [line.encode()[:60].decode(errors="ignore") for line in lines]):
        assert cut_alike(rows(cut), FIELD)
    assert not cut_alike(rows([*lines, *(line[:50] for line in lines)]), FIELD), "the cut ones are not the longest"
    assert not cut_alike(rows([line[:49] + "." for line in lines]), FIELD), "they end"
    whole = " ".join(lines).replace("The", "the")
    pieces = [whole[i : i + 50] for i in range(0, len(whole) - 50, 50)]
    assert not cut_alike(rows(pieces), FIELD), "pieces of one text lose nothing"


def test_structured_texts_and_code_between_fences_are_sound():
    draw, lines = random.Random(8), lines_of(WORDS)
    sums = [(draw.randint(100, 999), draw.randint(100, 999)) for _ in lines]
    things = [json.dumps({"name": draw.choice(PLAIN), "price": a, "sizes": [a, b]}) for a, b in sums]
    fenced = [f"Page {i}:\n```html\n<p>{line}</p><br/><b>{line}</b>\n```" for i, line in enumerate(lines)]
    bases = ["".join(draw.choices("ACGT", k=draw.randint(60, 90))) for _ in range(200)]
    for texts in ([f"{a}+{b}={a + b}" for a, b in sums], things, fenced, bases):
        assert (garbled(rows(texts), FIELD), cut_alike(rows(texts), FIELD)) == ([], [])


@pytest.mark.promise("doctor.questions")
def test_one_reply_to_many_questions_is_named_unless_it_is_a_class():
    lines = lines_of(WORDS)
    some = [(f"What is {i}?", "I cannot answer this now." if i % 2 else line) for i, line in enumerate(lines)]
    assert constant_labels(talks(some), FIELD)[0].number == 0.5
    classes = ["The review is positive.", "The review is negative."]
    assert constant_labels(talks([(line, classes[i % 3 == 0]) for i, line in enumerate(lines)]), FIELD) == []
    short = [(f"What is {i}?", "yes" if i % 2 else line) for i, line in enumerate(lines)]
    assert constant_labels(talks(short), FIELD) == []


def test_answers_that_contradict_or_stand_in_their_question_are_named():
    lines, draw = lines_of(WORDS), random.Random(2)
    twice = [(f"What is number {i // 2}?", line) for i, line in enumerate(lines)]
    assert clashing_labels(talks(twice), FIELD, 0.5)
    pairs = [(f"What is number {i}?", line) for i, line in enumerate(lines)]
    assert (clashing_labels(talks(pairs), FIELD), given_answer(talks(pairs), FIELD)) == ([], [])
    assert given_answer(talks([(f"{ask} ({say})", say) for ask, say in pairs]), FIELD)
    listed = [draw.sample(WORDS, 12) for _ in range(60)]
    choices = [(f"{i}: which of {', '.join(some)}?", some[i % 12]) for i, some in enumerate(listed)]
    assert given_answer(talks(choices), FIELD) == [], "choices"
    places = ["Oslo", "Cork", "Perth", "Kiel", "Turin"]
    homes = [(f"Anna {i} lives in {one}, and Ben in {other}. Where does Anna live?", one)
             for i in range(80) for one, other in [draw.sample(places, 2)]]  # fmt: skip
    assert given_answer(talks(homes), FIELD) == [], "a text to be read"


def test_one_answer_in_several_wordings_is_no_contradiction():
    forms, words = ("It is {}.", "{} is the capital.", "The capital is {}.", "You mean {}."), PLAIN[:40]
    asked = [(f"Capital of {place[::-1]}?", form.format(place)) for place in words for form in forms]
    assert reworded(talks(asked))
    replies = [reply for _, reply in asked]
    random.Random(0).shuffle(replies)
    assert not reworded(talks([(ask, reply) for (ask, _), reply in zip(asked, replies, strict=True)]))
