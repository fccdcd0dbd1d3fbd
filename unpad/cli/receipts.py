"""Verbs that account for a run's training: recompute a step, and find the steps of a row."""

from __future__ import annotations

from typing import Annotated

import typer

from unpad.cli.completion import override_words
from unpad.cli.early import check_run
from unpad.cli.options import Debug, Json, RunArgument
from unpad.cli.output import print_json
from unpad.errors import REPLAY_DIFFERS
from unpad.terminal.printing import print_lines
from unpad.terminal.progress import progress

verbs = typer.Typer()
Moved = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key=value ...]",
        help="New places of data that was moved, such as data.text=NEW.",
        autocompletion=override_words,
    ),
]


@verbs.command(epilog="Example: unpad replay zh_chat-1 --step 120")
def replay(
    run: RunArgument,
    overrides: Moved = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step of the run; default the last one that follows a checkpoint.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Recompute a step of a run, compare it bit for bit with the record, and name the rows that it learnt from.

    Exit code 16 when it differs. Steps since the checkpoint before it are computed as well; without a checkpoint, all
    steps of the stage.
    """
    check_run(run, overrides or [])
    from unpad.receipts.replay import replay

    with progress("replaying"):
        receipt = replay(run, step, overrides or [])
    if as_json:
        print_json(receipt.to_json())
    else:
        print_lines(receipt.lines())
    raise typer.Exit(0 if receipt.equal else REPLAY_DIFFERS)


@verbs.command(epilog="Example: unpad trace zh_chat-1 my.jsonl:12    or    unpad trace images-1 photos/cat/1.png")
def trace(
    run: RunArgument,
    row: Annotated[
        str, typer.Argument(metavar="FILE:LINE", help="A row of the run's data; a picture's file; a patient's id.")
    ],
    overrides: Moved = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show which steps of a run trained on a data row, or why none did."""
    check_run(run, overrides or [])
    from unpad.receipts.trace import trace

    with progress("tracing"):
        found = trace(run, row, overrides or [])
    if as_json:
        print_json(found.to_json())
    else:
        print_lines(found.lines())
