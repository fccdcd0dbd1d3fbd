"""Replies and pictures of other rows: told where a column slipped or was shuffled, and never in sound columns."""

from __future__ import annotations

import json
import random
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.families import questions, write_rows
from unpad.data.sources.example import Example, Turn
from unpad.doctor.data.joins import check_joins
from unpad.doctor.subject import Subject, TimeBudget, open_subject
from unpad.doctor.vqa import check_originals, transfer
from unpad.terminal.finding import Finding

PLACES = [f"{first}{last}" for first in ("Kar", "Bel", "Vor", "Tis", "Mun", "Dra", "Oste", "Pel", "Ria", "Sol")
          for last in ("dorf", "grad", "ville", "ton", "holm", "burg", "field", "stad", "pore", "minster")]  # fmt: skip
NAMED = [(f"Who founded {place} in the north?", f"{place} was founded by settlers {i} years ago.")
         for i, place in enumerate(PLACES)]  # fmt: skip
# Wordings of one fact share a reply, and no word with it.
WORDED = [
    (f"{begin} {river} {end}?", f"color{i}")
    for i, river in enumerate(PLACES[:30])
    for begin, end in (("tell me about", "now"), ("what of", "please"), ("say", "then"), ("how is", "today"))
]


def opened(recipe: Path) -> Subject:
    return open_subject(str(recipe), (), TimeBudget(600.0, time.monotonic))


def found(pairs: list[tuple[str, str]], kind: str = "chat") -> list[Finding]:
    rows = [Example(f"a:{i}", (Turn("user", ask), Turn("assistant", say))) for i, (ask, say) in enumerate(pairs)]
    return check_joins({kind: rows})


def slipped(pairs: list[tuple[str, str]], by: int, begin: int = 0) -> list[tuple[str, str]]:
    """Replies of the row `by` rows later, from a row on."""
    said = [say for _, say in pairs[begin:]]
    return pairs[:begin] + [(ask, say) for (ask, _), say in zip(pairs[begin:], said[by:] + said[:by], strict=True)]


def in_disorder(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return random.Random(3).sample(pairs, len(pairs))


@pytest.mark.promise("doctor.questions")
@pytest.mark.parametrize("pairs", [NAMED, in_disorder(WORDED)], ids=["words shared", "likeness alone"])
@pytest.mark.parametrize("by", [1, -1, 3])
def test_a_column_that_slipped_is_told_with_its_distance(pairs: list[tuple[str, str]], by: int) -> None:
    (one,) = found(slipped(pairs, by))
    way = "@before" if by > 0 else "@after"
    assert (one.code, one.severity, one.values["distance"], one.values["way"]) == ("slipped", "fault", abs(by), way)


def test_a_column_that_slipped_from_some_row_on_is_told_with_its_rows() -> None:
    (one,) = found(slipped(NAMED, 1, 50))
    assert (one.code, one.severity, one.values["first"]) == ("slipped", "warning", "a:50")


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_replies_that_were_shuffled_in_part_or_whole_are_told(share: float) -> None:
    draw = random.Random(5)
    rows = draw.sample(range(len(NAMED)), int(share * len(NAMED)))
    said = [say for _, say in NAMED]
    others = draw.sample(rows, len(rows))
    moved = [said[others[rows.index(i)]] if i in rows else say for i, say in enumerate(said)]
    (one,) = found([(ask, say) for (ask, _), say in zip(NAMED, moved, strict=True)])
    assert (one.code, one.fields) == ("other_replies", ("data.chat",))


def test_some_replies_unlike_those_of_the_same_question_are_told() -> None:
    pairs, draw = in_disorder(WORDED), random.Random(1)
    said = [draw.choice(WORDED)[1] if draw.random() < 0.3 else say for _, say in pairs]
    assert [one.code for one in found([(ask, say) for (ask, _), say in zip(pairs, said, strict=True)])] == [
        "other_replies"
    ]


LINES = [f"{a} and {b}, said {c}." for a, b, c in zip(PLACES, PLACES[7:], PLACES[20:], strict=False)]
SOUND: dict[str, list[tuple[str, str]]] = {
    "words shared": NAMED,
    "groups in order": WORDED,
    "groups in disorder": in_disorder(WORDED),
    "lines of one talk": list(pairwise(LINES)),
    "nothing shared": [(f"What is {i * i}?", random.Random(i).choice(["yes", "no"])) for i in range(200)],
    "numbers": [(f"What is {a} plus {b}?", str(a + b)) for a in range(15) for b in range(15)],
    "sorted by topic": [
        (f"{['cats', 'dogs', 'fish'][i // 40]} number {i}", f"{['fur', 'bark', 'gill'][i // 40]} {i % 7}")
        for i in range(120)
    ],
    "one reply": [(f"What is {place}?", "I do not know.") for place in PLACES],
    "Chinese": [
        (f"第{i}座桥叫什么名字，在{'东西南北'[i % 4]}边？", f"它叫{'红黄蓝绿青'[i % 5]}桥。") for i in range(90)
    ],
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_columns_have_no_finding(name: str) -> None:
    assert found(SOUND[name]) == []


def asked_about_colours(folder: Path, by: int) -> Path:
    """Questions about pictures of four colours, whose pictures are those of the row `by` rows later."""
    recipe = questions(folder)
    draw, rows = np.random.default_rng(2), []
    for number in range(120):
        colour = int(draw.integers(4))
        pixels = (
            draw.integers(0, 60, (16, 16, 3)) + np.array([[150, 0, 0], [0, 150, 0], [0, 0, 150], [90, 90, 90]])[colour]
        )
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "pictures" / f"c{number}.png")
        answer = ("red", "green", "blue", "grey")[colour]
        rows.append({"image": f"c{number}.png", "question": "Which colour?", "answer": answer})
    names = [row["image"] for row in rows]
    moved = [{**row, "image": name} for row, name in zip(rows, names[by:] + names[:by], strict=True)]
    write_rows(folder / "pictures" / "questions.jsonl", moved)
    assert json.loads((folder / "pictures" / "questions.jsonl").read_text().splitlines()[0])
    return recipe


def test_pictures_of_other_questions_are_told_and_own_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    (one,) = check_originals(opened(asked_about_colours(tmp_path / "one", 1)))
    assert (one.code, one.values["distance"], one.fields) == ("slipped_pictures", 1, ("data.vqa",))
    own = opened(asked_about_colours(tmp_path / "own", 0))
    assert check_originals(own) == []
    assert transfer(own) is None, "colours show that they are the own ones"


def test_pictures_that_were_shuffled_are_told_by_the_colours_of_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    recipe, file = asked_about_colours(tmp_path, 0), tmp_path / "pictures" / "questions.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    names = np.random.default_rng(6).permutation([row["image"] for row in rows]).tolist()
    write_rows(file, [{**row, "image": name} for row, name in zip(rows, names, strict=True)])
    shuffled = opened(recipe)
    assert [one.code for one in check_originals(shuffled)] == ["pictures_apart"]
    assert transfer(shuffled) is not None
