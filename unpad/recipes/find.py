"""Recipes by name: packaged ones, and YAML files."""

from __future__ import annotations

from pathlib import Path

from unpad.errors import RecipeError, nearest
from unpad.storage.paths import user_path
from unpad.terminal.table import described

RECIPES = Path(__file__).parent
SUFFIXES = (".yaml", ".yml")


def recipe_names() -> list[str]:
    """Names of the packaged recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def describe_recipes() -> list[str]:
    """Names of the packaged recipes, each with the first comment of its file."""
    names = recipe_names()
    first = [(RECIPES / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0] for name in names]
    return described(names, [comment.removeprefix("# ") for comment in first])


def find_recipe(recipe: str) -> Path:
    """Find a packaged recipe by name, or a YAML file by path.

    Raises:
        RecipeError: neither exists.
    """
    if "/" not in recipe and not recipe.endswith(SUFFIXES):
        path = RECIPES / f"{recipe}.yaml"
        if path.is_file():
            return path
        raise RecipeError(f'there is no recipe "{recipe}"', fix=nearest(recipe, recipe_names()))
    path = user_path(recipe)
    if not path.is_file():
        raise RecipeError(f"there is no file {recipe}", fix="check the path, or see `unpad recipes`")
    return path


def complete_recipe(incomplete: str) -> list[str]:
    """Packaged names and YAML files that begin with `incomplete`, for shell completion."""
    folder = incomplete[: incomplete.rfind("/") + 1]
    files = [folder + path.name for path in Path(folder).glob("*") if path.suffix in SUFFIXES and path.is_file()]
    return sorted(name for name in [*recipe_names(), *files] if name.startswith(incomplete))
