"""The command line: one verb per stage, and each verb calls one function.

Only standard modules and typer are imported at the top of these files; every verb imports what it needs, so that
`unpad --help` starts fast. A file has the verbs of one topic and collects them in its `verbs`; `app` has them all, and
`unpad.cli.main` runs it.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from unpad.cli import data, models, runs, serving, training, trials
from unpad.terminal.printing import print_lines

GROUPS = {
    "Start": ("train", "recipes"),
    "Check": ("data", "plan", "doctor"),
    "Look": ("runs", "eval", "compare"),
    "Use": ("predict", "generate", "chat", "embed", "serve"),
    "Convert": ("import", "export"),
    "Prove a run": ("prove", "replay", "trace"),
}


class Grouped(TyperGroup):
    """The verbs, in groups in the help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for every group, its first sentences cut to the width."""
        width = formatter.width - 6 - max(map(len, self.commands))
        for group, names in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])


app = typer.Typer(
    cls=Grouped,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Train transformers on ragged data without padding, with proof that batching changed nothing.",
)
for topic in (training, trials, models, serving, runs):
    app.add_typer(topic.verbs)
app.add_typer(data.verbs, name="data")
app.add_typer(training.recipe_verbs, name="recipes")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print_lines([f"unpad {version('unpad')}"])
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass
