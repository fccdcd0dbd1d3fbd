"""Files a run keeps of its data, and the commands that use the run."""

from __future__ import annotations

from pathlib import Path

from unpad.data.family import family_of
from unpad.errors import CheckpointError
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe
from unpad.run.folder import RECIPE, RUNS


def open_files(recipe: Recipe, folder: Path) -> dict[str, bytes]:
    """What a run kept of its data, by name.

    Args:
        recipe: of a run of the same kind; its model says which files there are.
    """
    files = {}
    for name in family_of(recipe).FILES:
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{name} is missing", where=str(folder), fix="the run ended before it began; train again"
            )
        files[name] = (folder / name).read_bytes()
    return files


def what_next(folder: Path) -> list[str]:
    """What to type after training."""
    name = folder.name if folder.parent.resolve() == RUNS.resolve() else str(folder)
    recipe = load_recipe(str(folder / RECIPE))
    use = family_of(recipe).next_command(recipe, name)
    return [f"next:  {use}", f"       unpad eval {name}", f"       unpad report {name}"]
