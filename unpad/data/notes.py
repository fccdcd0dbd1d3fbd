"""Remarks on the data of a run that change nothing, such as a kind of data of which nothing is held out."""

from __future__ import annotations

from functools import partial

from unpad.data.family import Data, family_of
from unpad.data.sources.documents import single_document
from unpad.data.sources.files import expand
from unpad.data.sources.places import resolve_path
from unpad.data.sources.split import Split
from unpad.recipes.recipe import Recipe


def notes(recipe: Recipe, data: Data) -> list[str]:
    """Name every kind of data of which nothing is held out although the recipe holds out a share, with the remedy."""
    if recipe.data.holdout == 0:
        return []
    found, table, unit = [], data.table, family_of(recipe).UNITS[0]
    for index, kind in enumerate(data.kinds):
        rows = table.kind == index
        if rows.any() and not (table.split[rows] == Split.HOLDOUT).any():
            found.append(
                f"note: nothing of data.{kind} is held out, of {int(rows.sum()):,} {unit}, so nothing says how good"
                ' the model is on new data; add others, or declare "split": "valid"'
            )
            if kind == "text" and int(rows.sum()) == 1:
                files = expand(recipe.data.text, partial(resolve_path, recipe.data))
                found += [
                    f"note: {line}" for file in files if (line := single_document(file, recipe.data.separator, 1))
                ]
    return found
