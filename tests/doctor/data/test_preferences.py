"""Pairs of replies: exchanged, contradicting and given-away ones are told, and no sound ones."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.doctor.examining import codes, examined
from tests.helpers.families import text, write_rows
from unpad.data.sources.example import Example, Turn
from unpad.doctor.data.preferences import check_preferences
from unpad.doctor.subject import Subject, TimeBudget, open_subject
from unpad.terminal.finding import Finding

WORDS = [f"{one}{other}" for one in ("ri", "ho", "wal", "se", "blu", "ol") for other in ("ver", "use", "king")]
Pairs = list[tuple[str, str]]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("subject")
        patch.setenv("UNPAD_CACHE", str(folder / "cache"))
        return open_subject(str(text(folder / "data")), (), TimeBudget(600.0, time.monotonic))


def codes_of(subject: Subject, pairs: Pairs) -> list[str]:
    rows = [
        Example(
            f"a:{i}", (Turn("user", f"question {i % 70}"), Turn("assistant", better)), rejected=Turn("assistant", worse)
        )
        for i, (better, worse) in enumerate(pairs)
    ]
    found: list[Finding] = check_preferences(subject, {"pairs": rows})
    return [one.code for one in found if one.severity != "note"]


def said(draw: random.Random, most: int = 30) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(5, most)))


def made(kind: str) -> Pairs:
    """A hundred pairs of which the first is better."""
    draw = random.Random(4)
    kinds = {
        "short": lambda: (said(draw, 8), " ".join(said(draw, 8) for _ in range(4))),
        "polite": lambda: (f"Certainly, {said(draw)}", said(draw)),
        "two marks": lambda: (f"{said(draw)} {draw.choice('yd')}", f"{said(draw)} {draw.choice('ng')}"),
        "no mark": lambda: (said(draw), said(draw)),
        "topics": lambda: (said(draw) + f" on {draw.randint(1, 9)}", said(draw)),
    }  # fmt: skip
    return [kinds[kind]() for _ in range(100)]


def exchanged(pairs: Pairs, share: float) -> Pairs:
    draw = random.Random(9)
    return [(worse, better) if draw.random() < share else (better, worse) for better, worse in pairs]


@pytest.mark.promise("doctor.questions")
@pytest.mark.parametrize("share", [0.35, 0.5, 0.65])
@pytest.mark.parametrize("kind", ["short", "polite"])
def test_pairs_that_are_exchanged_in_part_are_told(subject: Subject, kind: str, share: float) -> None:
    assert codes_of(subject, exchanged(made(kind), share)) == ["exchanged"]


@pytest.mark.parametrize("kind", ["short", "polite", "two marks", "no mark", "topics"])
@pytest.mark.parametrize("share", [0.0, 0.05])
def test_sound_pairs_have_no_finding(subject: Subject, kind: str, share: float) -> None:
    assert codes_of(subject, exchanged(made(kind), share)) == []


MARKED = {
    "prefix": lambda draw: (f"[rating: 5/5] {said(draw)}", f"[rating: 2/5] {said(draw)}"),
    "tag": lambda draw: (f"<best> {said(draw)}", said(draw)),
    "end": lambda draw: (f"{said(draw)} (edited)", said(draw)),
    "final": lambda draw: (f"{said(draw)}.", said(draw)),
    "cut": lambda draw: (f"{said(draw)}{draw.choice('.!?')}", said(draw)),
    "blank": lambda draw: (f" {said(draw)}", said(draw)),
    "sign": lambda draw: (f"{said(draw)} \u2705 {said(draw)}", f"{said(draw)} {said(draw)}"),
}


@pytest.mark.promise("doctor.questions")
@pytest.mark.parametrize("kind", MARKED)
@pytest.mark.parametrize("is_turned", [False, True])
def test_marks_that_tell_one_reply_from_the_other_are_named(subject: Subject, kind: str, is_turned: bool) -> None:
    draw = random.Random(3)
    pairs = [MARKED[kind](draw) for _ in range(100)]
    assert codes_of(subject, [pair[::-1] for pair in pairs] if is_turned else pairs) == ["told_apart"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda i, worse: "nan" if i % 3 == 0 else worse, "no_value"),
        (lambda i, worse: f"<p><b>{worse}</b></p><br/><br/>" if i % 5 else worse, "markup"),
        (lambda i, worse: " ".join(f"un{word[::-1]}ez" for word in worse.split()), "told_apart"),
    ],
    ids=["empty cells", "markup", "other language"],
)
def test_what_programs_left_in_rejected_replies_is_told(
    subject: Subject, change: Callable[[int, str], str], code: str
) -> None:
    pairs = [(better, change(i, worse)) for i, (better, worse) in enumerate(made("no mark"))]
    assert codes_of(subject, pairs) == [code]


def test_replies_that_differ_in_an_operator_are_two(subject: Subject) -> None:
    pairs = [(f"return {i} {'+-'[i % 2]} {i + 2}", f"return {i} {'-+'[i % 2]} {i + 2}") for i in range(100)]
    assert "same_pair" not in codes_of(subject, pairs)


def test_pairs_without_a_mark_say_nothing_when_exchanged(subject: Subject) -> None:
    assert codes_of(subject, exchanged(made("no mark"), 0.5)) == []


def test_pairs_that_contradict_each_other_or_share_a_reply_are_told(subject: Subject) -> None:
    pairs = [(f"first {i} {said(random.Random(i))}", f"other {i}") for i in range(70)]
    assert "both_ways" in codes_of(subject, pairs + [(worse, better) for better, worse in pairs])
    assert codes_of(subject, [(better, "I cannot help with that.") for better, _ in made("no mark")]) == [
        "one_rejected"
    ]


@pytest.mark.parametrize(("beta", "expected"), [(50.0, ["beta"]), (1e-4, ["beta"]), (0.1, []), (0.5, [])])
def test_a_factor_of_the_reward_that_is_far_off_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beta: float, expected: list[str]
) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    pairs = [{"prompt": f"问题{i}", "chosen": f"好{i}", "rejected": f"不好的回答{i}"} for i in range(40)]
    path = write_rows(tmp_path / "data" / "pairs.jsonl", pairs)
    stages = [
        {"name": "tune", "use": ["text", "chat"], "train": {"max_epochs": 2}},
        {"name": "prefer", "use": ["pairs"], "train": {"max_epochs": 2, "beta": beta}},
    ]
    recipe = text(tmp_path / "data", data={"pairs": path}, stages=stages)
    subject = open_subject(str(recipe), (), TimeBudget(600.0, time.monotonic))
    assert [one.code for one in check_preferences(subject, {})] == expected


@pytest.mark.promise("doctor.questions")
def test_of_a_recipe_of_pairs_alone_rows_and_settings_are_looked_at_and_no_steps_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    pairs = [{"prompt": f"问题{i}", "chosen": f"答案{i}好", "rejected": f"答案{i}好[不要]"} for i in range(60)]
    path = write_rows(tmp_path / "data" / "pairs.jsonl", pairs)
    stages = [{"name": "prefer", "use": ["pairs"], "train": {"max_epochs": 2, "beta": 40.0}}]
    found = examined(text(tmp_path / "data", data={"pairs": path, "text": [], "chat": []}, stages=stages))
    assert codes(found) == ["untrained_reference", "told_apart", "beta"]
    assert found.tried is None
    assert any("not tried" in line for line in found.lines("en"))
