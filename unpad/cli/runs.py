"""Verbs that look at runs: lists, pages, comparisons, and the account of a step or of a row."""

from pathlib import Path
from typing import Annotated

import typer

from unpad.cli import options
from unpad.errors import REPLAY_DIFFERS
from unpad.storage.paths import new_path, refuse_format, user_path
from unpad.terminal.printing import print_lines
from unpad.terminal.progress import progress

verbs = typer.Typer()


@verbs.command(epilog="Example: unpad runs    or    unpad runs zh_chat-1    or    unpad runs /data/experiments")
def runs(
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="[DIR|RUN]", help="List the runs in and below it, default runs/; of a run, write its page of plots."
        ),
    ] = None,
) -> None:
    """List runs, newest first, with date, step, held-out loss and size; or write the page of plots of one run."""
    from unpad.run.folder import COMMAND, find_run

    folder = None if place is None else user_path(place)
    if folder is not None and (not folder.is_dir() or (folder / COMMAND).is_file()):
        report(str(find_run(str(place))))
        return
    from unpad.run.compare import describe_runs

    print_lines(describe_runs(folder))


@verbs.command(hidden=True, epilog="Example: unpad report zh_chat-1")  # scripts call it so
def report(run: options.RunArgument) -> None:
    """Write the page of plots of a run and print its path, as `unpad runs RUN` does."""
    from unpad.run.folder import find_run
    from unpad.run.report.page import write_report

    print_lines([str(write_report(find_run(run)))])


@verbs.command(epilog="Example: unpad compare zh_chat-1 zh_chat-2 --out compare.html")
def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN RUN ...", help="Two or more runs.", autocompletion=options.run_names)
    ],
    out: Annotated[Path, typer.Option(parser=new_path, help="The page of curves and tables to write.")] = Path(
        "compare.html"
    ),
    rows: Annotated[
        bool, typer.Option("--rows", help="Also evaluate them, and show differences on the rows that both hold out.")
    ] = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Put runs side by side: where their recipes differ, what they reached, and a page with their curves.

    With --rows: differences of their metrics to the first run's, with 95 % intervals over groups of rows.
    """
    refuse_format(out, ".html")
    options.check_names(runs)
    if rows:
        options.load_torch()
        from unpad.evaluation.paired import check_families

        check_families(runs)
    from unpad.run.compare import compare

    found = compare(runs, out)
    shown, lines = found.to_json(), [*found.lines(), "", str(out)]
    if rows:
        from unpad.evaluation.paired import compare_rows

        others = compare_rows(runs, found.names)
        shown |= {"rows": [one.to_json() for one in others]}
        lines += [line for one in others for line in ("", *one.lines())]
    options.print_found(as_json, lambda: shown, lambda: lines)


Moved = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key=value ...]",
        help="New places of data that was moved, such as data.text=NEW.",
        autocompletion=options.override_words,
    ),
]


@verbs.command(epilog="Example: unpad replay zh_chat-1 --step 120")
def replay(
    run: options.RunArgument,
    overrides: Moved = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step of the run; default the last one that follows a checkpoint.")
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Recompute a step of a run, compare it bit for bit with the record, and name the rows that it learnt from.

    Exit code 16 when it differs. Steps since the checkpoint before it are computed as well; without a checkpoint, all
    steps of the stage.
    """
    options.check_run(run, overrides or [])
    from unpad.receipts.replay import replay

    with progress("replaying"):
        receipt = replay(run, step, overrides or [])
    options.print_found(as_json, receipt.to_json, receipt.lines)
    raise typer.Exit(0 if receipt.equal else REPLAY_DIFFERS)


@verbs.command(epilog="Example: unpad trace zh_chat-1 my.jsonl:12    or    unpad trace images-1 photos/cat/1.png")
def trace(
    run: options.RunArgument,
    row: Annotated[
        str, typer.Argument(metavar="FILE:LINE", help="A row of the run's data; a picture's file; a patient's id.")
    ],
    overrides: Moved = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show which steps of a run trained on a data row, or why none did."""
    options.check_run(run, overrides or [])
    from unpad.receipts.trace import trace

    with progress("tracing"):
        found = trace(run, row, overrides or [])
    options.print_found(as_json, found.to_json, found.lines)
