"""The command line: one verb per stage, and each verb calls one function.

Only standard modules and typer are imported here; every verb imports what it needs, so that `unpad --help` starts fast.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from unpad.errors import DiskError, Interrupted, OutOfMemoryError, RecipeError, UnpadError, is_memory_error

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train transformers on ragged data without padding, with proof that batching changed nothing.",
)
data_app = typer.Typer(no_args_is_help=True, help="Check data before training on it.")
recipes_app = typer.Typer(help="List, copy and describe recipes.", invoke_without_command=True)
app.add_typer(data_app, name="data")
app.add_typer(recipes_app, name="recipes")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"unpad {version('unpad')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


# --------------------------------------------------------------------------- shell completion


def _recipes(incomplete: str) -> list[str]:
    from unpad.recipes.find import complete_recipe

    return complete_recipe(incomplete)


def _runs(incomplete: str) -> list[str]:
    from unpad.run.folder import list_runs

    return [folder.name for folder in list_runs() if folder.name.startswith(incomplete)]


def _kinds(incomplete: str) -> list[str]:
    from unpad.recipes.data import KINDS

    return [kind for kind in KINDS if kind.startswith(incomplete)]


def _fields(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    from unpad.recipes.fields import complete_override

    words: list[str] = context.params.get("overrides") or context.params.get("fields") or []
    return complete_override(context.params.get("recipe"), words, incomplete)


def _sampling_fields(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    from unpad.recipes.fields import complete_field

    fields = complete_field(None, f"generate.{incomplete}")
    return [(name.removeprefix("generate."), text) for name, text in fields]


# --------------------------------------------------------------------------- arguments and output


def _debug(context: typer.Context, debug: bool) -> None:
    """Make `main` print the traceback of an error."""
    if isinstance(context.obj, dict):
        context.obj["debug"] = debug


RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A packaged name, or a YAML file.", autocompletion=_recipes)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value ...]", help="Recipe fields to change.", autocompletion=_fields),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run directory, or its name under runs/.", autocompletion=_runs)
]
Sampling = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value ...]", help="Sampling fields.", autocompletion=_sampling_fields),
]
System = Annotated[str, typer.Option(help="System text before the conversation.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Also print shapes, sums and skipped items.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors.", callback=_debug)]


def _console() -> Console:
    from unpad.run.screen import open_console

    return open_console()


def _print_lines(lines: Iterable[str]) -> None:
    console = _console()
    for line in lines:
        console.print(line, markup=False)


def _print_json(value: Any) -> None:
    from unpad.storage import finite

    print(json.dumps(finite(value), ensure_ascii=False, indent=1, allow_nan=False))


# --------------------------------------------------------------------------- verbs


@app.command(epilog="Example: unpad train zh_chat data.chat=my.jsonl optim.lr=1e-3 --out runs/mine")
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; default runs/RECIPE-N.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Train a recipe, and print the commands that use the run."""
    from unpad.run.folder import free_folder
    from unpad.run.kept import what_next
    from unpad.training.loop import train

    folder = out or free_folder(recipe, resume)
    result = train(recipe, folder, overrides or [], resume=resume, console=_console(), verbose=verbose)
    _print_lines([*result.time_lines(), "", *what_next(result.folder)])


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
            autocompletion=_fields,
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
    """Train a recipe with many values of some fields and report the best; trials that fall behind end early."""
    from unpad.trials.search.search import search

    _print_lines(
        search(
            recipe, out, fields or [], trials=trials, metric=metric, resume=resume, console=_console(), verbose=verbose
        )
    )


@app.command(epilog="Example: unpad plan zh_chat plan.tokens_per_step=4096 --plot plan.png")
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this PNG file.")] = None,
    debug: Debug = False,
) -> None:
    """Preview training: the cost of every batching strategy on your data, and where every token goes."""
    from unpad.trials.preview import preview

    result = preview(recipe, overrides or [], plot, None if as_json else _console())
    if as_json:
        _print_json(result.to_json())


@app.command(epilog="Example: unpad prove zh_chat")
def prove(recipe: RecipeArgument, overrides: Overrides = None, as_json: Json = False, debug: Debug = False) -> None:
    """Certify that batching your data with your model changes nothing. Exit code 1 when a line fails."""
    from unpad.proof.recipe import prove_recipe

    certificate = prove_recipe(recipe, overrides or [])
    if as_json:
        _print_json(certificate.to_json())
    else:
        _print_lines(certificate.text())
    raise typer.Exit(0 if certificate.passed else 1)


@app.command(name="eval", epilog="Example: unpad eval zh_chat-1 --json")
def evaluate(
    run: RunArgument,
    as_json: Json = False,
    replies: Annotated[
        int, typer.Option(help="Also show this many questions with replies, misread images or misjudged patients.")
    ] = 0,
    cost: Annotated[
        bool, typer.Option("--cost", help="Also measure the time, memory and work that fewer visual tokens save.")
    ] = False,
    part: Annotated[
        Literal["train", "valid", "test"] | None,
        typer.Option("--split", help="Part to evaluate; default test if there is one, else valid."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="New labelled data in the form of the run's, a file or a folder, instead.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Evaluate a run on data it was not trained on, with 95 % confidence intervals.

    Of the run's own data that is the test part if there is one, otherwise the part called valid, by which training
    chose the weights.
    """
    from unpad.evaluation.metrics import metric_lines
    from unpad.evaluation.run import evaluate_new, evaluate_run

    facts: dict[str, object] = {}
    if data is None:
        metrics, shown = evaluate_run(run, replies, part)
    else:
        found = evaluate_new(run, replies, part, data)
        metrics, shown, facts = found.metrics, found.lines, found.facts
    if cost:
        from unpad.evaluation.vqa_cost import evaluate_cost

        metrics |= evaluate_cost(run)
    if as_json:
        for line in shown if data is not None else ():  # such as rows of unknown classes
            print(line, file=sys.stderr)
        _print_json({name: metric.to_json() for name, metric in metrics.items()} | facts)
    else:
        _print_lines([*shown, *metric_lines(metrics)])


@app.command(epilog="Example: unpad infer images-1 --image cat.jpg    or    --image folder --csv out.csv")
def infer(
    run: RunArgument,
    image: Annotated[list[Path], typer.Option(help="An image file, or a folder of them; may be repeated.")],
    question: Annotated[str | None, typer.Option(help="Question about each image, for a run that answers.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Most classes to show per image.")] = 5,
    table: Annotated[Path | None, typer.Option("--csv", help="Write image, class, probability and fault here.")] = None,
    show: Annotated[
        Path | None, typer.Option(help="Draw the patches that a pruned model kept for its answer: a PNG or SVG file.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Classify images, or answer a question about them. Exit code 3 when a file cannot be used."""
    from unpad.inference.images import ask, classify, ledger, list_images, to_csv
    from unpad.inference.loaded import load
    from unpad.inference.prompts import lost_of, prompt_warning
    from unpad.run.report.kept_patches import check_request, write_pictures
    from unpad.storage import write_atomic

    if show is not None:
        check_request(show, question)
    loaded, paths = load(run), list_images(image)
    if question is None:
        answers = classify(loaded, paths, top)
    else:
        answers = ask(loaded, paths, question, show=show is not None)
        if warning := prompt_warning(lost_of(loaded.tokenizer, [question])):
            print(warning, file=sys.stderr)
    for line in ledger(loaded, answers):
        print(line, file=sys.stderr)
    drawn = [] if show is None else write_pictures([answer.shown for answer in answers if answer.shown], show)
    if table is not None:
        write_atomic(table, to_csv(answers), private=True)
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
    data: Annotated[Path | None, typer.Option(help="Patients, as in the run's data; default the run's own.")] = None,
    level: Annotated[Literal["patient", "set"], typer.Option(help="One row per patient, or per set.")] = "patient",
    debug: Debug = False,
) -> None:
    """Write vectors of patients, or of the sets of their events, to a parquet file with the patients' ids."""
    from unpad.inference.embed import embed_file
    from unpad.inference.loaded import load

    _print_lines(embed_file(load(run), data, level, out))


@app.command(epilog="Example: unpad generate zh_chat-1 --prompt 你好 temperature=0.8")
def generate(
    run: RunArgument,
    settings: Sampling = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue, or a question; may be repeated.")] = None,
    heldout: Annotated[int, typer.Option(help="Continue the openings of this many held-out documents instead.")] = 0,
    system: System = "",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue texts, or answer questions; without --prompt, read one prompt per line of standard input.

    Each prompt draws with the next seed, unless seed= is given."""
    from unpad.evaluation.openings import heldout_openings
    from unpad.inference.loaded import load
    from unpad.inference.prompts import gives_seed, prompt_warning, system_note

    fields = [_generate_field(text) for text in settings or []]
    loaded = load(run, fields)
    if heldout:
        texts = heldout_openings(loaded, heldout)
    else:
        texts = prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    prompts = [loaded.prompt(text, system) for text in texts]
    if system and (remark := system_note(loaded.num_system)):
        print(f"note: {remark}", file=sys.stderr)
    for one in prompts:
        if warning := prompt_warning(one.lost):
            print(warning, file=sys.stderr)
    if len(prompts) == 1 and not as_json:
        for piece in loaded.stream(texts[0], system=system):
            print(piece, end="", flush=True)
        print()
        return
    seed = loaded.recipe.generate.seed
    seeds = [seed + (0 if gives_seed(fields) else index) for index in range(len(prompts))]
    replies = loaded.replies(prompts, seeds)
    if as_json:
        _print_json([reply.to_json() for reply in replies])
        return
    for reply in replies:
        print(f"{reply.prompt.text} -> {reply.text}\n")


@app.command(epilog="Example: unpad chat zh_chat-1    or    echo 你好 | unpad chat zh_chat-1")
def chat(
    run: RunArgument,
    settings: Sampling = None,
    system: System = "",
    debug: Debug = False,
) -> None:
    """Talk to a run. /help lists its commands; without a terminal, print one reply per line of standard input."""
    from unpad.inference.chat import chat_with_run

    chat_with_run(run, [_generate_field(text) for text in settings or []], system)


def _generate_field(text: str) -> str:
    """Put a field without a section into `generate`: `temperature=0.8` is short for generate.temperature=0.8."""
    return text if "." in text.partition("=")[0] else f"generate.{text}"


@data_app.command(epilog="Example: unpad data check my.jsonl")
def check(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files, folders or recipes.")],
    kind: Annotated[
        str | None,
        typer.Option(help="Field of the recipe's `data` section; default by the first rows.", autocompletion=_kinds),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Report every unusable row with file:line, code and fix, and each file's lengths. Exit code 3 for a bad row."""
    from unpad.data.check import check

    report = check(paths, kind)
    if as_json:
        _print_json(report.to_json())
    else:
        _print_lines(report.lines())
    raise typer.Exit(0 if report.passed else 3)


@recipes_app.callback(epilog="Example: unpad recipes")
def recipes(context: typer.Context) -> None:
    """List the packaged recipes."""
    from unpad.recipes.find import describe_recipes

    if context.invoked_subcommand is None:
        for line in describe_recipes():
            print(line)


@recipes_app.command(epilog="Example: unpad recipes copy zh_chat my.yaml")
def copy(name: Annotated[str, typer.Argument(autocompletion=_recipes)], file: Path) -> None:
    """Write an editable copy of a packaged recipe."""
    from unpad.recipes.find import find_recipe
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
    """List runs, newest first, with date, step, held-out loss and size."""
    from unpad.run.summary import describe_runs

    for line in describe_runs():
        print(line)


@app.command(epilog="Example: unpad report zh_chat-1")
def report(run: RunArgument) -> None:
    """Write the page of plots of a run and print its path."""
    from unpad.run.folder import find_run
    from unpad.run.report.page import write_report

    print(write_report(find_run(run)))


@app.command(epilog="Example: unpad compare zh_chat-1 zh_chat-2 --out compare.html")
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN ...", help="Two or more runs.", autocompletion=_runs)],
    out: Annotated[Path, typer.Option(help="The page of curves and tables to write.")] = Path("compare.html"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Put runs side by side: where their recipes differ, what they reached, and a page with their curves."""
    from unpad.run.compare import compare

    found = compare(runs, out)
    if as_json:
        _print_json(found.to_json())
    else:
        _print_lines([*found.lines(), "", str(out)])


@app.command(epilog="Example: unpad bench zh_chat")
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
        _print_json(table.to_json())
    else:
        _print_lines(table.lines())


def main() -> None:
    """Run a verb; print an error that a user can cause as three lines, without a traceback, and exit with its code."""
    options: dict[str, bool] = {}
    _prepare_streams()
    try:
        try:
            _refuse_bytes(sys.argv[1:])
            app(prog_name="unpad", obj=options)
        finally:
            sys.stdout.flush()  # raises BrokenPipeError here rather than while the interpreter ends
    except UnpadError as error:
        if options.get("debug"):
            traceback.print_exc()
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except (MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        if options.get("debug"):
            traceback.print_exc()
        what = (str(error).splitlines() or [""])[0][:200] or "the work does not fit"
        fix = "free memory, or use less data, a smaller model or a lower plan.tokens_per_micro"
        print(OutOfMemoryError(what, fix=fix), file=sys.stderr)
        sys.exit(OutOfMemoryError.exit_code)
    except (KeyboardInterrupt, SystemExit) as end:  # the library of the verbs turns a Ctrl-C into an exit
        if isinstance(end, SystemExit) and end.code != Interrupted.exit_code:
            raise
        print("Interrupted: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(Interrupted.exit_code)
    except OSError as error:
        sys.exit(_end_output(error))


def _end_output(error: OSError) -> int:
    """Give up standard output, and return the exit code; an error of another file is raised again."""
    left = isinstance(error, BrokenPipeError)  # the reader has closed the pipe, which is no error
    if not left and (error.errno not in (errno.ENOSPC, errno.EIO) or error.filename is not None):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter tries once more
    if left:
        return 141
    fix = "write it elsewhere, or free some space"
    print(DiskError(f"the output cannot be written: {error.strerror}", fix=fix), file=sys.stderr)
    return DiskError.exit_code


def _prepare_streams() -> None:
    """Escape characters that a terminal cannot show, such as those of a file's name that is not UTF-8."""
    if sys.stdout is None:  # closed, as `unpad train >&-` does
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _refuse_bytes(arguments: list[str]) -> None:
    """Refuse names that are not UTF-8: no file of a run could hold them."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(argument).decode("utf-8", "backslashreplace")
            fix = "rename the file or folder, for example with `convmv -f GBK -t UTF-8 --notest NAME`"
            raise RecipeError("E_NAME the name is not UTF-8", where=shown, fix=fix) from None


if __name__ == "__main__":
    main()
