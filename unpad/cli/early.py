"""Command-line errors that are reported before torch loads, which takes seconds: names, fields and places.

Every check here is repeated where the value is used.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


def check_recipe(recipe: str, overrides: Sequence[str] = ()) -> None:
    """Load torch if a recipe, its overrides and the paths in it are valid.

    Raises:
        RecipeError: there is no such recipe, or a field or the run in `model.from` is wrong.
        SourceError: a source of the recipe has no file.
    """
    from unpad.data.sources.files import resolve_path
    from unpad.interchange.hub import is_hub_name
    from unpad.recipes.data import KINDS, is_packaged
    from unpad.recipes.file import load_recipe
    from unpad.run.folder import find_run
    from unpad.storage.paths import user_path

    loaded = load_recipe(recipe, overrides)
    tables = loaded.events.tables.values() if loaded.data.events else ()
    paths = [*(source.path for kind in KINDS for source in loaded.data.sources(kind)), *tables]
    paths += [path for source in loaded.data.vqa for path in source.beside.values()]
    check_places(resolve_path(loaded.data, path) for path in paths if not is_packaged(path))
    base = loaded.model.get("from")
    for start in (base, loaded.train.init_from):
        if isinstance(start, str) and not user_path(start).is_dir() and not is_hub_name(start):
            find_run(start)
    load_torch()


def check_run(run: str, fields: Sequence[str] = (), places: Iterable[Path] = ()) -> None:
    """Load torch if a run, overrides for it and further paths are valid.

    Raises:
        RecipeError: there is no such run, or a field is wrong.
        SourceError: there is no file at one of the places.
    """
    from unpad.run.folder import find_run, run_recipe

    run_recipe(find_run(run), fields)
    check_places(places)
    load_torch()


def check_names(runs: Iterable[str]) -> None:
    """Refuse names of runs that do not exist.

    Raises:
        RecipeError: names the first.
    """
    from unpad.run.folder import find_run

    for run in runs:
        find_run(run)


def check_run_or_recipe(name: str, overrides: Sequence[str] = ()) -> None:
    """`check_run` or `check_recipe`, depending on the name."""
    from unpad.run.folder import as_run

    run = as_run(name)
    check_recipe(name, overrides) if run is None else check_run(str(run), overrides)


def check_places(places: Iterable[Path]) -> None:
    """Refuse paths that do not exist; a folder is listed later.

    Raises:
        SourceError: a path is neither a file, a folder nor a pattern that matches a file.
    """
    from unpad.data.sources.files import list_paths

    for place in places:
        if not place.exists():
            list_paths(place)


def load_torch() -> None:
    """Load torch, with a line on the terminal meanwhile."""
    if "torch" not in sys.modules:
        from unpad.terminal.progress import progress

        with progress("loading torch"):
            import torch  # noqa: F401
