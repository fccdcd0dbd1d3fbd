"""List of what a recipe reads, for the screen: every file, with the package's own marked."""

from __future__ import annotations

from unpad.data.sources.files import list_paths
from unpad.data.sources.places import resolve_path
from unpad.data.sources.read import TEXT_KINDS
from unpad.recipes.data import KINDS, is_packaged
from unpad.recipes.recipe import Recipe

MOST_LISTED = 20  # files of one folder or pattern


def source_lines(recipe: Recipe) -> list[str]:
    """A line per source of a recipe, and below a folder or pattern of texts a line per file of it.

    Files of images and of patients are not listed: there may be thousands, and their names may be patients' ids.
    """
    lines = []
    for kind in KINDS:
        for source in recipe.data.sources(kind):
            lines.append(_line(f"data.{kind}", source.path))
            lines += _files(recipe, source.path) if kind in TEXT_KINDS else []
    tables = recipe.events.tables if recipe.data.events else {}
    return [*lines, *(_line(f"events.{field}", path) for field, path in tables.items())]


def _line(field: str, path: str) -> str:
    return f"reads {field}: {path}" + (" (comes with unpad)" if is_packaged(path) else "")


def _files(recipe: Recipe, path: str) -> list[str]:
    place = resolve_path(recipe.data, path)
    if place.is_file():
        return []
    paths = list_paths(place)
    more = [f"  and {len(paths) - MOST_LISTED:,} more"] if len(paths) > MOST_LISTED else []
    return [*(f"  {path}" for path in paths[:MOST_LISTED]), *more]
