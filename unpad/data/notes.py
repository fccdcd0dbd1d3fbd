"""Remarks on the data of a run that change nothing, such as a kind of data with no held-out rows."""

from __future__ import annotations

from typing import NamedTuple

from unpad.data.family import Data, family_of
from unpad.data.sources.split import Split
from unpad.recipes.recipe import Recipe

DECLARE = 'add others, or declare "split": "valid"'


class Cause(NamedTuple):
    """Cause for which nothing is held out of a kind of data, and its remedy."""

    what: str
    fix: str


def notes(recipe: Recipe, data: Data) -> list[str]:
    """List the kinds of data with no held-out rows although `data.holdout` > 0, each with a fix."""
    if recipe.data.holdout == 0:
        return []
    return [
        f"note: {cause.what}, so nothing says how good the model is on new data; {cause.fix}"
        for kind in data.kinds
        if (cause := not_held_out(recipe, data, kind)) is not None
    ]


def not_held_out(recipe: Recipe, data: Data, kind: str) -> Cause | None:
    """Find the cause if nothing of a kind of data is held out; None where something is, or there is none of it."""
    table = data.table
    rows = table.kind == data.kinds.index(kind)
    num = int(rows.sum())
    if num == 0 or (table.split[rows] == Split.HOLDOUT).any():
        return None
    if recipe.data.holdout == 0:
        return Cause("data.holdout is 0, so nothing is held out", "set data.holdout=0.05")
    if num == 1 and (cause := data.single_row(recipe, kind)) is not None:
        return Cause(*cause)
    unit = family_of(recipe).UNITS[0]
    return Cause(
        f"nothing of data.{kind} is held out, of {num:,} {unit if num != 1 else unit.removesuffix('s')}", DECLARE
    )
