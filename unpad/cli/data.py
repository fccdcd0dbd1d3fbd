"""Verbs of `unpad data`."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from unpad.cli import options
from unpad.errors import RecipeError
from unpad.storage.paths import new_path, user_path
from unpad.storage.remote import data_path
from unpad.terminal.printing import print_lines, print_wrapped
from unpad.terminal.progress import progress

CHANGE = re.compile(r"[a-z_]+(\.\w+)+=")  # of a recipe, as key=value
# Recipe that shows a file of a kind of data by itself, and what it needs for that.
_RECIPES = {
    "text": ("small",), "chat": ("chat",), "pairs": ("chat",), "images": ("images",), "vqa": ("vqa",),
    "events": ("events_labels", "events.labels=null"),
}  # fmt: skip

verbs = typer.Typer(no_args_is_help=True, help="Look at data, and check it, before training on it.")


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
            help="Field of the recipe's `data` section; default by the first rows.", autocompletion=options.data_kinds
        ),
    ] = None,
    field: Annotated[
        str | None, typer.Option(help="Field or column that holds the text, as `field:` in a recipe.")
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Report every unusable row with file:line, code and fix, and each file's lengths. Exit code 3 for a bad row."""
    from unpad.data.check import check

    changes = [word for word in paths if CHANGE.match(word) and not user_path(word).exists()]
    if len(changes) == len(paths):
        raise RecipeError("no file or recipe is named", where=changes[0], fix="name the recipe before its changes")
    report = check([data_path(word) for word in paths if word not in changes], kind, field, changes)
    options.print_found(as_json, report.to_json, report.lines)
    raise typer.Exit(0 if report.passed else 3)


@verbs.command(epilog="Example: unpad data show chat data.chat=my.jsonl    or    unpad data show my.jsonl --row 17")
def show(
    subject: Annotated[
        str, typer.Argument(metavar="RECIPE|RUN|FILE", help="What to show.", autocompletion=options.run_or_recipe_names)
    ],
    overrides: options.Overrides = None,
    num: Annotated[int, typer.Option("-n", min=1, help="Sequences of each stage.")] = 10,
    row: Annotated[str | None, typer.Option(help="LINE, FILE:LINE, a picture's file, or a patient.")] = None,
    html: Annotated[Path | None, typer.Option(parser=new_path, metavar="FILE", help="Write a page.")] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show sequences as the model gets them: which tokens are learnt, what is cut, pictures, histories."""
    name, fields, note = _recipe_of(subject, overrides or [])
    options.check_run_or_recipe(name, fields)
    from unpad.run.screen import open_console
    from unpad.storage import write_atomic
    from unpad.terminal.table import columns
    from unpad.training.show import show

    with progress(f"reading {subject}"):
        shown = show(name, fields, num, row, note)
    console = open_console()
    if as_json:
        options.print_json([one.to_json() for one in shown.sequences])
    elif html is not None:
        from unpad.run.report.shown import page

        sequences = [one.to_json() for one in shown.sequences]
        write_atomic(html, page(f"data show {subject}", shown.title, sequences), private=shown.private)
        print_lines([str(html)])
    else:
        for indent, text in shown.lines(coloured=console.color_system is not None, whole=row is not None):
            print_wrapped(console, text, columns(), indent)


def _recipe_of(subject: str, overrides: list[str]) -> tuple[str, list[str], str]:
    """The recipe or run with a name; or that of a file, its changes, and a note on it."""
    from unpad.data.check import guess_kind
    from unpad.recipes.file import SUFFIXES, recipe_names
    from unpad.run.folder import RECIPE, RUNS

    path = data_path(subject)
    is_run = any((folder / RECIPE).is_file() for folder in (path, RUNS / path))
    if subject in recipe_names() or is_run or path.suffix in SUFFIXES or not (path.exists() or path.suffix):
        return subject, overrides, ""
    options.check_places([path])
    kind = guess_kind(path)
    name, *changes = _RECIPES[kind]
    return name, [f"data.{kind}={json.dumps(subject)}", *changes, *overrides], f"{kind}, by the recipe {name}: "
