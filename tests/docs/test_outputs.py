"""Commands of the pages exist with their options and fields, and print what the pages show."""

import re
import runpy
import shlex
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from rich.console import Console

from unpad import api
from unpad.cli import app
from unpad.nn.native import library
from unpad.recipes.file import load_recipe, recipe_names
from unpad.trials import preview
from unpad.trials.strategy_table import process_counts

OUTPUTS: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "outputs.py"))
BLOCKS = [block for page in OUTPUTS["PAGES"] for block in OUTPUTS["blocks"](page)]


def name(block: list[Any]) -> str:
    return f"{block[0].page}:{block[-1].command}"


QUICK = [block for block in BLOCKS if block[-1].command.startswith(("unpad data", "unpad prove"))]
EXAMPLES = [block for block in BLOCKS if block[-1].command.startswith("python ")]
NUMBER = re.compile(r"\d+(?:\.\d+)?")
FEW_STEPS = ("train.max_steps=2", "train.threads=1")


def example_of(block: list[Any]) -> Path:
    path: Path = OUTPUTS["ROOT"] / block[-1].command.removeprefix("python ")
    return path


def trains(block: list[Any]) -> bool:
    """True for an example that trains a recipe by `unpad.train`."""
    return "unpad.train(" in example_of(block).read_text(encoding="utf-8")


def beginning(line: str) -> str:
    """A line up to what a model has learnt: the first number or colon."""
    return re.split(r"[\d:]", line, maxsplit=1)[0]


@pytest.mark.nightly
@pytest.mark.parametrize("block", QUICK, ids=name)
def test_a_command_prints_what_its_page_shows(block, native_lines, unpad, monkeypatch):
    """`make readme` runs the others, which train."""
    monkeypatch.setenv("COLUMNS", "80")

    def within(words: list[str], folder: str) -> str:
        monkeypatch.chdir(folder)
        done = unpad(*words[1:])
        return done.out + done.err

    for shown, printed in OUTPUTS["run"](block, within):
        assert OUTPUTS["drift"](shown, printed) is None, printed


def test_the_pages_show_the_tables_of_the_packaged_example(monkeypatch):
    """Without the trial steps: memory and time are those of a machine."""
    shown = {block[0].page: block[0] for block in BLOCKS if block[0].command.startswith("unpad plan zh_chat")}
    assert set(shown) == {"plan.md", "processes.md"}
    counts = process_counts(shown["processes.md"].command.partition("--processes ")[2])
    monkeypatch.setattr(preview, "_try", lambda *_: preview.StepCost(2048, 1.0, 700 << 20, 500 << 20))
    out = StringIO()
    preview.preview("zh_chat", [], None, Console(file=out, width=200), counts)
    for page in shown.values():
        assert OUTPUTS["drift"](page, out.getvalue()) is None, out.getvalue()


@pytest.fixture
def native_lines(request: pytest.FixtureRequest) -> None:
    """Skip a certificate with lines on native kernels where there are none."""
    block = request.getfixturevalue("block")
    if any(shown.command.startswith("unpad prove") for shown in block) and not (library.computes(torch.bfloat16)):
        pytest.skip("the page shows the certificate of a processor with native kernels in bf16")


@pytest.mark.promise("versions.examples")
@pytest.mark.nightly
@pytest.mark.parametrize("block", [block for block in EXAMPLES if not trains(block)], ids=name)
def test_an_example_prints_what_its_page_shows_and_learns_as_much(block):
    """Words are compared, and numbers to a tenth: what a model has learnt depends on the kind of processor."""
    for shown, printed in OUTPUTS["run"](block):
        assert OUTPUTS["drift"](shown, printed) is None, printed
        numbers = [list(map(float, NUMBER.findall(text))) for text in ("\n".join(shown.expected), printed)]
        assert numbers[1] == pytest.approx(numbers[0], rel=0.1, abs=0.1), printed


@pytest.mark.nightly
@pytest.mark.parametrize("block", [block for block in EXAMPLES if trains(block)], ids=name)
def test_an_example_on_a_recipe_prints_its_lines(block, tmp_path, monkeypatch, capsys):
    """After a few steps; `make readme` lets it learn as much as its page shows."""
    train = api.train
    monkeypatch.setattr("unpad.train", lambda *fields, **options: train(*fields, *FEW_STEPS, **options))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example_of(block)), run_name="__main__")
    assert list(map(beginning, capsys.readouterr().out.splitlines())) == list(map(beginning, block[0].expected))


@pytest.mark.promise("versions.examples")
def test_every_example_stands_on_its_page_with_its_output():
    shown = {block[-1].command.removeprefix("python ") for block in EXAMPLES}
    root = OUTPUTS["ROOT"]
    takes_words = {"examples/search.py", "examples/ray_train.py"}  # a recipe, a folder
    assert shown | takes_words == {str(path.relative_to(root)) for path in (root / "examples").glob("*.py")}
    assert all(block[-1].expected for block in EXAMPLES)


@pytest.mark.parametrize(
    ("expected", "drifted"),
    [
        (("steps 43", "..."), None),
        (("steps 44", "..."), "steps 44"),
        (("...", "took 9 min"), None),
        (("...", "took 9 max"), "took 9 max"),
        (("steps 43", "took 3 min"), "took 3 min"),
        (("steps ...", "loss 0.5  # of all", "took 3 min"), None),
        (("steps 43", "loss 0.5"), "(the output goes on)"),
    ],
)
def test_a_line_that_drifts_is_named(expected, drifted):
    shown = OUTPUTS["Shown"]("plan.md", 1, "unpad plan", expected)
    assert OUTPUTS["drift"](shown, "steps   43\nloss 0.5\ntook 3 min\n") == drifted


def commands() -> Iterator[tuple[list[str], list[str]]]:
    """Each command line of the pages that begins with unpad, without the comment behind it."""
    for page in OUTPUTS["PAGES"]:
        for line in page.read_text(encoding="utf-8").splitlines():
            if found := re.match(r"(?:    |\$ )(unpad [a-z]+\b.*)", line):
                for part in re.split(r" (?:&&|\|) ", found[1].partition("  #")[0]):
                    yield [page.name], shlex.split(part)


@pytest.mark.parametrize(("page", "words"), list(commands()), ids=lambda value: " ".join(value))
def test_a_command_of_the_pages_has_its_options_and_fields(page, words):
    command: Any = typer.main.get_command(app)
    rest = words[1:]
    while hasattr(command, "commands") and rest:
        command, rest = command.commands[rest[0]], rest[1:]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in rest if word.startswith("--")} <= options
    fields = [
        word for word in rest if "=" in word and not word.startswith("--") and ".." not in word and "," not in word
    ]
    recipe = next((word for word in rest if word in recipe_names()), "zh_chat")
    sectioned = [field if "." in field.partition("=")[0] else f"generate.{field}" for field in fields]
    load_recipe(recipe, sectioned)
