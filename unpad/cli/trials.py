"""Verbs that examine a recipe on the own data without keeping a run: cost, certificate and speed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unpad.cli.options import Debug, Json, OptionalRecipe, Overrides, RecipeArgument
from unpad.cli.output import print_json, print_lines
from unpad.errors import RecipeError

verbs = typer.Typer()


@verbs.command(epilog="Example: unpad plan zh_chat plan.tokens_per_step=4096 --plot plan.png")
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this PNG file.")] = None,
    processes: Annotated[
        str | None, typer.Option(help="Also how busy so many processes would be, as 2,8,64.", metavar="N,N")
    ] = None,
    debug: Debug = False,
) -> None:
    """Preview training: the cost of every batching strategy on your data, and where every token goes."""
    from unpad.run.screen import open_console
    from unpad.trials.preview import preview
    from unpad.trials.process_table import process_counts

    counts = () if processes is None else process_counts(processes)
    result = preview(recipe, overrides or [], plot, None if as_json else open_console(), counts)
    if as_json:
        print_json(result.to_json())


@verbs.command(epilog="Example: unpad prove zh_chat    or    unpad prove --hf Qwen3-0.6B/config.json")
def prove(
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    hf: Annotated[
        Path | None,
        typer.Option(help="Prove the architecture of this config.json, or folder with one, on random weights instead."),
    ] = None,
    processes: Annotated[
        str | None, typer.Option(help="Prove an update by so many processes instead, as 1,2,3.", metavar="N,N")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Certify that batching your data with your model changes nothing. Exit code 1 when a line fails.

    With --hf: which ways to make batches keep the sequences apart in a model of Hugging Face. Exit code 1 when one that
    promises to does not, without a message.

    With --processes: an update by several processes, which the command starts, has the bits of one; with
    train.sums=fast its gradient.
    """
    if processes is not None and (recipe is None or hf is not None):
        raise RecipeError("--processes proves an update of a recipe", fix="name a recipe, and leave out --hf")
    if hf is not None:
        if recipe is not None:
            raise RecipeError("a recipe and --hf are given", fix="name a recipe, or --hf with a config.json")
        from unpad.hf.way import UNPAD
        from unpad.proof.foreign.folder import prove_folder

        proof = prove_folder(hf, [UNPAD])
        shown, passed, lines = proof.to_json, proof.passed, proof.lines
    elif recipe is not None and processes is not None:
        from unpad.proof.processes import prove_processes
        from unpad.trials.process_table import process_counts

        certificate = prove_processes(recipe, overrides or [], process_counts(processes))
        shown, passed, lines = certificate.to_json, certificate.passed, certificate.text
    elif recipe is not None:
        from unpad.proof.recipe import prove_recipe

        certificate = prove_recipe(recipe, overrides or [])
        shown, passed, lines = certificate.to_json, certificate.passed, certificate.text
    else:
        raise RecipeError("nothing to prove is named", fix="name a recipe, as in unpad prove zh_chat, or --hf FOLDER")
    if as_json:
        print_json(shown())
    else:
        print_lines(lines())
    raise typer.Exit(0 if passed else 1)


@verbs.command(epilog="Example: unpad bench zh_chat")
def bench(
    recipe: RecipeArgument = "zh_chat",
    overrides: Overrides = None,
    as_json: Json = False,
    quick: Annotated[bool, typer.Option("--quick", help="Measure for a third of the time, less exactly.")] = False,
    debug: Debug = False,
) -> None:
    """Measure speed, padding, memory and quality of padded and packed batches, on this machine and your data."""
    from unpad.trials.bench.bench import FULL, QUICK, bench

    table = bench(recipe, overrides or [], QUICK if quick else FULL)
    if as_json:
        print_json(table.to_json())
    else:
        print_lines(table.lines())
