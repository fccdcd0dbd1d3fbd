"""Verbs of `unpad data`."""

import re
from typing import Annotated

import typer

from unpad.cli.options import Debug, Json, data_kinds, print_json
from unpad.storage.paths import user_path
from unpad.terminal.printing import print_lines

_CHANGE = re.compile(r"[a-z_]+(\.\w+)+=")

verbs = typer.Typer(no_args_is_help=True, help="Check data before training on it.")


@verbs.command(epilog="Example: unpad data check my.jsonl")
def check(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH... [key=value ...]", help="Files, folders or recipes, and changes of the recipes."
        ),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            help="Field of the recipe's `data` section; default by the first rows.", autocompletion=data_kinds
        ),
    ] = None,
    field: Annotated[
        str | None, typer.Option(help="Field or column that holds the text, as `field:` in a recipe.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Report every unusable row with file:line, code and fix, and each file's lengths. Exit code 3 for a bad row."""
    from unpad.data.check import check

    changes = [word for word in paths if _CHANGE.match(word) and not user_path(word).exists()]
    report = check([user_path(word) for word in paths if word not in changes], kind, field, changes)
    if as_json:
        print_json(report.to_json())
    else:
        print_lines(report.lines())
    raise typer.Exit(0 if report.passed else 3)
