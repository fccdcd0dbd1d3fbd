"""Scripts of `benchmarks/` start as their docstrings say: by path, from any folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    path.relative_to(ROOT).as_posix(): text
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if 'if __name__ == "__main__"' in (text := path.read_text(encoding="utf-8"))
}
OF_THE_CHECKOUT = re.compile(r"^(?:from|import) (?:benchmarks|tests)\b", re.MULTILINE)


def starts_by_path(text: str) -> bool:
    """Python puts the script's folder on its path, and not the checkout, where `benchmarks` and `tests` are."""
    imported, added = OF_THE_CHECKOUT.search(text), text.find("sys.path.insert(")
    return imported is None or 0 <= added < imported.start()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_finds_what_it_imports(script: str) -> None:
    assert starts_by_path(SCRIPTS[script]), "python benchmarks/NAME.py ends with ModuleNotFoundError"


def test_a_script_that_needs_the_checkout_on_its_path_is_found() -> None:
    assert len(SCRIPTS) > 20
    assert not starts_by_path("import sys\n\nfrom benchmarks.size import main\n")
    assert not starts_by_path("import sys\n\nfrom tests.helpers import toy\nsys.path.insert(0, '.')\n")
    assert starts_by_path("sys.path.insert(0, '.')\n\nfrom tests.helpers import toy\n")
