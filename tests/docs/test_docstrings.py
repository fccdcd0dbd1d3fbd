"""Docstrings name the thing first."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "unpad"
QUESTIONS = ("What", "Whether", "How", "Why", "Where", "When", "Which", "Who")


def test_no_docstring_begins_as_a_question_does() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {text.splitlines()[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
        and text.split()[0] in QUESTIONS
    ]
    assert found == []


def test_files_that_docstrings_name_are_there() -> None:
    paths = [f"/{path.relative_to(PACKAGE.parent)}" for path in PACKAGE.parent.rglob("[a-z]*.py")]
    gone = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in re.findall(r"`([\w/]+\.py)`", path.read_text(encoding="utf-8"))
        if not any(each.endswith(f"/{name}") for each in paths)
    ]
    assert gone == []
