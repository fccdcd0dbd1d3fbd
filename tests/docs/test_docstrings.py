"""Docstrings and comments name files that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_files_that_the_package_names_are_there():
    folders = ("unpad", "benchmarks", "tests", "docs")
    paths = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    gone = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "unpad").rglob("*.py"))
        for name in re.findall(r"`([\w/]+\.py)`", path.read_text(encoding="utf-8"))
        if not any(each.endswith(f"/{name}") for each in paths)
    ]
    assert gone == []
