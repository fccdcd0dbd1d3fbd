"""Paths of a recipe on this machine."""

from pathlib import Path

from unpad.recipes.data import PACKAGED, DataSettings
from unpad.storage.paths import user_path

PACKAGE = Path(__file__).parents[2]
OURS, DRAWN, SIMULATED = PACKAGED


def resolve_path(data: DataSettings, path: str) -> Path:
    """Resolve a path of the recipe.

    `unpad:` starts inside the package. `drawn:shapes.jsonl` is a small set of pictures and `simulated:patients` one of
    patients; both are drawn at the first use.

    Raises:
        RecipeError: it is no path of this machine, or starts in the home of a user whom the machine does not have.
    """
    # Imported where they are drawn: the libraries for pictures and tables take long to load.
    if path.startswith(DRAWN):
        from unpad.examples.drawn import drawn_folder

        return drawn_folder() / path.removeprefix(DRAWN)
    if path.startswith(SIMULATED):
        from unpad.examples.simulated import simulated_folder

        return simulated_folder() / path.removeprefix(SIMULATED)
    if path.startswith(OURS):
        return PACKAGE / path.removeprefix(OURS)
    expanded = user_path(path)
    if expanded.is_absolute() or data.root is None:
        return expanded
    return user_path(data.root) / expanded
