"""Benchmarks import names that exist; most of them are too slow to run in tests."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_name_that_a_benchmark_imports_from_the_package_exists(script: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))) if _of_package(node)]
    names = {(node.module or "", alias.name) for node in imports for alias in node.names}
    assert [f"{module}.{name}" for module, name in sorted(names) if not hasattr(import_module(module), name)] == []


def _of_package(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "unpad"


def test_every_kernel_that_the_benchmark_takes_away_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS[0].parent))
    for part in import_module("kernels").PARTS.values():
        with part():  # raises where the module has no kernels to take away
            pass
