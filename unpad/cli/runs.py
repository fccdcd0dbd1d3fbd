"""Verbs that look at runs: lists, pages and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unpad.cli.completion import run_names
from unpad.cli.early import check_names
from unpad.cli.options import Debug, Json, RunArgument
from unpad.cli.output import print_json
from unpad.storage.paths import new_path, user_path
from unpad.terminal.printing import print_lines

verbs = typer.Typer()


@verbs.command(epilog="Example: unpad runs    or    unpad runs /data/experiments")
def runs(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", parser=user_path, help="List the runs in and below it; default runs/."),
    ] = None,
) -> None:
    """List runs, newest first, with date, step, held-out loss and size."""
    from unpad.run.summary import describe_runs

    print_lines(describe_runs(folder))


@verbs.command(epilog="Example: unpad report zh_chat-1")
def report(run: RunArgument) -> None:
    """Write the page of plots of a run and print its path."""
    from unpad.run.folder import find_run

    folder = find_run(run)
    from unpad.run.report.page import write_report

    print_lines([str(write_report(folder))])


@verbs.command(epilog="Example: unpad compare zh_chat-1 zh_chat-2 --out compare.html")
def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN RUN ...", help="Two or more runs.", autocompletion=run_names)
    ],
    out: Annotated[Path, typer.Option(parser=new_path, help="The page of curves and tables to write.")] = Path(
        "compare.html"
    ),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Put runs side by side: where their recipes differ, what they reached, and a page with their curves."""
    check_names(runs)
    from unpad.run.compare import compare

    found = compare(runs, out)
    if as_json:
        print_json(found.to_json())
    else:
        print_lines([*found.lines(), "", str(out)])
