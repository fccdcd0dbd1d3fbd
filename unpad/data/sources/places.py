"""Paths of a recipe on this machine."""

from pathlib import Path

from unpad.data.sources.drawn import drawn_folder
from unpad.data.sources.simulated import simulated_folder
from unpad.recipes.data import DataSettings
from unpad.storage.paths import user_path

PACKAGE = Path(__file__).parents[2]
# With `unpad:`, the prefixes of `recipes.data.PACKAGED`.
MADE = {"drawn:": drawn_folder, "simulated:": simulated_folder}  # sets that the program draws itself


def resolve_path(data: DataSettings, path: str) -> Path:
    """Resolve a path of the recipe.

    `unpad:` starts inside the package. `drawn:shapes.jsonl` is a small set of pictures and `simulated:patients` one of
    patients; both are drawn at the first use.

    Raises:
        RecipeError: it is no path of this machine, or starts in the home of a user whom the machine does not have.
    """
    for prefix, folder in MADE.items():
        if path.startswith(prefix):
            return folder() / path.removeprefix(prefix)
    if path.startswith("unpad:"):
        return PACKAGE / path.removeprefix("unpad:")
    expanded = user_path(path)
    if expanded.is_absolute() or data.root is None:
        return expanded
    return user_path(data.root) / expanded
