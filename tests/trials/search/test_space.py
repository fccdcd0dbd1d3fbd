"""Fields of a search are ranges, choices or single values, and each border is where it is said to be."""

from __future__ import annotations

import pytest

pytest.importorskip("optuna")

from hypothesis import given, settings
from hypothesis import strategies as some

from unpad.errors import RecipeError
from unpad.trials.search.space import Choice, Range, _parts, split_fields, written


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a,b", ["a", "b"]), (" a , b ", ["a", "b"]), ("a", ["a"]), ("", [""]), (",", ["", ""]),
        ("[a,b],c", ["[a,b]", "c"]), ("{a: 1, b: 2},c", ["{a: 1, b: 2}", "c"]), ("[[a,b],c],d", ["[[a,b],c]", "d"]),
        ("'a,b',c", ["'a,b'", "c"]), ('"a,b",c', ['"a,b"', "c"]), ('"it\'s,so",c', ['"it\'s,so"', "c"]),
        ("'[',a,']'", ["'['", "a", "']'"]), ("[a,'],',b],c", ["[a,'],',b]", "c"]), ('"a"",b",c', ['"a"",b"', "c"]),
    ],
)  # fmt: skip
def test_commas_within_brackets_or_quotes_do_not_separate(text: str, parts: list[str]) -> None:
    assert _parts(text) == parts


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("1..2", Range(1, 2, True, False)),
        ("-3..-1", Range(-3, -1, True, False)),
        ("0..0.5", Range(0, 0.5, False, False)),
        ("1e0..9", Range(1, 9, False, False)), ("1E0..9", Range(1, 9, False, False)),
        (".5..1", Range(0.5, 1, False, False)),
        ("1..8:log", Range(1, 8, True, True)), ("0.1..8:log", Range(0.1, 8, False, True)),
        (" 1 .. 2 ", Range(1, 2, True, False)),
    ],
)  # fmt: skip
def test_ranges_hold_whole_numbers_where_both_ends_are_whole(text: str, made: Range) -> None:
    assert split_fields([f"a={text}", "b=1"]) == ({"a": made}, ["b=1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2..2", "is empty"), ("2..1", "is empty"), ("1.0..1", "is empty"), ("0..1:log", "no logarithm"),
        ("-1..1:log", "no logarithm"), ("x..1", '"x" is no number'), ("1..x", '"x" is no number'),
        ("1..2:lin", "may end with"), ("a,a", "twice"), ("a,,b", "empty"), ("a,", "empty"),
    ],
)  # fmt: skip
def test_what_is_no_range_and_no_choice_is_refused_with_its_key(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        split_fields([f"a.b={text}"])
    assert caught.value.where == "command line: a.b"
    assert caught.value.fix


def test_a_path_and_a_quoted_text_are_no_ranges() -> None:
    fields = ["a=../x", "b='1..2'", "c=x/1..2", "d=C:\\a..b\\c"]
    assert split_fields(fields) == ({}, fields)
    assert split_fields(['a="1..2",3']) == ({"a": Choice(('"1..2"', "3"))}, [])


def test_ends_are_what_a_recipe_is_checked_with() -> None:
    assert Range(1.0, 3.0, True, False).ends() == ["1", "3"]
    assert Range(1e-5, 2.5, False, False).ends() == ["1.0e-05", "2.5"]
    assert Choice(("a", "[b]")).ends() == ["a", "[b]"]


@settings(deadline=None, max_examples=60)
@given(some.floats(allow_nan=False, allow_infinity=False) | some.integers())
def test_a_number_is_read_back_from_what_is_written(value: float | int) -> None:
    import yaml

    assert yaml.safe_load(written(value)) == value
