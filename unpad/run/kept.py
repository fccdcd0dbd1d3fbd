"""Data files that a run keeps, and the commands that use a run (apart: families load torch, run directories do not)."""

from __future__ import annotations

import os
from pathlib import Path

from unpad.data.family import OPTIONAL_FILES, family_of, next_command
from unpad.errors import CheckpointError, SourceError
from unpad.recipes.recipe import Recipe
from unpad.run.folder import RUNS, made_by, run_recipe
from unpad.storage.reading import read_file


def open_files(recipe: Recipe, folder: Path) -> dict[str, bytes]:
    """Read the data files that a run kept, {name: bytes}.

    Args:
        recipe: recipe of a run of the same family; it names the files.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    files = {}
    for name in family_of(recipe).FILES:
        if not os.path.exists(folder / name):
            raise CheckpointError(
                f"{name} is missing", where=str(folder), fix="the run ended before its first step; train again"
            )
        files[name] = read_file(folder / name)
    return files | {name: read_file(folder / name) for name in OPTIONAL_FILES if os.path.exists(folder / name)}


def refuse_without_data(recipe: Recipe, folder: Path, fix: str) -> None:
    """Refuse an imported run if its own data is requested.

    Raises:
        SourceError: it has none; `fix` is the advice.
    """
    if not any(getattr(recipe.data, kind) for kind in family_of(recipe).KINDS) and (command := made_by(folder)):
        raise SourceError(f'"{command}" made this run, which names no data', where=str(folder), fix=fix)


def what_next(folder: Path) -> list[str]:
    """Commands that use a run, as lines to print after training."""
    name = folder.name if folder.parent.resolve() == RUNS.resolve() else str(folder)
    recipe = run_recipe(folder)
    use = next_command(recipe, name)
    commands = dict.fromkeys([use, f"unpad eval {name}", f"unpad report {name}"])  # each once
    return [f"{'' if index else 'next:':<7}{command}" for index, command in enumerate(commands)]
