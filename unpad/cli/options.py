"""Arguments and options that verbs share, with their completion by the shell, output for programs, and errors that are
reported before torch loads, which takes seconds: names, fields and places, checked again where they are used."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from unpad.terminal import printing


def print_json(value: Any) -> None:
    """Print a value as JSON; numbers that are not finite are "inf", "-inf" or "nan"."""
    from unpad.storage import finite

    printing.print_json(finite(value))


def print_found(as_json: bool, value: Callable[[], Any], lines: Callable[[], Iterable[str]]) -> None:
    """Print what a verb found: as JSON if it was asked for, else as lines."""
    if as_json:
        print_json(value())
    else:
        printing.print_lines(lines())


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
    list[str] | None, typer.Argument(metavar="[key=value ...]", help="Sampling fields.", autocompletion=sampling_words)
]
System = Annotated[str, typer.Option(help="System text before the conversation.")]
Engine = Annotated[
    str, typer.Option(help="What computes answers: unpad, llama.cpp (of texts alone), or the path of a llama-server.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Also print shapes, sums and skipped items.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors.", callback=_debug)]


def check_recipe(recipe: str, overrides: Sequence[str] = ()) -> None:
    """Load torch if a recipe, its overrides and the paths in it are valid.

    Raises:
        RecipeError: there is no such recipe, or a field or the run in `model.from` is wrong.
        SourceError: a source of the recipe has no file.
    """
    from unpad.data.sources.files import resolve_path
    from unpad.interchange.hub import is_hub_name
    from unpad.recipes.data import KINDS, is_packaged
    from unpad.recipes.file import load_recipe
    from unpad.run.folder import find_run
    from unpad.storage.paths import user_path

    loaded = load_recipe(recipe, overrides)
    tables = loaded.events.tables.values() if loaded.data.events else ()
    paths = [*(source.path for kind in KINDS for source in loaded.data.sources(kind)), *tables]
    paths += [path for source in loaded.data.vqa for path in source.beside.values()]
    check_places(resolve_path(loaded.data, path) for path in paths if not is_packaged(path))
    for start in (loaded.model.get("from"), loaded.train.init_from):
        if isinstance(start, str) and not user_path(start).is_dir() and not is_hub_name(start):
            find_run(start)
    load_torch()


def check_run(run: str, fields: Sequence[str] = (), places: Iterable[Path] = ()) -> None:
    """Load torch if a run, overrides for it and further paths are valid.

    Raises:
        RecipeError: there is no such run, or a field is wrong.
        SourceError: there is no file at one of the places.
    """
    from unpad.run.folder import find_run, run_recipe

    run_recipe(find_run(run), fields)
    check_places(places)
    load_torch()


def check_names(runs: Iterable[str]) -> None:
    """Refuse names of runs that do not exist.

    Raises:
        RecipeError: names the first.
    """
    from unpad.run.folder import find_run

    for run in runs:
        find_run(run)


def check_run_or_recipe(name: str, overrides: Sequence[str] = ()) -> None:
    """`check_run` or `check_recipe`, depending on the name."""
    from unpad.run.folder import as_run

    run = as_run(name)
    check_recipe(name, overrides) if run is None else check_run(str(run), overrides)


def check_places(places: Iterable[Path]) -> None:
    """Refuse paths that do not exist; a folder is listed later.

    Raises:
        SourceError: a path is neither a file, a folder nor a pattern that matches a file.
    """
    from unpad.data.sources.files import list_paths

    for place in places:
        if not place.exists():
            list_paths(place)


def load_torch() -> None:
    """Load torch, with a line on the terminal meanwhile."""
    if "torch" not in sys.modules:
        from unpad.terminal.progress import progress

        with progress("loading torch"):
            import torch  # noqa: F401
