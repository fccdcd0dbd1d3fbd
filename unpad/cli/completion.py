"""Shell completion of the arguments of verbs."""

from __future__ import annotations

import typer


def recipe_names(incomplete: str) -> list[str]:
    from unpad.recipes.find import complete_recipe

    return complete_recipe(incomplete)


def run_names(incomplete: str) -> list[str]:
    from unpad.run.folder import list_runs

    return [folder.name for folder in list_runs() if folder.name.startswith(incomplete)]


def run_or_recipe_names(incomplete: str) -> list[str]:
    return [*run_names(incomplete), *recipe_names(incomplete)]


def data_kinds(incomplete: str) -> list[str]:
    from unpad.recipes.data import KINDS

    return [kind for kind in KINDS if kind.startswith(incomplete)]


def override_words(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    from unpad.recipes.fields import complete_override

    words: list[str] = context.params.get("overrides") or context.params.get("fields") or []
    return complete_override(context.params.get("recipe"), words, incomplete)


def sampling_words(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    from unpad.recipes.fields import complete_field

    fields = complete_field(None, f"generate.{incomplete}")
    return [(name.removeprefix("generate."), text) for name, text in fields]
