"""Traces of programs in texts are told, and sound texts of the same words are not."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from unpad.data.sources.example import Example, Turn
from unpad.doctor.data.residue import check_residue
from unpad.doctor.data.texts import check_texts

TEXT = "the über miller carried a heavy basket from old market, while späte guests watched rivers below"
WORDS = TEXT.split()


def lines(num: int = 120) -> list[str]:
    draw = random.Random(3)
    return [" ".join(draw.choices(WORDS, k=draw.randint(8, 24))).capitalize() + "." for _ in range(num)]


def texts(made: list[str]) -> dict[str, list[Example]]:
    return {"text": [Example(f"f:{number}", (Turn("text", one),)) for number, one in enumerate(made)]}


def pieces(line: str) -> str:
    return re.sub(r"(\w{3})(\w{2,})", r"\1@@ \2", line)


CHANGES: list[tuple[str, Callable[[str], str]]] = [
    ("lost_letters", lambda line: re.sub("[^\x00-\x7f]", "?", line.replace("späte", "späte schöne"))),
    ("word_pieces", pieces),
    ("word_pieces", lambda line: "▁" + line.replace(" ", " ▁")),
    ("masked_words", lambda line: line.replace("miller", "<unk>").replace("basket", "[NAME]")),
    ("masked_words", lambda line: line.replace("miller", "{customer_name}").replace("basket", "[Your Name]")),
    ("lost_letters", lambda line: re.sub("[^\x00-\x7f]", "e", line).replace("miller", "?????").replace("market", "??")),
    ("misread", lambda line: line.replace("rr", "r1r").replace("ar", "a8r").replace("ll", "l0l").replace("te", "t@e")),
    ("marks_apart", lambda line: re.sub(r"([,.])", r" \1", line)),
    ("hyphens", lambda line: line.replace("basket", "bas-\nket").replace("market", "mar-\nket")),
    ("padded_text", lambda line: line + " [PAD]" * 30),
    ("changed_words", lambda line: " ".join(f"{word} {word}" for word in line.split())),
]


@pytest.mark.parametrize(("code", "change"), CHANGES)
def test_a_trace_in_many_rows_is_the_only_finding(code: str, change: Callable[[str], str]) -> None:
    assert [one.code for one in check_residue(texts([change(line) for line in lines()]))] == [code]


@pytest.mark.parametrize(
    "change",
    [
        lambda line: f'def f(name):\n    return f"{{name}} and {{basket}}: {line}"',
        lambda line: f"{line} Is it so??? Write to anna@miller.example, room b2b, or x1.",
        lambda line: f"\\begin{{theorem}} {line} \\end{{theorem}}",
    ],
    ids=["code", "addresses", "formulas"],
)
def test_slots_of_code_and_digits_of_addresses_are_no_traces(change: Callable[[str], str]) -> None:
    rows = texts([change(line) for line in lines()])
    assert check_residue(rows) == []
    assert "wrapped_lines" not in [one.code for one in check_texts(rows)]


def test_running_numbers_and_beginnings_of_other_rows_are_told() -> None:
    numbered = [f"{number:05d} {line}" for number, line in enumerate(lines())]
    assert [one.code for one in check_residue(texts(numbered))] == ["row_numbers"]
    grown = [line[:size] for line in lines(40) for size in (25, 50, 400)]
    assert [one.code for one in check_residue(texts(grown))] == ["grown_rows"]


def listed(line: str) -> str:
    return "\n".join(f"{number}. {word}" for number, word in enumerate(line.split(), 1))


@pytest.mark.parametrize(
    "change", [str, str.lower, listed, lambda line: f"{line} Why? Is it so?", lambda line: f"## {line}"]
)
def test_sound_texts_have_no_trace(change: Callable[[str], str]) -> None:
    assert check_residue(texts([change(line) for line in lines()])) == []


def test_lines_of_a_wrapped_text_are_told_and_verses_are_not() -> None:
    whole = " ".join(lines()).split()
    wrapped, row = list[str](), ""
    for word in whole:
        if len(row) + len(word) > 58:
            wrapped, row = [*wrapped, row.strip()], ""
        row += f" {word}"
    assert "wrapped_lines" in [one.code for one in check_texts(texts(wrapped))]
    verses = [f"{line[:40].strip()}," if number % 2 else f"{line[:40].strip()}." for number, line in enumerate(lines())]
    assert "wrapped_lines" not in [one.code for one in check_texts(texts(verses))]
