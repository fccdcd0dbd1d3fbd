"""Scripts of `benchmarks/` start as their docstrings and the pages say: by path, from any folder."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "benchmarks").rglob("*.py"))}
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
NAMED = {
    name for page in PAGES for name in re.findall(r"python (benchmarks/[\w/]+\.py)", page.read_text(encoding="utf-8"))
}
OF_THE_CHECKOUT = re.compile(r"^(?:from|import) (?:benchmarks|tests)\b", re.MULTILINE)
# What a script without options is run with to do little.
TINY = {
    "plan.py": ["bucket"], "planted.py": ["none"], "small.py": ["sayings", "out"],
    "templates.py": ["qwen3"],
}  # fmt: skip


def starts_by_path(text: str) -> bool:
    """Python puts the script's folder on its path, and not the checkout, where `benchmarks` and `tests` are."""
    imported, added = OF_THE_CHECKOUT.search(text), text.find("sys.path.insert(")
    return imported is None or 0 <= added < imported.start()


@pytest.mark.slow
def test_every_script_finds_what_it_imports():
    unstarted = [path.name for path, text in SOURCES.items() if "__main__" in text and not starts_by_path(text)]
    assert unstarted == [], "python benchmarks/NAME.py ends with ModuleNotFoundError"
    names = {
        (node.module or "", alias.name)
        for text in SOURCES.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "unpad"
        for alias in node.names
    }
    absent = [(module, name) for module, name in names if not hasattr(import_module(module), name)]
    assert [one for one in absent if not find_spec(".".join(one))] == []


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_script_that_a_page_names_starts(name, tmp_path):
    words = ["--help"] if "argparse" in SOURCES[ROOT / name] else TINY[Path(name).name]
    (tmp_path / "sayings").mkdir()
    ended = subprocess.run([sys.executable, ROOT / name, *words], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
