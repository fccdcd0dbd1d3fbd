"""Arguments and options that verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

from unpad.cli.completion import override_words, recipe_names, run_names, run_or_recipe_names, sampling_words


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
RunOrRecipe = Annotated[
    str, typer.Argument(metavar="RUN|RECIPE", help="A run, or a recipe.", autocompletion=run_or_recipe_names)
]
Sampling = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value ...]", help="Sampling fields.", autocompletion=sampling_words),
]
System = Annotated[str, typer.Option(help="System text before the conversation.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Also print shapes, sums and skipped items.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors.", callback=_debug)]
