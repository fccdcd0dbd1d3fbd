"""Rows of a recipe: listed from all files, divided, chosen by what they are wanted for, and counted."""

from pathlib import Path

import numpy as np

from unpad.data.rows import ChosenRows, choose_rows, list_rows
from unpad.data.sources.example import BadRow, Example, SplitName
from unpad.data.sources.files import SourceFile
from unpad.data.sources.split import Split, Wanted
from unpad.recipes.data import DataSettings
from unpad.recipes.recipe import Recipe
from unpad.storage import sha256_file

PARTS: list[SplitName | None] = ["train", "holdout", "test", "train", None, "bad"]


def recipe_of(folder: Path, **data: object) -> Recipe:
    """Two files of six rows each; the rows of the second count twice."""
    for name in "ab":
        (folder / f"{name}.jsonl").write_text(name)
    sources = [{"path": str(folder / "a.jsonl")}, {"path": str(folder / "b.jsonl"), "weight": 2}]
    return Recipe(data={"text": sources, "on_bad_row": "quarantine", "max_bad": 0.2, "holdout": 0.0, **data})


def read_all(file: SourceFile, data: DataSettings) -> tuple[list[Example], list[BadRow]]:
    places = [f"{file.path.name}:{line}" for line in range(1, 7)]
    rows = [Example(where, (), split=part) for where, part in zip(places, PARTS, strict=True) if part != "bad"]
    return rows, [BadRow(places[-1], "E_TYPE", "no text", "write one")]


def chosen_of(recipe: Recipe, wanted: Wanted, groups: list[str] | None = None) -> ChosenRows[Example]:
    listed = list_rows(recipe, "text", read_all)
    return choose_rows(listed, wanted, range(len(listed.rows)), groups=groups or ())


def test_rows_are_those_that_are_wanted_and_the_others_are_counted(tmp_path):
    recipe = recipe_of(tmp_path)
    learning, tested, new = (chosen_of(recipe, wanted) for wanted in (Wanted.LEARNING, Wanted.TEST, Wanted.NEW))
    assert [row.where for row in learning.rows] == [f"{name}.jsonl:{line}" for name in "ab" for line in (1, 2, 4, 5)]
    assert [row.where for row in tested.rows] == ["a.jsonl:3", "b.jsonl:3"]
    assert len(new.rows) == 10
    assert learning.lines("rows", "no more") == [
        "12 rows read = 8 used + 2 quarantined + 2 of the test part, for `unpad eval` alone",
        "6 to train on, 2 held out; no more",
    ]
    assert tested.lines("rows", "")[0] == "4 rows read = 2 used + 2 quarantined"
    fewer = new.only(np.arange(10) > 0)
    assert fewer.lines("rows", "", 1, "of no use")[0] == "12 rows read = 9 used + 2 quarantined + 1 of no use"
    assert [row.where for row in fewer.rows] == [row.where for row in new.rows[1:]]
    assert (new.sides(), set(learning.sides())) == ({}, set(Split))


def test_the_table_has_a_row_for_each_with_its_source_part_and_unit(tmp_path):
    chosen = chosen_of(recipe_of(tmp_path), Wanted.LEARNING, ["one", "", "", "", "", "", "", "", "one", ""])
    positions = np.arange(8) + 1
    table = chosen.table(positions, chosen.file_hashes(), num_targets=positions * 2)
    assert table.source.tolist() == [0] * 4 + [1] * 4
    assert (table.weights, table.num_test) == ((1.0, 2.0), 2)
    assert table.split.tolist() == [Split.TRAIN, Split.HOLDOUT, Split.TRAIN, Split.TRAIN] * 2
    assert table.group[0] == table.group[6], "of one group"
    assert len(np.unique(table.group)) == 7
    assert (table.positions.tolist(), table.num_targets.tolist()) == (positions.tolist(), (positions * 2).tolist())
    assert table.file_hashes == tuple(
        (str(tmp_path / f"{n}.jsonl"), sha256_file(tmp_path / f"{n}.jsonl")) for n in "ab"
    )
    assert (
        chosen.lines("rows", "")[2]
        == "  2 rows are in 1 group or copies of each other; each is on one side of the split"
    )
