"""Verbs of `unpad recipes`."""

from pathlib import Path
from typing import Annotated

import typer

from unpad.cli.options import load_torch, print_json, recipe_names
from unpad.errors import RecipeError
from unpad.storage.paths import new_path
from unpad.terminal.printing import print_lines

verbs = typer.Typer(help="List, copy and describe recipes.", invoke_without_command=True)


@verbs.callback(epilog="Example: unpad recipes")
def recipes(context: typer.Context) -> None:
    """List the packaged recipes."""
    from unpad.recipes.file import describe_recipes

    if context.invoked_subcommand is None:
        print_lines(describe_recipes())


@verbs.command(epilog="Example: unpad recipes copy zh_chat my.yaml")
def copy(
    name: Annotated[str, typer.Argument(autocompletion=recipe_names)],
    file: Annotated[Path, typer.Argument(parser=new_path)],
) -> None:
    """Write an editable copy of a packaged recipe."""
    from unpad.recipes.file import find_recipe
    from unpad.storage import write_atomic

    if file.exists():
        raise RecipeError("the file exists already", where=str(file), fix="choose another name, or remove it")
    write_atomic(file, find_recipe(name).read_bytes())
    print_lines([f"{file} written; run it with: unpad train {file}"])


@verbs.command(epilog="Example: unpad recipes schema > recipe.schema.json")
def schema() -> None:
    """Print the JSON schema of recipes, for editors that complete and check YAML."""
    load_torch()
    from unpad.models import config_schemas
    from unpad.recipes.schema import recipe_schema

    print_json(recipe_schema(config_schemas()))
