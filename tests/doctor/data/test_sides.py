"""Classes, sides of the split, values of patients and the course of a run: planted troubles, and sound neighbours."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.doctor.missed import with_asked, with_rows
from tests.doctor.troubles import Recipe, Row, with_tables
from tests.helpers.families import images, patients, questions, rewritten, text, write_rows
from unpad.doctor.data.pictures import check_lost_pictures, check_pictures
from unpad.doctor.data.rows import check_rows
from unpad.doctor.data.values import check_values
from unpad.doctor.examine import checks_of
from unpad.doctor.recipe.aims import check_aims
from unpad.doctor.recipe.course import check_course
from unpad.doctor.subject import Subject, TimeBudget, open_subject
from unpad.doctor.text import check_originals
from unpad.terminal.finding import Finding


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))


def codes(check: Callable[[Subject[Any]], list[Finding]], recipe: Path) -> list[str]:
    found = check(open_subject(str(recipe), (), TimeBudget(600.0, time.monotonic)))
    return [one.code for one in found if one.severity != "note"]


def check_sides(subject: Subject) -> list[Finding]:
    """Findings of the family's checks on classes, answers and sides."""
    told = {"spelt_twice", "lone_classes", "other_classes", "shortcut", "without_picture", "sides_apart", "lost_aspect"}
    return [one for one in checks_of(subject).check_sequences(subject) if one.code in told]


def labelled(change: Callable[[Row, int], Row], sides: Callable[[str], int] = lambda label: 24) -> Recipe:
    """Noise of two classes, half of it brighter, whose rows are changed."""

    def written(folder: Path, **sections: Any) -> Path:
        folder.mkdir(parents=True)
        draw, rows = np.random.default_rng(1), []
        for number in range(120):
            label = ("dark", "light")[number % 2]
            pixels = draw.integers(0, 100, (sides(label), 24, 3)) + 60 * (number % 2)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"p{number}.png")
            rows.append(change({"image": f"p{number}.png", "label": label}, number))
        path = write_rows(folder / "rows.jsonl", rows)
        recipe = images(folder, **sections)
        return rewritten(recipe, {"data": {"images": path}})

    return written


def split_by_class(row: Row, number: int) -> Row:
    return {**row, "split": "valid" if row["label"] == "light" and number % 3 else "train"}


def split_evenly(row: Row, number: int) -> Row:
    return {**row, "split": "valid" if number % 5 in (1, 2) else "train"}


def of_eye_colour(row: Row, number: int) -> Row:
    """The question tells the answer."""
    answer = "yes" if number % 2 else "no"
    return {**row, "question": "Is it so?" if number % 2 else "Is it not so?", "answer": answer}


def in_one_square(sides: Callable[[str], int]) -> Recipe:
    """The same, all resized to one square."""

    def written(folder: Path, **sections: Any) -> Path:
        return labelled(lambda row, i: row, sides)(folder, images={"size": "square", "square": 24}, **sections)

    return written


@pytest.mark.promise("doctor.questions")
@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (labelled(lambda row, i: row), []),
        (labelled(split_evenly), []),
        (labelled(lambda row, i: {**row, "label": row["label"].upper() if i % 3 else row["label"]}), ["spelt_twice"]),
        (labelled(lambda row, i: {**row, "label": "Aa"[row["label"] == "dark"]}), []),
        (labelled(lambda row, i: {**row, "label": f"id {i}"}), ["lone_classes"]),
        (labelled(split_by_class), ["other_classes", "sides_apart"]),
        (labelled(lambda row, i: row, lambda label: len(label) * 6), ["shortcut"]),
        (in_one_square(lambda label: len(label) * 6), ["shortcut", "lost_aspect"]),
        (in_one_square(lambda label: 24), []),
        (with_rows("texts", lambda rows: [
            {"text": row["text"] * (8 if i % 3 == 0 else 1), "split": "valid" if i % 3 == 0 else "train"}
            for i, row in enumerate(rows)]), ["sides_apart"]),
        (questions, []),
        (patients, []),
        (text, []),
    ],
)  # fmt: skip
def test_classes_and_sides(recipe: Recipe, expected: list[str], tmp_path: Path) -> None:
    assert codes(check_sides, recipe(tmp_path / "data")) == expected


@pytest.mark.parametrize(("side", "expected"), [(8, []), (12, []), (32, ["one_patch"])])
def test_pictures_of_one_patch_lose_their_detail_where_they_were_shrunk(
    side: int, expected: list[str], tmp_path: Path
) -> None:
    recipe = rewritten(
        labelled(lambda row, i: row, lambda label: side)(tmp_path / "data"), {"images": {"max_tokens": 1}}
    )
    for path in (tmp_path / "data").glob("p*.png"):
        with Image.open(path) as picture:
            small = picture.resize((side, side))
        small.save(path)
    assert codes(check_pictures, recipe) == expected


def test_answers_that_questions_alone_tell(tmp_path: Path) -> None:
    def many(folder: Path) -> Path:
        recipe = with_asked(of_eye_colour)(folder)
        path = folder / "pictures" / "questions.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        write_rows(path, [of_eye_colour(row, i) for i, row in enumerate(rows * 8)])
        return recipe

    assert codes(check_sides, many(tmp_path / "data")) == ["without_picture"]


def in_two_units(rows: list[Row]) -> list[Row]:
    return [{**row, "value": (20 + row["value"]) * (18 if i % 2 else 1)} for i, row in enumerate(rows)]


def with_zeros(rows: list[Row]) -> list[Row]:
    return [{**row, "value": 0.0 if i % 6 == 0 else 40 + row["value"]} for i, row in enumerate(rows)]


def rounded(rows: list[Row]) -> list[Row]:
    """Grades from 3 to 15, most of them 15, as a scale of consciousness."""
    return [{**row, "value": float(15 - max(0, round(row["value"] * 2)) % 13)} for row in rows]


def inflated(rows: list[Row]) -> list[Row]:
    """Half of the values are 0, and the others come down to it, as doses do."""
    return [{**row, "value": max(0.0, row["value"])} for row in rows]


def glued(between: str, unit: str = "") -> Callable[[list[Row]], list[Row]]:
    """The value is a part of the code, and there is none."""

    def changed(rows: list[Row]) -> list[Row]:
        names = {"a": "lactate", "b": "pulse", "c": "sodium"}
        return [
            {**row, "test": f"{names.get(row['test'], 'other')}{between}{5 + row['value']:.1f}{unit}", "value": None}
            for row in rows
        ]

    return changed


def of_a_classification(rows: list[Row]) -> list[Row]:
    """Diagnoses of a letter and a number, many and most of them seldom."""
    draw = np.random.default_rng(4)
    return [
        {**row, "test": f"{'IEJN'[i % 4]}{draw.integers(10, 99)}.{draw.integers(0, 9)}"} for i, row in enumerate(rows)
    ]


def of_a_vocabulary(rows: list[Row]) -> list[Row]:
    draw = np.random.default_rng(4)
    return [{**row, "test": f"{('ICD9:', 'SNOMED_')[i % 2]}{draw.integers(100, 200)}"} for i, row in enumerate(rows)]


def with_doses(rows: list[Row]) -> list[Row]:
    """Some codes are a drug and one of its few doses."""
    return [{**row, "test": f"{row['test']}spirin {(50, 100, 500)[i % 3]} mg"} for i, row in enumerate(rows)]


def with_orders(rows: list[Row]) -> list[Row]:
    """Codes hold the number of the order, which never recurs; another check tells it."""
    return [{**row, "test": f"{row['test']}-{i}"} for i, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (glued("="), ["values_in_codes"]),
        (glued(": "), ["values_in_codes"]),
        (glued("_"), ["values_in_codes"]),
        (glued(" ", " mmol/l"), ["values_in_codes"]),
        (glued(""), ["values_in_codes"]),
        (of_a_classification, []),
        (of_a_vocabulary, []),
        (with_doses, []),
        (with_orders, []),
        (in_two_units, ["two_scales"]),
        (with_zeros, ["stand_in"]),
        (rounded, []),
        (inflated, []),
        (lambda rows: rows, []),
    ],
)
def test_values(change: Callable[[list[Row]], list[Row]], expected: list[str], tmp_path: Path) -> None:
    assert codes(check_values, with_tables(change)(tmp_path / "data")) == expected


def test_a_floor_above_the_spread_of_values(tmp_path: Path) -> None:
    assert codes(check_values, patients(tmp_path / "data", events={"std_floor": 100.0})) == ["floored"]


STAGES = [
    {"name": "pretrain", "use": ["text"], "train": {"max_epochs": 6}},
    {"name": "tune", "use": ["chat"], "optim": {"lr_scale": 0.5}, "train": {"max_epochs": 6}},
]


def second(**changes: Any) -> list[dict[str, Any]]:
    return [STAGES[0], {**STAGES[1], **changes}]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, []),
        ({"stages": STAGES}, []),
        ({"stages": second(optim={"lr_scale": 60.0})}, ["later_rate"]),
        ({"stages": second(train={"max_epochs": 6, "label_smoothing": 0.9})}, ["smoothing"]),
        ({"stages": second(optim={"lr_scale": 1e-5})}, ["later_slow"]),
        ({"stages": second(plan={"tokens_per_step": 1 << 20})}, ["later_few_steps"]),
        ({"stages": STAGES[:1]}, ["unused"]),
        ({"stages": STAGES, "train": {"max_steps": 20}}, ["stage_without_step"]),
        ({"stages": STAGES, "train": {"max_steps": 10_000}}, []),
        ({"stages": STAGES, "train": {"max_steps": 41}}, ["later_few_steps"]),
        ({"stages": second(plan={"tokens_per_step": 1 << 20}), "train": {"min_steps": 40}}, []),
        ({"stages": STAGES, "train": {"min_steps": 60}}, []),
        ({"stages": STAGES, "train": {"min_steps": 60, "max_steps": 90}}, ["later_few_steps"]),
        ({"stages": second(train={"max_epochs": 0}), "train": {"max_steps": 20}}, []),
        (
            {
                "stages": [{**STAGES[0], "train": {"max_epochs": 6, "patience": 3}}, STAGES[1]],
                "train": {"max_steps": 20},
            },
            [],
        ),
        ({"stages": [*STAGES, {"name": "prefer", "use": ["pairs"]}]}, ["stage_without_data"]),
        ({"train": {"max_epochs": 2000}}, ["many_epochs"]),
        ({"train": {"max_epochs": 2000, "patience": 20}}, []),
        ({"train": {"max_epochs": 12, "patience": 1, "eval_every": 1}}, ["impatient"]),
        ({"train": {"max_epochs": 12, "patience": 3}}, []),
        ({"train": {"max_epochs": 12, "patience": 3}, "plan": {"tokens_per_step": 400}}, []),
        ({"plan": {"grow": {2: 100000}, "tokens_per_micro": 200}}, ["grown"]),
        ({"plan": {"grow": {2: 400}, "tokens_per_micro": 200}}, []),
        ({"generate": {"temperature": 50}}, ["generation"]),
        ({"generate": {"repetition_penalty": 9.0}}, ["generation"]),
        ({"generate": {"max_new_tokens": 1}}, ["generation"]),
        ({"generate": {"temperature": 1.0, "top_p": 0.9}}, []),
    ],
)
def test_the_course_of_a_run(sections: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    assert codes(check_course, text(tmp_path / "data", **sections)) == expected


@pytest.mark.parametrize(("stride", "expected"), [(1, ["overlap"]), (8, [])])
def test_windows_that_overlap_nearly_whole(stride: int, expected: list[str], tmp_path: Path) -> None:
    long = with_rows("texts", lambda rows: [{"text": row["text"] * 6} for row in rows])
    plan = {"max_tokens": 16, "stride": stride, "tokens_per_micro": 200}
    assert codes(check_course, long(tmp_path / "data", plan=plan)) == expected


def test_one_text_of_which_nothing_can_be_held_out(tmp_path: Path) -> None:
    one = with_rows("texts", lambda rows: [{"text": "".join(row["text"] for row in rows)}])
    assert codes(check_course, one(tmp_path / "data")) == ["not_held_out"]


def test_one_prefix_for_both_roles_and_rows_that_were_left_out(tmp_path: Path) -> None:
    same = text(tmp_path / "same", data={"template": {"user": "", "assistant": ""}})
    assert codes(check_course, same) == ["one_role"]

    def some_bad(rows: list[Row]) -> list[Row]:
        return [{"body": row["text"]} if i % 3 == 0 else row for i, row in enumerate(rows)]

    bad = with_rows("texts", some_bad)(tmp_path / "bad", data={"on_bad_row": "quarantine", "max_bad": 0.9})
    assert codes(check_originals, bad) == ["many_bad"]


def without_pictures(lost: Callable[[int], bool], question: Callable[[int], str]) -> Recipe:
    """Questions about pictures, of which some have none."""
    return with_asked(lambda row, i: {**row, "image": None if lost(i) else row["image"], "question": question(i)})


def test_questions_whose_pictures_are_lost_are_told_and_those_of_a_text_alone_are_not(tmp_path: Path) -> None:
    def lost_in(recipe: Path) -> list[str]:
        subject: Any = open_subject(str(recipe), (), TimeBudget(600.0, time.monotonic))
        return [one.code for one in check_lost_pictures(subject.data)]

    lost = without_pictures(lambda i: i % 3 == 0, lambda i: f"Is picture {i} bright?")(tmp_path / "lost")
    mixed = without_pictures(lambda i: i % 3 == 0, lambda i: f"Is picture {i} bright?" if i % 3 else f"What is {i}?")
    assert lost_in(lost) == ["lost_pictures"]
    assert lost_in(mixed(tmp_path / "mixed")) == []


@pytest.mark.parametrize(("weight", "expected"), [(60, ["too_often"]), (3, [])])
def test_a_few_rows_that_make_up_an_epoch(weight: int, expected: list[str], tmp_path: Path) -> None:
    recipe = text(tmp_path / "data", data={"chat": []})
    few = write_rows(tmp_path / "data" / "few.jsonl", [{"text": f"第{i}个词条的意思是桥。"} for i in range(8)])
    sources = [{"path": str(tmp_path / "data" / "texts.jsonl")}, {"path": few, "weight": weight}]
    rewritten(recipe, {"data": {"text": sources}})
    assert [one for one in codes(check_rows, recipe) if one in ("too_often", "swallowed")] == expected


@pytest.mark.parametrize(("ramp", "expected"), [({"steps": 20_000}, ["ramp_unfinished"]), ({"share": 0.5}, [])])
def test_a_ramp_that_the_stage_does_not_end(ramp: dict[str, float], expected: list[str], tmp_path: Path) -> None:
    recipe = patients(tmp_path / "data", losses={"classification": {"start": 0.0, "end": 1.0, **ramp}})
    assert codes(check_aims, recipe) == expected
