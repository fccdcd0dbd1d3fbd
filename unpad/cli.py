"""The command line: one verb per stage, and each verb calls one function."""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from unpad.errors import Interrupted, UnpadError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train transformers on ragged data without padding, with proof that batching changed nothing.",
)
data_app = typer.Typer(no_args_is_help=True, help="Look at data before training on it.")
recipes_app = typer.Typer(help="What there is to run.", invoke_without_command=True)
app.add_typer(data_app, name="data")
app.add_typer(recipes_app, name="recipes")

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A packaged name, or a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="Recipe fields to change.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or its name under runs/.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Shapes, sums and skipped items.")]
Debug = Annotated[bool, typer.Option("--debug", help="Tracebacks of errors.")]

console = Console(highlight=False, soft_wrap=True)


_asked_for_traces = False


def _debug(debug: bool) -> None:
    global _asked_for_traces  # main() prints what a verb raises, and only the verb has read the option
    _asked_for_traces = debug


def _print_json(value: Any) -> None:
    print(json.dumps(_finite(value), ensure_ascii=False, indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    """Numbers that JSON does not have as the words "inf", "-inf" and "nan", as in metrics.jsonl."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@app.command(epilog="Example: unpad train zh_chat data.chat=my.jsonl optim.lr=1e-3 --out runs/mine")
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; default runs/RECIPE-N.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Train a recipe; ends with what to type next."""
    from unpad.run.folder import free_folder
    from unpad.run.kept import what_next
    from unpad.training.loop import train

    _debug(debug)
    result = train(
        recipe, out or free_folder(recipe, resume), overrides or [], resume=resume, console=console, verbose=verbose
    )
    lines = [f"{part['name']:<12}{part['seconds']:8.1f} s {part['share']:6.1%}" for part in result.timings]
    lines.append(f"steps waited for the loader {result.waited_share:.2%} of their time")
    for line in [*lines, "", *what_next(result.folder)]:
        console.print(line, markup=False)


@app.command(
    epilog="Example: unpad search zh_chat optim.lr=1e-4..1e-2:log model.blocks=2,4,6 --trials 20 --out runs/search"
)
def search(
    recipe: RecipeArgument,
    out: Annotated[Path, typer.Option(help="Directory of the search; a run directory per trial.")],
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=LOW..HIGH ...]",
            help="Ranges (key=1e-4..1e-2:log, key=2..6), choices (key=a,b,c) and recipe fields (key=value).",
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Trials of the whole search.")] = 20,
    metric: Annotated[
        str | None, typer.Option("--for", help="Metric of `unpad eval`, or score of a pruned model; default loss.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the search in --out.")] = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Train with many values of some fields and find the best; runs that fall behind end early."""
    from unpad.trials.search.search import search

    _debug(debug)
    for line in search(
        recipe, out, fields or [], trials=trials, metric=metric, resume=resume, console=console, verbose=verbose
    ):
        console.print(line, markup=False)


@app.command(epilog="Example: unpad plan zh_chat plan.tokens_per_step=4096 --plot plan.png")
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this PNG file.")] = None,
    debug: Debug = False,
) -> None:
    """Before training: what every batching strategy would cost on your data, and where every token goes."""
    from unpad.trials.preview import preview

    _debug(debug)
    result = preview(recipe, overrides or [], plot)
    if as_json:
        _print_json(result.to_json())
    else:
        result.show(console)


@app.command(epilog="Example: unpad prove zh_chat")
def prove(recipe: RecipeArgument, overrides: Overrides = None, as_json: Json = False, debug: Debug = False) -> None:
    """The certificate: batching your data with your model changes nothing. Exit code 1 when a line fails."""
    from unpad.proof.recipe import prove_recipe

    _debug(debug)
    certificate = prove_recipe(recipe, overrides or [])
    if as_json:
        _print_json(certificate.to_json())
    else:
        for line in certificate.text():
            console.print(line, markup=False)
    raise typer.Exit(0 if certificate.passed else 1)


@app.command(name="eval", epilog="Example: unpad eval zh_chat-1 --json")
def evaluate(
    run: RunArgument,
    as_json: Json = False,
    replies: Annotated[
        int, typer.Option(help="Also show this many questions with replies, misread images or misjudged patients.")
    ] = 0,
    cost: Annotated[
        bool, typer.Option("--cost", help="Also what fewer visual tokens save: time, memory, work.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Held-out metrics of a run with 95 % confidence intervals."""
    from unpad.evaluation.metrics import metric_lines
    from unpad.evaluation.run import evaluate_run

    _debug(debug)
    metrics, shown = evaluate_run(run, replies)
    if cost:
        from unpad.evaluation.vqa_cost import evaluate_cost

        metrics |= evaluate_cost(run)
    if not as_json:
        for line in shown:
            console.print(line, markup=False)
    if as_json:
        _print_json({name: vars(metric) for name, metric in metrics.items()})
        return
    for line in metric_lines(metrics):
        console.print(line, markup=False)


@app.command(epilog="Example: unpad infer images-1 --image cat.jpg    or    --image folder --csv out.csv")
def infer(
    run: RunArgument,
    image: Annotated[list[Path], typer.Option(help="An image file, or a folder of them; may be repeated.")],
    question: Annotated[str | None, typer.Option(help="What to ask about each image, of a run that answers.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Most classes to show per image.")] = 5,
    table: Annotated[Path | None, typer.Option("--csv", help="Write image, class, probability and fault here.")] = None,
    show: Annotated[
        Path | None, typer.Option(help="Draw which patches a pruned model kept for its answer: a PNG or SVG file.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Classify images, or answer a question about them. Exit code 3 when a file cannot be used."""
    from unpad.inference.images import ask, classify, list_images, to_csv
    from unpad.inference.loaded import load
    from unpad.run.report.kept_patches import check_request, write_pictures
    from unpad.storage import write_atomic

    _debug(debug)
    if show is not None:
        check_request(show, question)
    loaded, paths = load(run), list_images(image)
    if question is None:
        answers = classify(loaded, paths, top)
    else:
        answers = ask(loaded, paths, question, show=show is not None)
    drawn = [] if show is None else write_pictures([answer.shown for answer in answers if answer.shown], show)
    if table is not None:
        write_atomic(table, to_csv(answers))
    if as_json:
        _print_json([answer.to_json() for answer in answers])
    else:
        for line in [*(answer.line() for answer in answers), *drawn]:
            print(line)
    raise typer.Exit(3 if any(answer.fault for answer in answers) else 0)


@app.command(epilog="Example: unpad embed events-1 --data new_patients --level set --out sets.parquet")
def embed(
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="The parquet file to write.")],
    data: Annotated[Path | None, typer.Option(help="Patients as the run's were given; default the run's own.")] = None,
    level: Annotated[Literal["patient", "set"], typer.Option(help="A row per patient, or per set.")] = "patient",
    debug: Debug = False,
) -> None:
    """Write vectors of patients, or of the sets of their events, to a parquet file with the patients' ids."""
    from unpad.inference.embed import embed_file
    from unpad.inference.loaded import load

    _debug(debug)
    for line in embed_file(load(run), data, level, out):
        console.print(line, markup=False)


@app.command(epilog="Example: unpad generate zh_chat-1 --prompt 你好 temperature=0.8")
def generate(
    run: RunArgument,
    settings: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="Sampling fields.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue, or a question; may be repeated.")] = None,
    heldout: Annotated[int, typer.Option(help="Continue the openings of this many held-out documents instead.")] = 0,
    debug: Debug = False,
) -> None:
    """Continue texts, or answer questions; without --prompt, one prompt per line of the standard input."""
    from unpad.evaluation.openings import heldout_openings
    from unpad.inference.loaded import load

    _debug(debug)
    loaded = load(run, [_generate_field(text) for text in settings or []])
    if heldout:
        prompts = heldout_openings(loaded, heldout)
    else:
        prompts = prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if len(prompts) == 1:
        for piece in loaded.stream(prompts[0]):
            print(piece, end="", flush=True)
        print()
        return
    for text, reply in zip(prompts, loaded.generate(prompts), strict=True):
        print(f"{text} -> {reply}\n")


@app.command(epilog="Example: unpad chat zh_chat-1    or    echo 你好 | unpad chat zh_chat-1")
def chat(
    run: RunArgument,
    settings: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="Sampling fields.")] = None,
    debug: Debug = False,
) -> None:
    """Talk to a run. /help lists what else can be typed; without a terminal, a reply per line."""
    from unpad.inference.chat import chat_with_run

    _debug(debug)
    chat_with_run(run, [_generate_field(text) for text in settings or []])


def _generate_field(text: str) -> str:
    """`temperature=0.8` is short for generate.temperature=0.8; fields of other sections keep their names."""
    return text if "." in text.partition("=")[0] else f"generate.{text}"


@data_app.command(epilog="Example: unpad data check my.jsonl")
def check(
    path: Annotated[Path, typer.Argument(help="A file or folder, or a recipe of events.")],
    kind: Annotated[
        str | None, typer.Option(help="text, chat, images, vqa or events; default by the first rows.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Name every row that cannot be used, with file:line, code and fix. Exit code 3 when there is one."""
    from unpad.data.check import check
    from unpad.errors import RecipeError, nearest
    from unpad.recipes.data import KINDS

    _debug(debug)
    if kind not in (None, *KINDS):
        raise RecipeError(f'there is no kind of data "{kind}"', where="--kind", fix=nearest(str(kind), list(KINDS)))
    report = check(path, kind)
    for line in report.lines():
        console.print(line, markup=False)
    raise typer.Exit(0 if report.passed else 3)


@recipes_app.callback(epilog="Example: unpad recipes")
def recipes(context: typer.Context) -> None:
    """List the packaged recipes."""
    from unpad.recipes.file import RECIPES, recipe_names

    if context.invoked_subcommand is None:
        for name in recipe_names():
            first = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
            print(f"{name:<16}{first.removeprefix('# ')}")


@recipes_app.command(epilog="Example: unpad recipes copy zh_chat my.yaml")
def copy(name: str, file: Path) -> None:
    """Write an editable copy of a packaged recipe."""
    from unpad.errors import RecipeError
    from unpad.recipes.file import find_recipe
    from unpad.storage import write_atomic

    if file.exists():
        raise RecipeError("the file exists already", where=str(file), fix="choose another name, or remove it")
    write_atomic(file, find_recipe(name).read_bytes())
    print(f"{file} written; run it with: unpad train {file}")


@recipes_app.command(epilog="Example: unpad recipes schema > recipe.schema.json")
def schema() -> None:
    """Print the JSON schema of recipes, for editors that complete and check YAML."""
    from unpad.api import recipe_schema

    _print_json(recipe_schema())


@app.command(epilog="Example: unpad runs")
def runs() -> None:
    """List what has run, newest first."""
    from unpad.run.folder import describe_runs

    for line in describe_runs():
        print(line)


@app.command(epilog="Example: unpad report zh_chat-1")
def report(run: RunArgument) -> None:
    """Write one run's page of plots and print where it is."""
    from unpad.run.folder import find_run
    from unpad.run.report.page import write_report

    print(write_report(find_run(run)))


@app.command(epilog="Example: unpad bench zh_chat")
def bench(
    recipe: RecipeArgument = "zh_chat",
    overrides: Overrides = None,
    as_json: Json = False,
    quick: Annotated[bool, typer.Option("--quick", help="Short turns: a third of the time, and less exact.")] = False,
    debug: Debug = False,
) -> None:
    """Measure speed, padding, memory and quality of every way to batch, on this machine and your data."""
    from unpad.trials.bench.bench import FULL, QUICK, bench

    _debug(debug)
    table = bench(recipe, overrides or [], QUICK if quick else FULL)
    if as_json:
        _print_json(table.to_json())
    else:
        for line in table.lines():
            console.print(line, markup=False)


def main() -> None:
    """Run a verb; errors a user can cause are three lines and an exit code, not a traceback."""
    _debug(False)
    try:
        try:
            app(standalone_mode=True)
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is expected, and not while the interpreter ends
    except UnpadError as error:
        if _asked_for_traces:
            traceback.print_exc()
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(Interrupted.exit_code)
    except BrokenPipeError:
        # The reader of our output has gone; closing quietly is what pipes expect.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


if __name__ == "__main__":
    main()
