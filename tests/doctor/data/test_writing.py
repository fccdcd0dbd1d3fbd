"""Texts that a program changed on their way are told, and texts as people and programs write them are not."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from urllib.parse import quote

import pytest

from tests.doctor.sentences import CHINESE, RUSSIAN, WORDS, lines_of, rich_sentences, talks, texts
from unpad.doctor.data.writing import check_writing
from unpad.terminal.finding import Finding

# Words of which some follow others more often, as in any language.
CHAIN = {word: [WORDS[(3 * i) % 18], WORDS[(3 * i + 1) % 18], WORDS[(5 * i + 2) % 18]] for i, word in enumerate(WORDS)}


def sentences(num: int = 300) -> list[str]:
    draw, made = random.Random(6), []
    for _ in range(num):
        word, own = draw.choice(WORDS), list[str]()
        for _ in range(14):
            own.append(word)
            word = draw.choice(CHAIN[word])
        made.append(f"{' '.join(own[:7])}, {' '.join(own[7:])}.")
    return made


def told(found: list[Finding]) -> list[str]:
    return [one.code for one in found if one.severity != "note"]


def each_line(change: Callable[[list[str]], list[str]]) -> Callable[[str], str]:
    """The words of every part of a text up to a comma, changed."""
    return lambda text: "\n".join(" ".join(change(part.split())) for part in text.replace(".", "").split(", "))


def capitals(text: str) -> str:
    return text[0].upper() + text[1:]


def mixed_letters(text: str) -> str:
    draw = random.Random(text)
    return " ".join("".join(draw.sample(word, len(word))) for word in text.split())


def in_disorder(text: str) -> str:
    return " ".join(random.Random(len(text)).sample(text.split(), len(text.split())))


@pytest.mark.promise("doctor.questions")
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda text: json.dumps(text)[1:-1], "escaped"),
        (quote, "escaped"),
        (lambda text: base64.b64encode(text.encode()).decode(), "escaped"),
        (lambda text: text.replace(", ", "\\n"), "escaped"),
        (lambda text: text.replace(" ", ""), "changed_words"),
        (lambda text: text[::-1], "changed_words"),
        (in_disorder, "changed_words"),
        (lambda text: " ".join(sorted(text.replace(",", "").split())), "changed_words"),
        (lambda text: " ".join(sorted(text.split(), reverse=True)), "changed_words"),
        (lambda text: " ".join(sorted(text.replace(",", "").rstrip(".").split(), key=len)), "changed_words"),
        (lambda text: " ".join(capitals(text).split()[::-1]), "changed_words"),
        (lambda text: " ".join("".join(sorted(word)) for word in text.split()), "changed_words"),
        (each_line(sorted), "changed_words"),
        (lambda text: f"{text} {text}", "said_twice"),
        (lambda text: "NaN" if len(text) % 9 == 0 else text, "no_value"),
    ],
)
def test_changed_texts_are_told(change: Callable[[str], str], code: str) -> None:
    assert code in told(check_writing(texts([change(text) for text in sentences()])))


@pytest.mark.promise("doctor.questions")
@pytest.mark.parametrize(
    ("change", "how"),
    [
        (lambda text: " ".join(sorted(text.replace(",", "").replace(".", "").split())), "@sorted"),
        (lambda text: " ".join(text.split()[::-1]), "@word_by_word"),
        (lambda text: " ".join(text.replace(",", "").replace(".", "").split()[::-1]), "@word_by_word"),
        (each_line(lambda words: random.Random("".join(words)).sample(words, len(words))), "@shuffled"),
        (mixed_letters, "@letters_shuffled"),
    ],
)
def test_changes_of_an_order_are_named(change: Callable[[str], str], how: str) -> None:
    (found,) = check_writing(texts([change(text) for text in rich_sentences()]))
    assert (found.code, found.values["how"]) == ("changed_words", how)
    asked = [(text, change(text)) for text in rich_sentences()]
    (found,) = check_writing(talks(asked))
    assert (found.code, found.values["how"]) == ("changed_words", how)


def kept_sorted(text: str, between: str) -> str:
    return between.join(sorted(set(text.replace(",", "").replace(".", "").split())))


@pytest.mark.parametrize("reply", ["None", "[deleted]", "#N/A", "null"])
def test_replies_of_empty_cells_are_told(reply: str) -> None:
    pairs = [(f"What is {i}?", reply if i % 8 == 0 else text) for i, text in enumerate(sentences(100))]
    (found,) = check_writing(talks(pairs))
    assert (found.code, found.severity) == ("no_value", "warning")


@pytest.mark.parametrize(
    "mark",
    [
        "<|im_start|>user\n{}<|im_end|>",
        "[INST] {} [/INST]",
        "Human: {}\nAssistant:",
        "### Instruction: {} ### Response:",
    ],
)
def test_a_template_inside_of_messages_is_told(mark: str) -> None:
    pairs = [(mark.format(f"What is {i}?"), text) for i, text in enumerate(sentences(60))]
    assert told(check_writing(talks(pairs))) == ["other_marks"]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [("{}<|user|>And then?", ["other_marks"]), ("{} Visitor: And then?", ["other_marks"]), ("{} A visitor: then", [])],
)
def test_prefixes_of_the_template_inside_of_some_replies_are_told(reply: str, expected: list[str]) -> None:
    pairs = [(f"What is {i}?", reply.format(text) if i % 5 == 0 else text) for i, text in enumerate(sentences(200))]
    assert told(check_writing(talks(pairs), ("", "Visitor: ", "Desk: "))) == expected


CODE = [f"def f{i}(x):\n    return x + '{i}\\n' if x % {i} else '\\t'\n" for i in range(90)]


@pytest.mark.parametrize(
    "rows",
    [
        texts(sentences()),
        texts(rich_sentences()),
        texts([kept_sorted(text, ", ") for text in rich_sentences()]),
        texts([kept_sorted(text, "\n") for text in rich_sentences()]),
        texts([" ".join(random.Random(text).choices(["ATG", "CGA", "TTC", "GAT"], k=40)) for text in rich_sentences()]),
        texts([" ".join(str(i + j) for j in range(20)) for i in range(300)]),
        texts(lines_of(list(CHINESE), between="")),
        texts(lines_of(RUSSIAN)),
        texts(CODE),
        texts([f"Title: {text[:20]}\nBody: {text}" for text in sentences()]),
        texts([f"https://example.org/a/{i}?q=1 {text}" for i, text in enumerate(sentences())]),
        talks([(f"Is {text[:30]} known?", ("yes", "no", "unknown")[i % 3]) for i, text in enumerate(sentences())]),
        talks([(f"What is {i} plus 1?", str(i + 1)) for i in range(90)]),
        talks([(text, f"Good. What comes after {text.split()[0]}?") for text in rich_sentences(200)]),
        texts(["".join(random.Random(i).choices("ACGT", k=80)) for i in range(200)]),
        talks(
            [
                (f"Who is in it, or none? {text}", "None" if i % 3 else text.split()[i % 9])
                for i, text in enumerate(sentences())
            ]
        ),
        talks([(f"What is {i} plus 1?", f"One more than {i}.\nAnswer: {i + 1}") for i in range(90)]),
    ],
    ids=[
        "sentences",
        "many words",
        "a sorted list",
        "sorted lines",
        "genes",
        "counts",
        "Chinese",
        "Russian",
        "code",
        "headers",
        "addresses",
        "classes",
        "numbers",
        "a tutor",
        "bases",
        "none of them",
        "reasoning",
    ],
)
def test_sound_texts_are_not(rows: dict) -> None:  # type: ignore[type-arg]
    assert told(check_writing(rows)) == []


def test_texts_that_go_in_circles_are_told_and_songs_and_logs_are_not() -> None:
    lines = [capitals(text) for text in sentences(200)]
    circles = [" ".join([line, *[lines[-1 - i]] * 8]) for i, line in enumerate(lines[:80])]
    assert told(check_writing(texts(circles))) == ["said_twice"]
    songs = ["\n".join([line, lines[-1], lines[-2 - i], lines[-1]]) for i, line in enumerate(lines[:80])]
    assert "said_twice" not in told(check_writing(texts(songs)))
    logs = [f"[{i % 24:02d}:{i % 60:02d}] WARN {line.split()[0]}.{line.split()[1]}{i} took {i * 7} ms again"
            for i, line in enumerate(lines * 4)]  # fmt: skip
    assert "changed_words" not in told(check_writing(texts(logs)))


def test_questions_that_are_empty_cells_are_told() -> None:
    asked = [("nan" if i % 2 else f"Where is {line}?", line) for i, line in enumerate(sentences(100))]
    (found,) = check_writing(talks(asked))
    assert (found.code, found.severity, found.values["part"]) == ("no_value", "fault", "@asked")
