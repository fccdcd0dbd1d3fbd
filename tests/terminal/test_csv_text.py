"""A CSV table is read back as it was, and no cell of it is a formula."""

import csv
import io
import math
from pathlib import Path

import pytest

from unpad.inference.images import Answer, to_csv
from unpad.terminal.table import csv_text

pytestmark = pytest.mark.promise("input.pages")


@pytest.mark.parametrize("cell", ["=1+1", "+1+1", "-a", "@SUM(A1)", "\t=1", "\r=1", "=cmd.png", "-", "\t1", "--1"])
def test_a_text_that_would_be_a_formula_is_a_text(cell):
    assert list(csv.reader(io.StringIO(csv_text(["name"], [[cell]]), newline=""))) == [["name"], [f"'{cell}"]]
    assert next(csv.reader(io.StringIO(csv_text([cell], []), newline=""))) == [f"'{cell}"]


@pytest.mark.parametrize(
    "cell", ["-1.5", "+3", "-1e-9", "-inf", "cat", "", "'=1", "a=b", -2, -0.1, math.inf, "图,片", 'a"b', "a\nb"]
)
def test_numbers_and_other_texts_stay(cell):
    assert list(csv.reader(io.StringIO(csv_text(["name"], [[cell]]), newline=""))) == [["name"], [str(cell)]]


def test_names_of_files_and_classes_are_no_formulas():
    answer = Answer(Path("=cmd.png"), top=(("@class", 0.5),), text=None, fault="-fault", mark="")
    assert to_csv([answer]).splitlines()[1].split(",") == ["'=cmd.png", "'@class", "0.500000", "'-fault", ""]
