"""docs/versions.md has the numbers, names and verbs of the code, and every file that names the version names one."""

import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main

import unpad
from unpad import api
from unpad.cli import app
from unpad.recipes.data import DataSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
CHANGES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
ROWS = re.findall(r"^\| .+ \| `(.+)` \| `(\w+)` of `unpad/([\w/]+)\.py` \|$", PAGE, re.MULTILINE)
# A number of a format: `X_FORMAT = 1`, also one of several names that are set at once.
NUMBERS = re.compile(r"^(?:\w*(?:FORMAT|VERSION|MAGIC|UPDATE_RULE)\b(?:, )?)+ = ", re.MULTILINE)
# Of TensorBoard, of files of any kind, and the words on a layout of dates.
OF_OTHERS = ("unpad/run/board.py", "unpad/data/sources/sniff.py", "unpad/recipes/data.py")


def public(cell: str) -> str:
    """A cell of the table of what is public."""
    found = re.search(rf"^\| {cell} \| (.*) \|$", PAGE, re.MULTILINE)
    assert found is not None, cell
    return found[1]


@pytest.mark.promise("versions.numbers")
@pytest.mark.parametrize(("value", "name", "module"), ROWS)
def test_a_number_of_the_page_is_that_of_the_code(value, name, module):
    number = getattr(import_module(f"unpad.{module.replace('/', '.')}"), name)
    assert (number.decode() if isinstance(number, bytes) else str(number)) == value


@pytest.mark.promise("versions.numbers")
def test_every_number_of_a_format_is_on_the_page():
    listed = {(f"unpad/{module}.py", name) for _, name, module in ROWS}
    found = set()
    for path in (ROOT / "unpad").rglob("*.py"):
        file = path.relative_to(ROOT).as_posix()
        for line in NUMBERS.findall(path.read_text(encoding="utf-8")):
            found |= {(file, name) for name in re.findall(r"\w+", line) if file not in OF_OTHERS}
    assert found == listed


@pytest.mark.promise("versions.numbers")
def test_rules_of_the_split_are_those_of_the_field():
    field = DataSettings.model_fields["split_version"]
    versions = " or ".join(f"`{version}`" for version in get_args(field.annotation))
    assert f"`data.split_version`: {versions}, by default `{field.default}`." in re.sub(r"\s+", " ", PAGE)


@pytest.mark.promise("versions.numbers")
def test_public_names_of_the_page_are_those_of_the_packages():
    pytest.importorskip("transformers")
    ours, of_hf = re.findall(r"`unpad(?:\.hf)?`: ([^;]+);", public("Python"))
    assert re.findall(r"\w+", ours) == unpad.__all__
    assert re.findall(r"\w+", of_hf) == import_module("unpad.hf").__all__


def verbs(command: Any, before: str = "") -> Iterator[str]:
    """Names of all verbs that do something, in the order of the help."""
    for name, one in command.commands.items():
        if not hasattr(one, "commands") or one.invoke_without_command:
            yield before + name
        if hasattr(one, "commands"):
            yield from verbs(one, f"{before}{name} ")


@pytest.mark.promise("versions.numbers")
def test_verbs_of_the_page_are_those_of_the_program():
    assert re.findall(r"`([^`]+)`", public("verbs")) == list(verbs(typer.main.get_command(app)))


@pytest.mark.promise("versions.deprecated")
def test_deprecated_names_of_the_page_are_those_that_warn_and_go_in_a_later_version():
    rows = re.findall(r"^\| `unpad\.(\w+)\(.*?\)` \| ([\d.]+) \| ([\d.]+) \| `(.+)` \|$", PAGE, re.MULTILINE)
    warn = {
        name for name in unpad.__all__ if name in vars(api) and "_deprecated(" in inspect.getsource(getattr(api, name))
    }
    assert {name for name, *_ in rows} == warn
    for name, since, until, _ in rows:
        first, now, last = (tuple(map(int, version.split("."))) for version in (since, VERSION, until))
        assert first <= now < last
        assert f"goes in {until}" in inspect.getsource(api._deprecated)
        assert f"`unpad.{name}`" in CHANGES.partition(f"## [{since}]")[2].partition("\n## ")[0]


@pytest.mark.promise("versions.numbers")
def test_the_version_stands_in_the_changelog_and_in_the_page_that_installs_it():
    newest = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", CHANGES, re.MULTILINE)
    assert newest[0] == VERSION
    installing = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
    assert re.findall(r"unpad-(\d[\d.]*)-", installing) == [VERSION]
