"""The verb that trains, and those of `unpad recipes`."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from unpad.cli import options
from unpad.errors import RecipeError
from unpad.storage.lock import RunLock
from unpad.storage.paths import new_path
from unpad.terminal.printing import print_lines

verbs = typer.Typer()
recipe_verbs = typer.Typer(help="List, copy and describe recipes.", invoke_without_command=True)


@verbs.command(epilog="Example: unpad train chat data.chat=my.jsonl optim.lr=1e-3 --out runs/mine")
def train(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="A packaged name, or a YAML file; with --resume, a run.",
            autocompletion=options.run_or_recipe_names,
        ),
    ] = None,
    overrides: options.Overrides = None,
    out: Annotated[Path | None, typer.Option(parser=new_path, help="Run directory; default runs/RECIPE-N.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run that is named, or that in --out.")] = False,
    processes: Annotated[int, typer.Option(min=1, help="Processes of this machine that train the model.")] = 1,
    fit: Annotated[
        bool, typer.Option("--fit-processes", help="Cut a new run's updates so that every process has work.")
    ] = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Train a recipe, and print the commands that use the run."""
    from unpad.processes.worker import refuse_separate_tasks, refuse_under_torchrun, started_by_torchrun
    from unpad.run.folder import RECIPE, Start, holds_run, refuse_new_run

    refuse_separate_tasks()
    start = Start.of(recipe, overrides or [], out, resume=resume)
    recipe, folder, fields = start.recipe, start.folder, start.overrides
    if not started_by_torchrun():  # else all processes check together, as the first of them may have begun the run
        if not resume:
            with RunLock(folder) if (folder / RECIPE).is_file() else nullcontext():
                refuse_new_run(folder)
        if holds_run(folder):
            options.check_run(str(folder), fields)
        elif recipe is not None:
            options.check_recipe(recipe, fields)
    if processes > 1:
        from unpad.processes.launch import launch

        what = "torchrun has started this process already, as one of several"
        refuse_under_torchrun(what, where="--processes", fix="leave out --processes, or start without torchrun")
        given = {"--resume": resume, "--fit-processes": fit, "--verbose": verbose, "--debug": debug}
        flags = [name for name, is_set in given.items() if is_set]
        words = ["train", "--out", str(folder), *flags, "--", *([recipe] if recipe else []), *fields]
        code = launch(processes, words, folder)
        context.obj["told"] = True
        raise typer.Exit(code)
    from unpad.processes.group import joined
    from unpad.run.kept import what_next
    from unpad.run.screen import open_console
    from unpad.training.loop import train

    with joined() as group:
        console = open_console()
        result = train(
            recipe, folder, fields, resume=resume, console=console, verbose=verbose, group=group, fit_processes=fit
        )
        if group.leads:
            print_lines([*result.time_lines(), "", *what_next(result.folder)])


@recipe_verbs.callback(epilog="Example: unpad recipes")
def recipes(context: typer.Context) -> None:
    """List the packaged recipes."""
    from unpad.recipes.file import describe_recipes

    if context.invoked_subcommand is None:
        print_lines(describe_recipes())


@recipe_verbs.command(epilog="Example: unpad recipes copy zh_chat my.yaml")
def copy(
    name: Annotated[str, typer.Argument(autocompletion=options.recipe_names)],
    file: Annotated[Path, typer.Argument(parser=new_path)],
) -> None:
    """Write an editable copy of a packaged recipe."""
    from unpad.recipes.file import find_recipe
    from unpad.storage import write_atomic

    if file.exists():
        raise RecipeError("the file exists already", where=str(file), fix="choose another name, or remove it")
    write_atomic(file, find_recipe(name).read_bytes())
    print_lines([f"{file} written; run it with: unpad train {file}"])


@recipe_verbs.command(epilog="Example: unpad recipes schema > recipe.schema.json")
def schema() -> None:
    """Print the JSON schema of recipes, for editors that complete and check YAML."""
    options.load_torch()
    from unpad.models import config_schemas
    from unpad.recipes.schema import recipe_schema

    options.print_json(recipe_schema(config_schemas()))
