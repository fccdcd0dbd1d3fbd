"""Moved data of a run: its new paths, given as fields of the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from unpad.data.sources.files import resolve_path
from unpad.errors import RecipeError, SourceError
from unpad.recipes.data import KINDS, as_sources, is_packaged
from unpad.recipes.file import parse_recipe
from unpad.recipes.overrides import apply_override
from unpad.recipes.recipe import Recipe, differences
from unpad.recipes.section import kept_paths

# Last parts of fields that name a file, a folder or a run.
PLACES = ("path", "root", "split", "code_embeddings", "synonyms_file", "init_from")


def relocated(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe of a run with new paths of its data; the other fields of a source stay.

    Raises:
        RecipeError: an override is wrong, or changes more than a place.
    """
    if not overrides:
        return recipe
    values = recipe.model_dump(mode="json")
    before = {kind: values["data"][kind] for kind in KINDS}
    for given in overrides:
        apply_override(values, given)
    for kind, old in before.items():
        new = as_sources(values["data"].get(kind))
        if isinstance(new, list) and len(new) == len(old):
            values["data"][kind] = [{**was, **now} for was, now in zip(old, new, strict=True)]
    with kept_paths():
        moved = parse_recipe(values)
    for key in differences(recipe, moved):
        if key.rpartition(".")[2] not in PLACES:
            what = f"{key} is not the place of a file, and a run's other fields stay as they were"
            fix = f"give new places of data alone, such as {_field_of(recipe, '')}=NEW"
            raise RecipeError(what, where="command line", fix=fix)
    return moved


@contextmanager
def advising(run: str, recipe: Recipe) -> Iterator[None]:
    """Add advice on how to give the new path to the error of a missing file.

    Args:
        run: the command and its run.
        recipe: of the run.
    """
    try:
        yield
    except SourceError as error:
        if "no such file" not in error.summary and "no file matches" not in error.summary:
            raise
        field = _field_of(recipe, error.where)
        fix = f"put it back, or name its new place as a field of the recipe, such as {run} {field}=NEW"
        raise SourceError(error.summary, where=error.where, fix=fix, details=error.details) from None


def _field_of(recipe: Recipe, where: str) -> str:
    """The field that names the place of an error; if none does, the first that names data.

    Args:
        where: a file, folder or pattern, which the working directory may follow in brackets.
    """
    place = Path(where.partition(" (working directory ")[0])
    fields: dict[str, str] = {}  # field -> path
    for kind in KINDS:
        sources = recipe.data.sources(kind)
        names = [f"data.{kind}"] if len(sources) == 1 else [f"data.{kind}.{n}.path" for n in range(len(sources))]
        fields |= dict(zip(names, (source.path for source in sources), strict=True))
    fields |= {f"events.{field}": path for field, path in recipe.events.tables.items()}
    known = {field: resolve_path(recipe.data, path) for field, path in fields.items() if not is_packaged(path)}
    named = (field for field, path in known.items() if place == path or path in place.parents)
    return next(named, next(iter(known), "data.text"))
