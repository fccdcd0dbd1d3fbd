"""Findings: both languages name the same values, causes leave out what follows, and the page lists them all."""

import re
from pathlib import Path

import pytest

from unpad.doctor.finding import Found, finding, language_of, ranked

ROOT = Path(__file__).parents[2]
SOURCES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "unpad" / "doctor").glob("*.py")}
CODES = [code for text in SOURCES.values() for code in re.findall(r'^@finding\(\s*"(\w+)"', text, re.MULTILINE)]


@finding("cause", "fault", explains={"effect"}, en=("It is {number:.0f} {what}.", "mend {field}"),
         zh=("{number:.0f} {what}。", "修复 {field}"))  # fmt: skip
def cause(number: float) -> Found | None:
    return Found(number, "optim.lr", what=("times", "倍"), field="optim.lr", unused=3) if number else None


@finding("effect", "fault", en=("It follows.", "wait"), zh=("随之而来。", "等待"))
def effect(is_note: bool) -> Found:
    return Found(1.0, severity="note" if is_note else None)


@pytest.mark.promise("doctor.findings")
def test_a_finding_says_its_values_in_both_languages_and_only_those_that_its_words_name():
    assert cause(0) == []
    (found,) = cause(3)
    assert found.sentences("en") == ("It is 3 times.", "mend optim.lr")
    assert found.sentences("zh") == ("3 倍。", "修复 optim.lr")
    assert found.lines(2, "zh")[0].split() == ["2", "故障", "optim.lr"]
    told = found.to_json("en")
    assert (told["number"], told["values"]) == (3, {"what": "times", "field": "optim.lr"})
    with pytest.raises(AssertionError, match="the languages differ"):
        finding("bad", en=("{a}", ""), zh=("{b}", ""))


@pytest.mark.promise("doctor.findings")
def test_what_follows_from_a_cause_is_left_out_and_faults_stand_first():
    assert [one.code for one in ranked([*effect(True), *cause(3)])] == ["cause"]
    assert [one.code for one in ranked([*effect(False), *cause(0)])] == ["effect"]
    assert [one.severity for one in ranked([*effect(True), *cause(0), *effect(False)])] == ["fault", "note"]


@pytest.mark.promise("doctor.findings")
def test_every_code_is_once_on_the_page_and_what_is_explained_exists():
    assert len(CODES) == len(set(CODES)) <= 39
    page = (ROOT / "benchmarks" / "doctor.md").read_text(encoding="utf-8")
    assert sorted(set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))) == sorted(CODES)
    named = {code for text in SOURCES.values() for one in re.findall(r"explains=\{([^}]*)\}", text)
             for code in re.findall(r'"(\w+)"', one)}  # fmt: skip
    assert named <= set(CODES)


@pytest.mark.parametrize(
    ("given", "language"),
    [({"LANG": "zh_CN.UTF-8"}, "zh"), ({"LANG": "de_DE"}, "en"), ({"LC_ALL": "C", "LANG": "zh_CN"}, "en"), ({}, "en")],
)
def test_the_language_is_that_of_the_locale(monkeypatch, given, language):
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert language_of(None) == language
    assert (language_of("zh"), language_of("en")) == ("zh", "en")
