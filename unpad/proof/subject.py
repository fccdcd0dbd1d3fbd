"""Subject of a certificate: a recipe, or a run with the files of its data that it kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unpad.interchange.origin import open_named
from unpad.processes.group import ALONE, Group
from unpad.run.kept import open_files
from unpad.training.setup import Setup, prepare_setup


def open_setup(name: str, overrides: Sequence[str], group: Group = ALONE) -> Setup:
    """The data and the model of a recipe, or of a run by its directory or name, with the weights that training would
    start from.

    Args:
        group: the processes of the proof.

    Raises:
        RecipeError, CheckpointError, SourceError: it cannot be trained, or the run names no data.
    """
    recipe, folder = open_named(name, overrides, on_own_data(name))
    recipe = recipe.model_copy(update={"images": recipe.images.plain()})  # random augmentation has no truth to equal
    if folder is None:
        return prepare_setup(recipe, Path(), None, group=group)
    return prepare_setup(recipe, folder, open_files(recipe, folder), compare=False, group=group)


def on_own_data(name: str) -> str:
    """Advice for an imported run, which names no data."""
    return f"prove it on yours: unpad prove {name} data.KIND=FILE"
