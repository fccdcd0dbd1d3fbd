"""Arguments and options that verbs share, with their completion by the shell, and output for programs."""

from typing import Annotated, Any

import typer

from unpad.terminal import printing


def print_json(value: Any) -> None:
    """Print a value as JSON; numbers that are not finite are "inf", "-inf" or "nan"."""
    from unpad.storage import finite

    printing.print_json(finite(value))


def recipe_names(incomplete: str) -> list[str]:
    from unpad.recipes.file import complete_recipe

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
    from unpad.recipes.schema import complete_override

    words: list[str] = context.params.get("overrides") or context.params.get("fields") or []
    return complete_override(context.params.get("recipe"), words, incomplete)


def sampling_words(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    from unpad.recipes.schema import complete_field

    fields = complete_field(None, f"generate.{incomplete}")
    return [(name.removeprefix("generate."), text) for name, text in fields]


def _debug(context: typer.Context, debug: bool) -> None:
    """Make `main` print the traceback of an error."""
    if isinstance(context.obj, dict):
        context.obj["debug"] = debug


RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A packaged name, or a YAML file.", autocompletion=recipe_names)
]
OptionalSubject = Annotated[
    str | None, typer.Argument(metavar="RUN|RECIPE", help="A run, or a recipe.", autocompletion=run_or_recipe_names)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value ...]", help="Recipe fields to change.", autocompletion=override_words),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run directory, or its name under runs/.", autocompletion=run_names)
]
Sampling = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value ...]", help="Sampling fields.", autocompletion=sampling_words),
]
System = Annotated[str, typer.Option(help="System text before the conversation.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Also print shapes, sums and skipped items.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors.", callback=_debug)]
