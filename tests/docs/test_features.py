"""docs/features.md names tests that exist, one at least for every promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")


def test_every_promise_names_a_test() -> None:
    promises = re.split(r"^- ", TEXT, flags=re.MULTILINE)[1:]
    assert len(promises) > 110
    assert [promise for promise in promises if "`tests/" not in promise] == []


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)
    assert len(named) == TEXT.count("`tests/") - TEXT.count("`tests/docs/test_features.py`") + 1
    defined: dict[str, set[str]] = {}
    for path in {path for path, _ in named}:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        defined[path] = {"", *(node.name for node in tree.body if isinstance(node, ast.FunctionDef))}
    assert [f"{path}::{name}" for path, name in named if name not in defined[path]] == []
