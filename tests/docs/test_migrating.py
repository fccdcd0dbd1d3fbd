"""docs/migrating.md maps to fields, commands and functions that exist."""

import inspect
import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import typer.main

from unpad.cli import GROUPS, app
from unpad.cli.main import INSTEAD
from unpad.models import model_config
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe

TEXT = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")


def spans() -> list[str]:
    """Code in the second column of the tables."""
    return [
        code
        for line in TEXT.splitlines()
        if line.startswith("| ")
        for code in re.findall(r"`([^`]+)`", re.split(r"(?<!\\) \| ", line)[1])
    ]


@pytest.mark.parametrize(
    ("recipe", "section", "at_least"),
    [("zh_chat", "Small Chinese model", 20), ("llm", "Language model", 20), ("events", "Patients", 5)],
)
def test_every_field_is_one_of_the_recipe(recipe, section, at_least):
    _, _, part = TEXT.partition(f"\n## {section}")
    num_fields = 0
    for line in part.partition("\n## ")[0].splitlines():
        fields = re.findall(r"`(\w+(?:\.\w+)*=[^`]+)`", line)
        loaded = load_recipe(recipe, [field if is_whole(field) else f"generate.{field}" for field in fields])
        model_config(loaded.model)
        num_fields += len(fields)
    assert num_fields > at_least


def is_whole(field: str) -> bool:
    """Whether a field stands there with its section; those of `generate` may go without."""
    key = field.partition("=")[0]
    return "." in key or key in Recipe.model_fields


def test_every_command_and_function_exists():
    root: Any = typer.main.get_command(app)
    for code in spans():
        if code.startswith("unpad."):
            name, _, arguments = code.removeprefix("unpad.").rstrip(")").partition("(")
            module, _, function = f"unpad.{name}".rpartition(".")
            parameters = inspect.signature(resolve_name(f"{module}:{function}")).parameters
            given = {a.partition("=")[0].strip() for a in arguments.split(",") if a}
            assert given <= set(parameters) | {"strategy"}, code
        elif code.startswith("unpad "):
            words = code.split()
            options = {option for parameter in root.commands[words[1]].params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= options, code
        elif code.startswith("--") and code != "--help":
            options = {option for command in root.commands.values() for p in command.params for option in p.opts}
            assert code.split()[0] in options, code


@pytest.mark.parametrize("words", [("train", "events", "--batch_size", "4"), ("train", "events", "--devices=2")])
def test_a_command_of_another_program_is_refused_with_the_page(words, unpad):
    assert "docs/migrating.md has" in unpad(*words, code=2).err.splitlines()[-1]
    assert "docs/migrating" not in unpad("trian").err


@pytest.mark.promise("cli.names")
def test_an_old_or_guessed_name_of_a_verb_is_answered_with_ours_in_one_line(unpad):
    root: Any = typer.main.get_command(app)
    for name, now in INSTEAD.items():
        refused = unpad(name, "zh_chat", "--out", "x")
        assert (refused.code, refused.out) == (2, "")
        assert refused.err == f"unpad {name} is no verb; use: unpad {now}\n"
        words = now.split()
        options = {option for parameter in root.commands[words[0]].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options
        assert f"| `{name}` |" in TEXT or f"| `{name} " in TEXT
        assert name not in root.commands


@pytest.mark.promise("cli.names")
def test_the_help_has_every_verb_once_in_its_group_within_eighty_columns(unpad, monkeypatch):
    root: Any = typer.main.get_command(app)
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(name for name, verb in root.commands.items() if not verb.hidden)
    assert len(listed) <= 18
    monkeypatch.setenv("COLUMNS", "80")
    lines = unpad("--help").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.strip(":") for line in lines if line.strip(":") in GROUPS] == list(GROUPS)
