"""Verbs that examine a recipe on the user's data without keeping a run: cost, certificate and doctor."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from unpad.cli import options
from unpad.cli.serving import missing_for_serve
from unpad.errors import NOT_PROVED, RecipeError
from unpad.storage.paths import new_path
from unpad.terminal.printing import print_lines
from unpad.terminal.progress import progress

verbs = typer.Typer()


@verbs.command(epilog="Example: unpad plan zh_chat plan.tokens_per_step=4096 --plot plan.svg")
def plan(
    recipe: options.RecipeArgument,
    overrides: options.Overrides = None,
    as_json: options.Json = False,
    plot: Annotated[Path | None, typer.Option(parser=new_path, help="Write a picture to this SVG file.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also time every strategy, and predict the memory of padded batches.")
    ] = False,
    processes: Annotated[
        str | None, typer.Option(help="Also how busy these numbers of processes would be, as 2,8,64.", metavar="N,N")
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Preview training: the cost of every batching strategy on your data, and where every token goes."""
    options.check_recipe(recipe, overrides or [])
    from unpad.run.screen import open_console
    from unpad.trials.preview import preview
    from unpad.trials.strategy_table import process_counts

    counts = () if processes is None else process_counts(processes)
    result = preview(recipe, overrides or [], plot, None if as_json else open_console(), counts, measure)
    if as_json:
        options.print_json(result.to_json())


@verbs.command(
    epilog="Example: unpad prove zh_chat    or    unpad prove RUN    or    unpad prove --hf Qwen3-0.6B/config.json"
)
def prove(
    recipe: options.OptionalSubject = None,
    overrides: options.Overrides = None,
    hf: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|NAME",
            help="Prove the architecture of this config.json, folder with one, or model of a hub, on random weights.",
        ),
    ] = None,
    processes: Annotated[
        str | None, typer.Option(help="Prove an update by these numbers of processes instead, as 1,2,3.", metavar="N,N")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Prove that answers of a run do not depend on what runs beside them.")
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="With --serve: a file with a prompt on each line.", metavar="FILE")
    ] = None,
    allow_not_proven: Annotated[
        bool, typer.Option("--allow-not-proven", help="Exit code 0 also if no line fails and some are NOT PROVEN.")
    ] = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Certify that batching your data with your model changes nothing. Exit code 12 when a line fails or is not proven.

    With --hf: which ways to make batches keep the sequences apart in a model of Hugging Face. Exit code 12 when one
    that promises to does not, without a message.

    With --processes: an update by several processes, which the command starts, has the bits of one; with
    train.sums=fast its gradient.

    With --serve: every answer of a run has the tokens and scores, bit by bit, of the answer to its request alone.
    """
    _refuse_mixed(recipe, hf, processes, serve, prompts)
    shown, lines, passed = _proved(recipe, overrides or [], hf, processes, serve, prompts)
    options.print_found(as_json, shown, lines)
    raise typer.Exit(0 if passed or (passed is None and allow_not_proven) else NOT_PROVED)


def _refuse_mixed(recipe: str | None, hf: str | None, processes: str | None, serve: bool, prompts: Path | None) -> None:
    """Refuse options that do not go together."""
    if recipe is not None and hf is not None:
        raise RecipeError("a recipe or run and --hf are given", fix="name one, or --hf with a config.json")
    if serve and (recipe is None or processes is not None):
        raise RecipeError("--serve proves a run", fix="name a run, and leave out --hf and --processes")
    if prompts is not None and not serve:
        raise RecipeError("--prompts is of --serve", fix="add --serve, or leave it out")
    if processes is not None and recipe is None:
        raise RecipeError("--processes proves an update of a recipe", fix="name a recipe, and leave out --hf")
    if recipe is None and hf is None:
        raise RecipeError("nothing to prove is named", fix="name a recipe, as in unpad prove zh_chat, or --hf FOLDER")


def _proved(
    recipe: str | None, overrides: list[str], hf: str | None, processes: str | None, serve: bool, prompts: Path | None
) -> tuple[Callable[[], Any], Callable[[], list[str]], bool | None]:
    """The proof as JSON and as lines, and whether it passed."""
    if hf is not None:
        from unpad.hf.prepare import UNPAD
        from unpad.proof.foreign.folder import prove_folder

        proof = prove_folder(hf, [UNPAD])
        return proof.to_json, proof.lines, proof.passed
    assert recipe is not None, "options were checked"
    if serve:
        options.check_run(recipe, overrides)
        from unpad.inference.loaded import load
        from unpad.nn.precision import CPU
        from unpad.proof.serving import OverHttp, prove_serving

        over_http = None
        if not missing_for_serve():
            from unpad.serving.over_http import numbers, streams

            over_http = OverHttp(streams, numbers)
        certificate = prove_serving(load(recipe, overrides, device=CPU), prompts, over_http)
    elif processes is not None:
        options.check_run_or_recipe(recipe, overrides)
        from unpad.proof.processes import prove_processes
        from unpad.trials.strategy_table import process_counts

        certificate = prove_processes(recipe, overrides, process_counts(processes))
    else:
        options.check_run_or_recipe(recipe, overrides)
        from unpad.proof.recipe import prove_recipe

        certificate = prove_recipe(recipe, overrides)
    return certificate.to_json, certificate.text, certificate.passed


@verbs.command(epilog="Example: unpad doctor zh_chat    or    unpad doctor zh_chat --machine --at /data/runs")
def doctor(
    name: Annotated[
        str | None,
        typer.Argument(metavar="RUN|RECIPE", help="A run, a packaged name, or a YAML file; with --machine: zh_chat."),
    ] = None,
    overrides: options.Overrides = None,
    lang: Annotated[str | None, typer.Option(help="en or zh; default by the locale.", metavar="en|zh")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Time for all checks, about.")] = 120.0,
    out: Annotated[
        Path | None, typer.Option(parser=new_path, help="Write the picture of learning rates to this SVG.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", parser=new_path, help="Write findings and figures here.")
    ] = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="Check disk and memory instead: locks, flushes, renames, room.")
    ] = False,
    at: Annotated[
        Path | None, typer.Option(parser=new_path, help="With --machine: the folder to train in; default runs/.")
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Find out why a recipe or a run does not learn, or is slow. Exit code 15 when something needs fixing.

    With --machine: whether runs are safe in a folder of this machine, and whether there is room for this one.
    """
    import json

    if lang not in (None, "en", "zh"):
        raise RecipeError(f'there is no language "{lang}"', where="--lang", fix="use en or zh")
    if machine and out is not None:
        raise RecipeError("--machine draws no picture", where="--out", fix="leave it out; --at names the folder")
    if not machine and (name is None or at is not None):
        raise RecipeError("no run or recipe is named", fix="name one, or add --machine to check disk and memory")
    name = name or "zh_chat"
    options.check_run_or_recipe(name, overrides or [])
    from unpad.doctor.finding import language_of
    from unpad.errors import DOCTOR_FOUND_TROUBLE
    from unpad.storage import finite, write_atomic

    language = language_of(lang)
    if machine:
        from unpad.doctor.machine import examine_machine

        checked = examine_machine(name, overrides or [], at)
        troubles, lines, values = checked.troubles, checked.lines(language), checked.to_json(language)
    else:
        from unpad.doctor.examine import examine, write_picture

        with progress("examining"):
            found = examine(name, overrides or [], seconds)
        troubles, lines, values = found.troubles, found.lines(language), found.to_json(language)
        if out is not None and found.tried is not None and len(found.tried.sweep.rates):
            write_picture(out, found.tried.sweep, found.subject.rate, language)
            lines += ["", str(out)]
    print_lines(lines)
    if json_file is not None:
        write_atomic(json_file, json.dumps(finite(values), ensure_ascii=False, indent=1, allow_nan=False) + "\n")
    raise typer.Exit(DOCTOR_FOUND_TROUBLE if troubles else 0)
