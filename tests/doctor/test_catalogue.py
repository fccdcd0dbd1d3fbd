"""Both languages say every finding, with the same values."""

from __future__ import annotations

from pathlib import Path
from string import Formatter

import pytest

from unpad.doctor.catalogue import CATALOGUE
from unpad.doctor.words import WORDS, language_of, sentences
from unpad.terminal.finding import Finding

DOCTOR = Path(__file__).parents[2] / "unpad" / "doctor"


def names(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name}


@pytest.mark.promise("doctor.findings")
@pytest.mark.parametrize("code", CATALOGUE)
def test_both_languages_name_the_same_values_and_speak_their_own_tongue(code: str) -> None:
    entry = CATALOGUE[code]
    for english, chinese in ((entry.reason, entry.reason_zh), (entry.advice, entry.advice_zh)):
        assert names(english) == names(chinese)
        assert english.isascii()
        assert not chinese.isascii()


@pytest.mark.parametrize("name", WORDS)
def test_both_languages_have_every_further_word(name: str) -> None:
    english, chinese = WORDS[name]
    assert names(english) == names(chinese)


@pytest.mark.promise("doctor.findings")
def test_every_entry_is_found_by_a_check_and_every_finding_has_an_entry() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8") for path in DOCTOR.rglob("*.py") if not path.stem.startswith("catalogue")
    )
    assert [code for code in CATALOGUE if f'"{code}"' not in sources] == []
    made = sources.split('Finding("')[1:]
    assert {part.partition('"')[0] for part in made} <= set(CATALOGUE)


@pytest.mark.parametrize(
    ("given", "language"),
    [({"LANG": "zh_CN.UTF-8"}, "zh"), ({"LANG": "de_DE"}, "en"), ({"LC_ALL": "C", "LANG": "zh_CN"}, "en"), ({}, "en")],
)
def test_the_language_is_that_of_the_locale(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], language: str
) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert language_of(None) == language
    assert (language_of("zh"), language_of("en")) == ("zh", "en")


def test_a_word_among_the_values_is_said_in_the_language() -> None:
    values = {"threads": 3, "cores": 2.0, "why": "@forward", "field": "train.threads"}
    found = Finding("too_many_threads", "warning", 2, ("train.threads",), dict(values))
    assert "3 threads share 2 coresforward" in sentences(found, "en")[0]
    assert "前向" in sentences(found, "zh")[0]
