"""docs/data_path.md names files, functions and classes that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "data_path.md").read_text(encoding="utf-8")


def defined(path: Path) -> set[str]:
    """Names of functions, classes and methods of a file."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def test_every_file_of_the_path_exists() -> None:
    files = set(re.findall(r"`((?:\w+/)+\w+\.py)`", TEXT))
    assert len(files) > 20
    assert [file for file in files if not (ROOT / "unpad" / file).is_file()] == []


def test_every_function_of_the_path_exists() -> None:
    names = set(re.findall(r"(?:`|^\d  )((?:\w+/)*\w+)\.((?!py\b)\w+(?:\.\w+)?)(?:`| )", TEXT, re.MULTILINE))
    files = {file for file, _ in names if "/" in file}
    assert len(files) > 30
    assert [file for file in files if not (ROOT / "unpad" / f"{file}.py").is_file()] == []
    known = {file: defined(ROOT / "unpad" / f"{file}.py") for file in files}
    assert [f"{file}.{name}" for file, name in names if file in files and name not in known[file]] == []
