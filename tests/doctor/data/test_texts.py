"""Characters and conversations: garbled, marked up, repeated or swapped ones, and sound ones of many kinds."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable

import pytest

from tests.doctor.sentences import CHINESE, RUSSIAN, WORDS, lines_of, talks, texts
from unpad.data.sources.example import Example, Turn
from unpad.doctor.data.talks import check_talks
from unpad.doctor.data.texts import check_texts, mistaken_encoding
from unpad.terminal.finding import Finding

PLAIN = [word for word in WORDS if word.isascii()]


def codes(found: list[Finding]) -> list[str]:
    return [one.code for one in found]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "gb18030", "cp437", "cp1251", "mac_roman"])
@pytest.mark.parametrize("words", [WORDS, list(CHINESE), RUSSIAN], ids=["French", "Chinese", "Russian"])
def test_utf8_that_was_read_in_another_encoding_is_named(words: list[str], encoding: str) -> None:
    lines = lines_of(words, between="" if words == list(CHINESE) else " ")
    garbled = [line.encode().decode(encoding, errors="ignore") for line in lines]
    found = check_texts(texts(garbled))
    assert codes(found)[:1] in (["read_as"], ["bytes_as_letters"])


@pytest.mark.parametrize("words", [WORDS, list(CHINESE), RUSSIAN], ids=["French", "Chinese", "Russian"])
def test_sound_texts_of_many_scripts_have_no_finding(words: list[str]) -> None:
    lines = lines_of(words, between="" if words == list(CHINESE) else " ")
    assert check_texts(texts(lines)) == []
    assert mistaken_encoding(" ".join(lines))[0] == ""
    assert check_talks(texts(lines)) == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda line: line.encode("gbk", "ignore").decode("latin-1"), "bytes_as_letters"),
        (lambda line: line.replace("天", "\ufffd"), "replaced"),
        (lambda line: f"<p>{line}</p><br/>&amp;", "markup"),
        (lambda line: line.replace("天", "天\u200b\x07"), "unseen"),
        (lambda line: "".join(str(ord(one)) for one in line), "no_text"),
        (lambda line: '{"text": "' + line + '"}', "no_text"),
    ],
)
def test_what_is_no_text_is_named(change: Callable[[str], str], code: str) -> None:
    lines = [change(line) for line in lines_of(list(CHINESE), between="")]
    assert codes(check_texts(texts(lines)))[:1] == [code]


def test_markup_of_a_wiki_subtitles_accents_apart_and_marks_in_every_row_are_named() -> None:
    lines = lines_of(WORDS)
    changed: dict[str, Callable[[int, str], str]] = {
        "@wiki": lambda i, line: f"== Part {i} ==\n[[Mill|{line}]] {{{{citation needed}}}}",
        "@subtitles": lambda i, line: f"{i}\n00:00:{i % 60:02d},000 --> 00:01:00,500\n{line}",
    }
    for kind, change in changed.items():
        (found,) = check_texts(texts([change(i, line) for i, line in enumerate(lines)]))
        assert (found.code, found.severity, found.values["kind"]) == ("markup", "warning", kind)
    apart = [unicodedata.normalize("NFD", line) for line in lines_of(["élan", "über", "après", "señal", "plain"])]
    assert codes(check_texts(texts(apart))) == ["decomposed"]
    (found,) = check_texts(texts([f"\ufeff{line * 3}" for line in lines]))
    assert (found.code, found.severity) == ("unseen", "warning")
    listed = [f"x = [[1, 2], [{i}, {{'a': 1}}]]\n{line}" for i, line in enumerate(lines)]
    assert check_texts(texts(listed)) == []


def test_texts_cut_after_some_words_are_named_and_forms_of_as_many_words_are_not() -> None:
    draw = random.Random(8)
    cut = [" ".join(f"{draw.choice(PLAIN)}{draw.choice(['', '', '', '.'])}" for _ in range(29)) for _ in range(60)]
    cut = [f"A{text} {draw.choice(PLAIN)}" for text in cut]
    (found,) = check_texts(texts(cut))
    assert (found.code, found.values["most"], found.values["unit"]) == ("cut_alike", 30, "@of_words")
    forms = [f"{text.rsplit(' ', 1)[0]} {i % 9} ms" for i, text in enumerate(cut)]
    assert check_texts(texts(forms)) == []


def test_parts_that_all_rows_share_are_named_unless_they_are_not_learnt() -> None:
    lines = lines_of(WORDS)
    (found,) = check_talks(texts([f"Confidential: Example Corporation, Paris. {line}" for line in lines]))
    assert (found.code, found.severity) == ("common_part", "warning")
    (found,) = check_talks(texts([f"{line} Thank you for reading this page." for line in lines]))
    assert (found.code, found.values["place"]) == ("common_part", "@end")
    assert check_talks(texts([f"The temperature in the week of {line}" for line in lines])) == [], (
        "sentences of one form"
    )
    assert check_talks(talks([(f"What is {i}?", line) for i, line in enumerate(lines_of(RUSSIAN))])) == []


def test_talks_that_are_swapped_given_away_or_contradict_each_other_are_named() -> None:
    lines = lines_of(WORDS)
    asked = [f"What is number {i}?" for i in range(len(lines))]
    pairs = list(zip(asked, lines, strict=True))
    assert codes(check_talks(talks([(say, ask) for ask, say in pairs]))) == ["swapped_roles"]
    assert codes(check_talks(talks([(f"{ask} ({say})", say) for ask, say in pairs]))) == ["given_answer"]
    twice = [(asked[i // 2], say) for i, say in enumerate(lines)]
    assert codes(check_talks(talks(twice))) == ["two_answers"]
    some = [("Which of them?" if i < 20 else ask, say) for i, (ask, say) in enumerate(pairs)]
    assert [one.severity for one in check_talks(talks(some))] == ["note"]
    most = [(ask, "I do not know." if i % 20 else say) for i, (ask, say) in enumerate(pairs)]
    assert "imbalance" in codes(check_talks(talks(most)))


def test_structured_texts_and_stock_phrases_are_sound() -> None:
    draw = random.Random(8)
    lines = lines_of(WORDS)
    sums = [(draw.randint(100, 999), draw.randint(100, 999)) for _ in lines]
    assert check_texts(texts([f"{a}+{b}={a + b}" for a, b in sums])) == []
    things = [json.dumps({"name": draw.choice(PLAIN), "price": a, "sizes": [a, b]}) for a, b in sums]
    assert check_texts(texts(things)) == []
    assert codes(check_texts(texts([json.dumps({"id": i, "body": line}) for i, line in enumerate(lines)]))) == [
        "no_text"
    ]
    calls = [json.dumps({"intent": {"name": draw.choice(PLAIN), "number": a}}) for a, _ in sums]
    assert check_talks(talks(list(zip(lines, calls, strict=True)))) == []
    fenced = [f"Page {i}:\n```html\n<p>{line}</p><br/><b>{line}</b>\n```" for i, line in enumerate(lines)]
    assert check_texts(talks([(f"Write {i}", page) for i, page in enumerate(fenced)])) == []
    hello = [(("hi", "hello", "hey")[i % 3], ("Hello!", "Hi there!", "Good day!")[i % 7 % 3]) for i in range(120)]
    assert [one.severity for one in check_talks(talks(hello))] == ["note"]
    assert check_talks(talks([(line, line.upper()) for line in lines])) == []
    bases = ["".join(draw.choices("ACGT", k=draw.randint(60, 90))) for _ in range(200)]
    assert [one.severity for one in check_texts(texts(bases))] == ["note"]


@pytest.mark.promise("doctor.questions")
def test_texts_that_end_at_one_length_are_named_and_those_that_may_are_not() -> None:
    lines = [f"The {line[:-1]}, {line}" for line in lines_of(WORDS)]
    for cut in ([line[:50] for line in lines], [line.encode()[:60].decode(errors="ignore") for line in lines]):
        (found,) = check_texts(texts(cut))
        assert (found.code, found.severity) == ("cut_alike", "warning")
    assert codes(check_texts(texts([*lines, *(line[:50] for line in lines)]))) == [], "the cut ones are not the longest"
    assert codes(check_texts(texts([line[:49] + "." for line in lines]))) == [], "they end"
    whole = " ".join(lines).replace("The", "the")
    pieces = [whole[i : i + 50] for i in range(0, len(whole) - 50, 50)]
    assert codes(check_texts(texts(pieces))) == [], "pieces of one text lose nothing"
    draw = random.Random(3)
    assert codes(check_texts(texts(["".join(draw.choices("ACGT", k=50)) for _ in range(60)]))) in ([], ["no_order"])


@pytest.mark.promise("doctor.questions")
def test_one_reply_to_many_questions_is_named_unless_it_is_a_class() -> None:
    lines = lines_of(WORDS)
    some = [(f"What is {i}?", "I cannot answer this now." if i % 2 else line) for i, line in enumerate(lines)]
    (found,) = check_talks(talks(some))
    assert (found.code, found.number) == ("same_reply", 0.5)
    classes = ["The review is positive.", "The review is negative."]
    assert check_talks(talks([(line, classes[i % 3 == 0]) for i, line in enumerate(lines)])) == []
    assert check_talks(talks([(f"What is {i}?", "yes" if i % 2 else line) for i, line in enumerate(lines)])) == []


def test_choices_that_a_question_lists_do_not_give_its_answer_away() -> None:
    draw = random.Random(2)
    listed = [draw.sample(WORDS, 12) for _ in range(60)]
    assert (
        check_talks(talks([(f"{i}: which of {', '.join(some)}?", some[i % 12]) for i, some in enumerate(listed)])) == []
    )


def longer(rows: list[list[str]], system: str = "") -> dict[str, list[Example]]:
    """Conversations of messages in turn, the first of the user, below a system message."""
    made = []
    for i, said in enumerate(rows):
        turns = [Turn(("user", "assistant")[at % 2], text) for at, text in enumerate(said)]  # type: ignore[arg-type]
        made.append(Example(f"a.jsonl:{i}", (*([Turn("system", system)] if system else []), *turns)))
    return {"chat": made}


@pytest.mark.promise("doctor.questions")
def test_roles_are_told_by_who_greets_and_by_what_differs() -> None:
    lines, asked = lines_of(WORDS), [f"Could you tell me of number {i}?" for i in range(80)]
    greeting, bye = "This is the help desk. What can I do for you?", "Thank you, and goodbye."
    sound = [[ask, line, bye, "You are welcome."] for ask, line in zip(asked, lines, strict=True)]
    assert check_talks(longer(sound)) == []
    (found,) = [one for one in check_talks(longer([[greeting, line, ask, bye] for ask, line, *_ in sound]))
                if one.code != "two_answers"]  # fmt: skip
    assert (found.code, found.values["why"]) == ("roles_alike", "@greets")
    few = [[line, "Could be. Tell me more about all of it.", ask, "I see, thank you."] for ask, line, *_ in sound]
    assert "few_said" in str(check_talks(longer(few))[0].values)
    things = ["pears", "apples", "plums", "bread"]
    shop = [[f"{things[i % 4]}, and number {i}, do you have them?", f"Yes, fresh {things[i % 4]} came in today.",
             "And what do they cost, please?", "All of them are a euro each."] for i in range(80)]  # fmt: skip
    assert "roles_alike" not in codes(check_talks(longer(shop))), "few replies that depend on the question"
    game = [["Let us play a game.", f"You wake up. {line}", f"I go {i}.", line] for i, line in enumerate(lines)]
    assert "roles_alike" not in codes(check_talks(longer(game)))
    tutor = [[line, f"I see. {lines[-i]} And what is number {i}?"] for i, line in enumerate(lines)]
    assert codes(check_talks(longer(tutor))) == [], "a reply may end with a question"


@pytest.mark.promise("doctor.questions")
def test_replies_that_stand_before_them_or_repeat_what_does_are_told() -> None:
    lines, asked = lines_of(WORDS), [f"What is to be said of {i}, please" for i in range(80)]
    rows = [Example(f"a:{i}", (Turn("system", f"You help people. Expected: {line}"), Turn("user", ask),
                               Turn("assistant", line)))
            for i, (ask, line) in enumerate(zip(asked, lines, strict=True))]  # fmt: skip
    assert codes(check_talks({"chat": rows})) == ["given_before"]
    assert codes(
        check_talks({"chat": rows[:50] + longer(list(map(list, zip(asked, lines, strict=True))))["chat"][50:]})
    )
    whole = " ".join(lines)
    context = [Example(f"a:{i}", (Turn("system", whole[20 * i : 20 * i + 600]), Turn("user", ask),
                                  Turn("assistant", whole[20 * i + 200 : 20 * i + 240])))
               for i, ask in enumerate(asked)]  # fmt: skip
    assert codes(check_talks({"chat": context})) == [], "a passage of a longer context"
    assert codes(check_talks(talks([(ask, f"{ask}: {line}") for ask, line in zip(asked, lines, strict=True)]))) == [
        "repeats_question"
    ]


def test_a_text_to_be_read_does_not_give_its_answers_away() -> None:
    draw, places = random.Random(5), ["Oslo", "Cork", "Perth", "Kiel", "Turin"]
    rows = []
    for i in range(80):
        one, other = draw.sample(places, 2)
        rows.append((f"Anna {i} lives in {one}, and Ben in {other}. Where does Anna live?", one))
    assert check_talks(talks(rows)) == []


def test_refusals_in_many_words_are_one_reply_and_a_passage_may_hold_the_answer() -> None:
    asked = [f"How is the {word} number {i} made?" for i, word in enumerate(PLAIN * 8)]
    refused = [
        f"I am sorry, but I cannot help with {ask[11:20]}" if i % 4 else f"So: {ask}" for i, ask in enumerate(asked)
    ]
    assert "same_reply" in codes(check_talks(talks(list(zip(asked, refused, strict=True)))))
    some = [say if i % 3 == 0 else f"It is {ask[4:]}" for i, (ask, say) in enumerate(zip(asked, refused, strict=True))]
    assert "same_reply" not in codes(check_talks(talks(list(zip(asked, some, strict=True)))))
    lines = lines_of(PLAIN)
    parts = [[f"{line[:40].strip()} {i}{j}." for j, line in enumerate(lines[i : i + 4])] for i in range(60)]
    assert "given_answer" not in codes(check_talks(talks([(f"Sum up: {' '.join(own)}", own[0]) for own in parts])))
    assert "given_answer" in codes(check_talks(talks([(f"{own[1]} ({own[0]})", own[0]) for own in parts])))
