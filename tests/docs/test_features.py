"""docs/features.md speaks of what exists: its tests, its rows, and every field and command it maps to."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

import unpad
from unpad import cli
from unpad.models import model_config
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
ROWS = [
    *range(1, 18), *range(19, 36), *range(38, 55), *range(58, 116), *range(117, 121),
]  # fmt: skip


def table_rows() -> dict[int, str]:
    """What stands in the last column of every numbered row."""
    found = re.findall(r"^\| (\d+) \|(.*)\|$", TEXT, re.MULTILINE)
    assert len({number for number, _ in found}) == len(found), "a row stands there twice"
    return {int(number): rest.rpartition(" | ")[2] for number, rest in found}


def test_every_row_is_there_and_names_a_test() -> None:
    rows = table_rows()
    assert sorted(rows) == ROWS
    assert [number for number, shown_by in rows.items() if "::test_" not in shown_by] == []


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) > 100
    defined: dict[str, set[str]] = {}
    for path in {path for path, _ in named}:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        defined[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert [f"{path}::{name}" for path, name in named if name not in defined[path]] == []


def spans(section: str) -> list[str]:
    """Code in the second column of the mapping tables."""
    _, _, text = TEXT.partition(section)
    return [
        code
        for line in text.splitlines()
        if line.startswith("| ")
        for code in re.findall(r"`([^`]+)`", re.split(r"(?<!\\) \| ", line)[1])
    ]


@pytest.mark.parametrize(("recipe", "section"), [("zh_chat", "### Small Chinese model"), ("llm", "### Language model")])
def test_every_field_of_the_mapping_is_one_of_the_recipe(recipe: str, section: str) -> None:
    _, _, part = TEXT.partition(section)
    num_fields = 0
    for line in part.partition("\n### ")[0].splitlines():
        fields = re.findall(r"`(\w+(?:\.\w+)*=[^`]+)`", line)
        loaded = load_recipe(recipe, [field if is_whole(field) else f"generate.{field}" for field in fields])
        model_config(loaded.model)
        num_fields += len(fields)
    assert num_fields > 20


def is_whole(field: str) -> bool:
    """Whether a field stands there with its section; those of `generate` may go without."""
    key = field.partition("=")[0]
    return "." in key or key in Recipe.model_fields


def test_every_command_and_function_of_the_mapping_exists() -> None:
    root: Any = typer.main.get_command(cli.app)
    for code in spans("## From older commands to ours"):
        if code.startswith("unpad."):
            name, _, arguments = code.removeprefix("unpad.").rstrip(")").partition("(")
            parameters = inspect.signature(getattr(unpad, name)).parameters
            given = [a.partition("=")[0].strip() for a in arguments.split(",")]
            assert set(given) <= set(parameters) | {"strategy"}, code
        elif code.startswith("unpad "):
            words = code.split()
            options = {option for parameter in root.commands[words[1]].params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= options, code
        elif code.startswith("--") and code != "--help":
            options = {option for command in root.commands.values() for p in command.params for option in p.opts}
            assert code.split()[0] in options, code
