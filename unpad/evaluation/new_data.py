"""Recipe of a run pointed at new labelled data, which the run's own tokenizer, classes, codes and statistics read."""

from __future__ import annotations

from pathlib import Path

from unpad.data.check import guess_kind
from unpad.data.family import family_of
from unpad.errors import RecipeError
from unpad.recipes.data import Source
from unpad.recipes.recipe import Recipe


def recipe_for(recipe: Recipe, path: Path) -> Recipe:
    """Point a run's recipe at the data of `path`.

    Args:
        path: file, folder or glob in the form of the run's data. Of patients: a folder that holds all tables of the
            recipe under their names, its labels among them, or the one table that the recipe reads.

    Raises:
        RecipeError: there is nothing at `path`, or a table is missing there.
        SourceError: the kind of the data cannot be told.
    """
    kinds = family_of(recipe).KINDS
    if kinds == ("events",):
        return _patients(recipe, path)
    if not path.exists() and not any(path.parent.glob(path.name)):
        raise RecipeError("there is no such file", where=str(path), fix="name a file or folder of labelled data")
    used = [kind for kind in kinds if getattr(recipe.data, kind)]
    kind = used[0] if len(used) == 1 else guess_kind(path)
    if kind not in kinds:
        fix = "this run reads " + " and ".join(kinds)
        raise RecipeError(f"the data looks like {kind}", where=str(path), fix=fix)
    fields = {source.field for source in getattr(recipe.data, kind)}
    source = Source(path=str(path.resolve()), field=fields.pop() if len(fields) == 1 else None)
    nothing: dict[str, list[Source]] = {one: [] for one in kinds}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=nothing | {kind: [source]})})


def _patients(recipe: Recipe, path: Path) -> Recipe:
    events = recipe.events
    names = {source.path for source in recipe.data.events} | ({events.labels.path} if events.labels else set())
    if len(names) == 1 and path.exists() and not (path / Path(next(iter(names))).name).exists():
        places = dict.fromkeys(names, path)
    else:
        places = {name: path / Path(name).name for name in names}
    for name, place in places.items():
        if not place.exists():
            fix = "name a folder with files of the names in the recipe: " + ", ".join(
                sorted(Path(one).name for one in names)
            )
            raise RecipeError(f"there is nothing in the place of {name}", where=str(place), fix=fix)
    sources = [source.model_copy(update={"path": str(places[source.path].resolve())}) for source in recipe.data.events]
    labels = events.labels
    if labels is not None:
        labels = labels.model_copy(update={"path": str(places[labels.path].resolve())})
    return recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update={"events": sources}),
            "events": events.model_copy(update={"labels": labels, "split": None}),
        }
    )
